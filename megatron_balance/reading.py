"""Checked reading of JSON values: each reader returns the value of a key, or says what is wrong with it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

Reader = Callable[[Any, str], Any]
T = TypeVar("T")
Scalar = int | float | str | bool | None
MOST_WHOLE = 2**53  # whole numbers that every JSON reader keeps


class DamageError(ValueError):
    """What is wrong with a text; completes a sentence that begins with the text's name."""


def parse_object(text: str) -> dict[str, Any]:
    """The JSON object that ``text`` is.

    Raises:
        DamageError: it is not, or it is cut off.
    """
    try:
        values = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise DamageError(f"is not whole JSON ({error})") from error
    if not isinstance(values, dict):
        raise DamageError("is not a JSON object")
    return values


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not a number")


def check_format(values: Mapping[str, Any], name: str, version: int, kind: str) -> None:
    """Refuse a file of another format or version."""
    if values.get("format") != name:
        raise DamageError(f"is not {kind}: its format is {values.get('format')!r}, not {name!r}")
    if values.get("format_version") != version:
        raise DamageError(f"has format_version {values.get('format_version')!r}, not {version}")


def checked(value: T, key: str, valid: bool, expected: str) -> T:
    """``value``, if it is valid."""
    if not valid:
        shown = repr(value)
        raise DamageError(f"is damaged: {key} is {shown if len(shown) <= 40 else shown[:37] + '...'}, not {expected}")
    return value


def check_keys(values: Iterable[str], wanted: Iterable[str], prefix: str = "") -> None:
    """Refuse missing and unknown keys."""
    for problem, keys in (("lacks", {*wanted} - {*values}), ("holds the unknown", {*values} - {*wanted})):
        if keys:
            raise DamageError(f"{problem} {', '.join(prefix + key for key in sorted(keys))}")


def text(value: Any, key: str) -> str:
    return checked(value, key, isinstance(value, str) and value.isprintable(), "a text on one line")


def count(value: Any, key: str) -> int:
    return checked(value, key, type(value) is int and 0 <= value < MOST_WHOLE, "a whole number of 0 or more")


def number(value: Any, key: str) -> float:
    valid = type(value) in (int, float) and 0 <= value <= sys.float_info.max  # false for NaN
    return float(checked(value, key, valid, "a number of 0 or more"))


def positive(value: Any, key: str) -> float:
    return checked(number(value, key), key, value > 0, "a number above 0")


def flag(value: Any, key: str) -> bool:
    return checked(value, key, isinstance(value, bool), "true or false")


def numbers(value: Any, key: str) -> tuple[float, ...]:
    checked(value, key, isinstance(value, list), "a list of numbers")
    return tuple(number(each, f"{key}[{place}]") for place, each in enumerate(value))


def pair(value: Any, key: str) -> tuple[float, float]:
    checked(value, key, isinstance(value, list) and len(value) == 2, "a pair of numbers")
    return number(value[0], f"{key}[0]"), number(value[1], f"{key}[1]")


def optional(reader: Reader) -> Reader:
    """A reader that lets null pass."""
    return lambda value, key: None if value is None else reader(value, key)


def mapping(value: Any, key: str, readers: Mapping[str, Reader]) -> dict[str, Any]:
    """The values of an object that has exactly the keys of ``readers``."""
    checked(value, key, isinstance(value, dict), "a mapping")
    check_keys(value, readers, f"{key}.")
    return {name: reader(value[name], f"{key}.{name}") for name, reader in readers.items()}


def scalars(value: Any, key: str) -> dict[str, Scalar]:
    """An object of any keys, without lists or objects in it."""
    checked(value, key, isinstance(value, dict), "a mapping")
    for name, scalar in value.items():
        checked(scalar, f"{key}.{name}", scalar is None or isinstance(scalar, int | float | str), "a single value")
    return value
