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
        attribute: its name there.
        flag: the flag that needs the hook.
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

    def find(self) -> tuple[ModuleType, Callable[..., Any]]:
        """The module and the function as they are now.

        Raises:
            BalanceError: this Megatron has no such module or function; the message names the path.
        """
        try:
            module = importlib.import_module(self.module)
        except ImportError as error:
            raise BalanceError(self._missing(f"importing {self.module} fails: {error}")) from error
        if not callable(function := getattr(module, self.attribute, None)):
            raise BalanceError(self._missing(f"{module.__file__} has no function {self.attribute}"))
        return module, function

    def _missing(self, reason: str) -> str:
        return (
            f"{self.flag} needs {self.path}, which this Megatron does not have ({reason})."
            " `megatron-balance doctor` lists what was looked for and found; leave the flag out to train as stock."
        )


class Registry:
    """The hooks applied in this process."""

    def __init__(self) -> None:
        self._places: dict[str, list[tuple[ModuleType, str, Any]]] = {}

    def __contains__(self, hook: Hook) -> bool:
        return hook.path in self._places

    def apply(self, hook: Hook) -> None:
        """Replace the hook's function wherever loaded Megatron modules hold it. A second call does nothing.

        Raises:
            BalanceError: the function is not there.
        """
        if hook in self:
            return
        _, original = hook.find()
        replacement = functools.wraps(original)(hook.wrap(original))
        places = [
            (module, name, original)
            for module in _megatron_modules()
            for name, value in list(vars(module).items())
            if value is original
        ]
        for module, name, _ in places:
            setattr(module, name, replacement)
        self._places[hook.path] = places

    def undo(self, hook: Hook) -> None:
        """Put the original back everywhere `apply` replaced it; nothing if it did not."""
        for module, name, original in self._places.pop(hook.path, ()):
            setattr(module, name, original)


def _megatron_modules() -> list[ModuleType]:
    return [
        module
        for name, module in list(sys.modules.items())
        if isinstance(module, ModuleType) and (name == "megatron" or name.startswith("megatron."))
    ]


registry = Registry()
