"""Megatron Balance: pipeline stages of equal cost for Megatron-LM, without a fork."""

__all__ = ["__version__", "enable"]
__version__ = "0.1.0.dev0"


def enable() -> None:
    """Add our flags to the Megatron that `import megatron` finds; without one of them nothing changes.

    For training scripts that are started without `megatron_balance.run`: call it before the first Megatron import.
    """
    from megatron_balance.megatron.entry_points import enable as wrap_entry_points

    wrap_entry_points()
