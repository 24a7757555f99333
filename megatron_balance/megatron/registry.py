"""Replacing functions of Megatron: found by feature, applied once, undone on request.

A hook names a function by module and attribute. `Registry.apply` puts the wrapped function in that place and in every loaded
`megatron.*` module that imported the old one by name, so that it does not matter who imported what before us.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from megatron_balance.errors import BalanceError


@dataclass(frozen=True)
class Hook:
    """One function of Megatron and what we put around it.

    Attributes:
        module: where Megatron defines the function.
        attribute: its name there; "Class.method" for a method.
        flag: the flag, or the part of this package, that needs the hook.
        purpose: what the replacement does, in a few words, for `megatron-balance doctor`.
        wrap: makes the replacement from the original.
    """

    module: str
    attribute: str
    flag: str
    purpose: str
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]]

    @property
    def path(self) -> str:
        return f"{self.module}.{self.attribute}"

    def find(self) -> Callable[..., Any]:
        """The function as it is now.

        Raises:
            BalanceError: this Megatron has no such module or function; the message names the path.
        """
        try:
            module = importlib.import_module(self.module)
        except ImportError as error:
            raise BalanceError(
                f"{self.flag} needs {self.path}, but {self.module} cannot be imported: {error}."
                " Install what is missing into this environment, if this Megatron should have it."
            ) from error
        if not callable(function := functools.reduce(_get, self.attribute.split("."), module)):
            raise BalanceError(self._missing(f"{module.__file__} has no function {self.attribute}"))
        return function

    def swap(self, old: Callable[..., Any], new: Callable[..., Any]) -> None:
        """Put ``new`` for ``old``: in the class of a method, else wherever a loaded module of Megatron holds it."""
        *path, name = self.attribute.split(".")
        if path:
            setattr(functools.reduce(_get, path, sys.modules[self.module]), name, new)
        else:
            _swap(old, new)

    def _missing(self, reason: str) -> str:
        return (
            f"{self.flag} needs {self.path}, which this Megatron does not have ({reason})."
            " `megatron-balance doctor` lists what was looked for and found"
            + ("; leave the flag out to train as stock." if self.flag.startswith("--") else ".")
        )


class Registry:
    """The hooks applied in this process. Several may wrap the same function; the last one applied is outermost."""

    def __init__(self) -> None:
        self._applied: dict[Hook, tuple[Any, Any]] = {}

    def apply(self, hook: Hook) -> None:
        """Replace the hook's function wherever loaded Megatron modules hold it. A second call does nothing.

        Raises:
            BalanceError: the function is not there.
        """
        if hook in self._applied:
            return
        original = hook.find()
        replacement = functools.wraps(original)(hook.wrap(original))
        self._applied[hook] = original, replacement
        hook.swap(original, replacement)

    def undo(self, hook: Hook) -> None:
        """Put back what `apply` replaced; nothing if it did not. Hooks of one function are undone last first."""
        if hook in self._applied:
            original, replacement = self._applied.pop(hook)
            hook.swap(replacement, original)


def _get(owner: Any, name: str) -> Any:
    return getattr(owner, name, None)


def _swap(old: Any, new: Any) -> None:
    """Put ``new`` for ``old`` in every loaded module of Megatron, under whatever name it was imported."""
    for module_name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and (module_name == "megatron" or module_name.startswith("megatron.")):
            for name, value in list(vars(module).items()):
                if value is old:
                    setattr(module, name, new)


registry = Registry()
