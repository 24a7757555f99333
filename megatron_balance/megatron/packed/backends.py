"""Which attention a packed job has, and what flash-attn and Transformer Engine cannot do: refused before anything is computed.

Decided by flags, installed versions and GPU alone. Stock's micro-batches have one shape and a causal mask,
packed ones bounds of sequences ("thd"), which fewer kernels take: what trains in stock can then fail in its first step.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron_balance.errors import BalanceError
from megatron_balance.megatron.packed.options import FLAG as PACKING
from megatron_balance.megatron.packed.options import FLASH, TE, TORCH
from megatron_balance.megatron.packed.versions import pads_values

FLAG = f"{PACKING}-attention"
ENGINE = "transformer_engine"  # a value of --transformer-impl

Version = tuple[int, ...]


@dataclass(frozen=True)
class Job:
    """What of a job its attention depends on.

    Attributes:
        implementation: Megatron's ``--transformer-impl``, after the CPU runtime has had its say.
        half: whether it trains in fp16 or bf16.
        query_size, value_size: of a head's queries and keys, and of its values as attention gets them.
        dropout: of attention.
        windows: whether layers attend within sliding windows.
        backend: of ``--attention-backend``: ``auto``, ``flash``, ``fused`` or ``unfused``.
        max_logit: whether the largest logit is asked for.
        deterministic: ``--deterministic-mode``.
        context_size: context-parallel ranks.
        exchanges: how these exchange keys and values, of ``--cp-comm-type``, by layer.
        own_layers: whether layers or attention are not those that ``implementation`` says.
    """

    implementation: str
    half: bool = True
    query_size: int = 128
    value_size: int = 128
    dropout: float = 0.0
    windows: bool = False
    backend: str = "auto"
    max_logit: bool = False
    deterministic: bool = False
    context_size: int = 1
    exchanges: tuple[str, ...] = ("p2p",)
    own_layers: bool = False

    @classmethod
    def of(cls, args: Any) -> Job:
        """From Megatron's arguments, before they are validated or after."""
        variant, spec = getattr(args, "experimental_attention_variant", None), getattr(args, "spec", None)
        query_size, value_size = _head_sizes(args)
        window = getattr(args, "window_size", None)
        backend = getattr(args, "attention_backend", None) or "auto"
        exchanges = getattr(args, "cp_comm_type", None) or "p2p"
        return cls(
            implementation=args.transformer_impl,
            half=bool(args.fp16 or args.bf16),
            query_size=query_size,
            value_size=value_size,
            dropout=args.attention_dropout,
            windows=bool(window) and (window[0] != -1 or window[1] not in (-1, 0)),
            backend=getattr(backend, "name", backend),
            max_logit=any(getattr(args, name, False) for name in ("qk_clip", "log_max_attention_logit")),
            deterministic=bool(getattr(args, "deterministic_mode", False)),
            context_size=args.context_parallel_size,
            exchanges=(exchanges,) if isinstance(exchanges, str) else tuple(exchanges),
            own_layers=variant == "dsa" or (bool(spec) and not spec[0].startswith("megatron.core.")),
        )


def _head_sizes(args: Any) -> tuple[int, int]:
    """Of queries and keys, and of values; 0 where the model comes from a checkpoint later."""
    if getattr(args, "multi_latent_attention", False):
        size = args.qk_head_dim + args.qk_pos_emb_head_dim
        padded = getattr(args, "experimental_attention_variant", None) is None and pads_values()
        return size, size if padded else args.v_head_dim
    size = args.kv_channels or (args.hidden_size or 0) // (args.num_attention_heads or 1)
    return size, size


class Package(NamedTuple):
    """An installed package: its version, None where it is not there or cannot be used, and then why."""

    version: Version | None = None
    fault: str = "which is not installed"


@dataclass(frozen=True)
class Here:
    """What a process has to attend with.

    Attributes:
        capability: compute capability of its GPU; None without one.
        flash: flash-attn 2.
        engine: release of Transformer Engine, None without it.
        engine_has_flash: whether any flash-attn is there, which Transformer Engine would call.
    """

    capability: tuple[int, int] | None
    flash: Package = Package()  # noqa: RUF009  # immutable
    engine: Version | None = None
    engine_has_flash: bool = False

    @classmethod
    def found(cls, capability: tuple[int, int] | None, implementation: str) -> Here:
        """What can be imported; only what layers of an implementation may call is looked for, and only beside a GPU."""
        if capability is None:
            return cls(None)
        if implementation == ENGINE:
            return cls(capability, engine=_engine(), engine_has_flash=any(_exists(name) for name in _FLASHES))
        return cls(capability, flash_attn())


_FLASHES = ("flash_attn", "flash_attn_3", "flash_attn_interface")  # flash-attn 2 and 4, 3, 3 of old builds


def flash_attn() -> Package:
    """The flash-attn whose kernel for sequences of different lengths can be imported."""
    if not _exists("flash_attn"):
        return Package()
    try:
        package = importlib.import_module("flash_attn")
        package.flash_attn_varlen_func  # noqa: B018  # not in flash-attn-4, which shares the name of the package
        return Package(_release(package.__version__), "")
    except Exception as error:  # a build for another torch may raise anything
        return Package(None, f"which cannot be used here ({type(error).__name__}: {error})")


def _engine() -> Version | None:
    if not _exists(ENGINE):
        return None
    from megatron.core.utils import get_te_version

    with contextlib.suppress(ImportError):  # one that cannot be imported is no different
        found = get_te_version()
        return found.release if found is not None and any(found.release) else None
    return None


def _exists(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _release(version: str) -> Version:
    from packaging.version import Version as Parsed  # a requirement of Megatron's

    return Parsed(version).release


@dataclass(frozen=True)
class Limit:
    """What kernels cannot do.

    Attributes:
        kernels: that cannot.
        applies: whether a job asks for it.
        reason: in a few words.
        since, before: releases of Transformer Engine with this limit.
    """

    kernels: tuple[str, ...]
    applies: Callable[[Job, Here], bool]
    reason: str
    since: Version = (0,)
    before: Version = (1000,)


_FUSED, _UNFUSED = "fused", "unfused"
_MUCH_SHARED_MEMORY = ((8, 0), (9, 0))


def _too_large(job: Job, here: Here) -> bool:
    """Whether the backward pass of a head does not fit into little shared memory.

    With dropout it is refused up to 2.7.3, and computes nothing from 2.7.4 on.
    """
    return job.query_size > 192 and (job.query_size <= 224 or job.dropout > 0 or here.flash.version < (2, 5, 5))


# flash_attn/flash_attn_interface.py and csrc/flash_attn/flash_api.cpp of flash-attn 2.3 - 2.8.
_OF_FLASH = (
    Limit((FLASH,), lambda job, here: here.capability is None, "a GPU"),
    Limit((FLASH,), lambda job, here: here.flash.version is None, "the package flash-attn"),
    Limit((FLASH,), lambda job, here: here.flash.version < (2, 4, 1), "flash-attn 2.4.1 or newer"),
    Limit((FLASH,), lambda job, here: here.capability < (8, 0), "a GPU of Ampere or newer"),
    Limit((FLASH,), lambda job, here: not job.half, "--bf16 or --fp16"),
    Limit((FLASH,), lambda job, here: job.query_size > 256, "heads of up to 256"),
    Limit(
        (FLASH,),
        lambda job, here: job.query_size != job.value_size,
        "heads whose values are as large as their queries (Megatron pads those of latent attention from 0.18.2 on)",
    ),
    Limit(
        (FLASH,),
        lambda job, here: here.capability not in _MUCH_SHARED_MEMORY and _too_large(job, here),
        "heads of up to 192 on this GPU (of 225 to 256 without --attention-dropout, too, from flash-attn 2.5.5 on)",
    ),
    Limit(
        (FLASH,),
        lambda job, here: job.context_size > 1,
        "--context-parallel-size 1 (it attends to a rank's own tokens alone)",
    ),
)

_OLD = "Transformer Engine before 2.11"

# get_attention_backend of Transformer Engine 1.13 - 2.18; what cuDNN itself takes is known in the first step only.
_OF_ENGINE = (
    Limit((_UNFUSED,), lambda job, here: True, _OLD, before=(2, 11)),
    Limit((_UNFUSED,), lambda job, here: job.context_size > 1, "context parallelism"),
    Limit((FLASH, _FUSED), lambda job, here: not job.half, "fp32"),
    Limit((FLASH,), lambda job, here: here.capability < (8, 0), "a GPU before Ampere"),
    Limit((_FUSED,), lambda job, here: here.capability < (9, 0), "a GPU before Hopper"),
    Limit((FLASH,), lambda job, here: not here.engine_has_flash, "flash-attn is not installed"),
    Limit((FLASH,), lambda job, here: job.max_logit, "--qk-clip or --log-max-attention-logit"),
    Limit(
        (_FUSED,),
        lambda job, here: job.max_logit,
        "--qk-clip or --log-max-attention-logit",
        since=(2, 9),
        before=(2, 11),
    ),
    Limit((_FUSED,), lambda job, here: here.capability == (12, 0), "this GPU (sm120)", since=(2, 9), before=(2, 14)),
    Limit(
        (_FUSED,),
        lambda job, here: job.deterministic and here.capability >= (10, 0),
        "--deterministic-mode on Blackwell",
        since=(2, 9),
        before=(2, 11),
    ),
    Limit((_FUSED, _UNFUSED), lambda job, here: job.backend == FLASH, "--attention-backend flash"),
    Limit((FLASH, _UNFUSED), lambda job, here: job.backend == _FUSED, "--attention-backend fused"),
    Limit((FLASH, _FUSED), lambda job, here: job.backend == _UNFUSED, "--attention-backend unfused"),
)

# How context-parallel ranks exchange what, from which release on within sequences, and what to take instead: the assertions of
# attention/dot_product_attention/context_parallel.py (attn_forward_func_with_cp) of Transformer Engine 2.0 - 2.18.
_EXCHANGES: dict[str, tuple[Version | None, str]] = {
    "a2a": ((2, 10), "p2p"),
    "all_gather": ((2, 18), "p2p (or a2a from 2.10 on)"),
    "a2a+p2p": (None, "p2p (or a2a from 2.10 on)"),
}


class Choice(NamedTuple):
    """The attention that is used, ``te``, ``flash`` or ``torch``, and why it is not a faster one."""

    kind: str
    note: str = ""


def chosen(asked: str, job: Job, here: Here) -> Choice:
    """The attention of a job.

    Args:
        asked: value of the flag.
        job: asks for it.
        here: what there is.

    Raises:
        BalanceError: what was asked for cannot be had here, or Transformer Engine's layers, which are to be trained, have none.
    """
    engine = job.implementation == ENGINE
    if asked == TE and not engine:
        raise BalanceError(
            f"{FLAG} {TE} needs the layers of Transformer Engine, but this job has --transformer-impl {job.implementation}:"
            f" change that, or give {TORCH}" + (f" or {FLASH}" if here.capability else "")
        )
    if asked in (FLASH, TORCH) and engine:
        raise BalanceError(
            f"{FLAG} {asked} is for the local layers, this job has Transformer Engine's, which attend within sequences"
            f" themselves: give --transformer-impl local, or leave {FLAG} out"
        )
    if engine:
        _refuse_engine(job, here)
        return Choice(TE)
    lack = None if asked == TORCH else _flash_lack(job, here)
    if asked == FLASH and lack is not None:
        raise BalanceError(f"{FLAG} {FLASH} needs {lack}: give {TORCH}")
    if asked == TORCH or (lack is not None and here.capability is None):
        return Choice(TORCH)
    return Choice(FLASH) if lack is None else Choice(TORCH, f"flash-attn would need {lack}")


def _flash_lack(job: Job, here: Here) -> str | None:
    """The first thing that flash-attn needs and has not."""
    for limit in _OF_FLASH:  # in this order: later ones ask for what earlier ones make sure of
        if limit.applies(job, here):
            missing = limit.reason == "the package flash-attn"
            return f"{limit.reason}, {here.flash.fault}" if missing else limit.reason
    return None


def _refuse_engine(job: Job, here: Here) -> None:
    """Refuse what Transformer Engine cannot attend to within sequences; nothing where there is none, which Megatron itself says.

    Raises:
        BalanceError: says what, and what to do.
    """
    if here.engine is None or here.capability is None or job.own_layers:
        return
    if job.context_size > 1:
        _refuse_exchange(job, here.engine)
    without: dict[str, list[str]] = {FLASH: [], _FUSED: [], _UNFUSED: []}
    for limit in _OF_ENGINE:
        if limit.since <= here.engine < limit.before and limit.applies(job, here):
            for kernel in limit.kernels:
                without[kernel].append(limit.reason)
    if all(without.values()):
        listed = "; ".join(f"no {kernel}: {', '.join(reasons)}" for kernel, reasons in without.items())
        newer = "take Transformer Engine 2.11 or newer" if without[_UNFUSED] == [_OLD] else "change one of these"
        raise BalanceError(
            f"{PACKING}: Transformer Engine {_text(here.engine)} has no attention within sequences for this job ({listed}): {newer}"
            + ("" if job.max_logit else ", or give --transformer-impl local")
        )


def _refuse_exchange(job: Job, engine: Version) -> None:
    for name, (since, instead) in _EXCHANGES.items():
        used = any(_same(exchange, name) for exchange in job.exchanges)
        if used and (since is None or engine < since):
            newer = "" if since is None else f", or Transformer Engine {_text(since)} or newer"
            raise BalanceError(
                f"{PACKING} cannot be used with --cp-comm-type {name} on Transformer Engine {_text(engine)}, which then attends to"
                f" rows of one shape only: take {instead}{newer}"
            )
    if job.windows and not any(_same(exchange, name) for exchange in job.exchanges for name in ("a2a", "all_gather")):
        raise BalanceError(
            f"{PACKING}: Transformer Engine has no sliding windows with --context-parallel-size {job.context_size} and"
            f" --cp-comm-type {' '.join(job.exchanges)}: give --cp-comm-type a2a (of documents from Transformer Engine 2.10 on)"
        )


def _same(exchange: str, name: str) -> bool:
    return exchange.replace("_", "").lower() == name.replace("_", "")


def _text(version: Version) -> str:
    return ".".join(map(str, version[:2]))
