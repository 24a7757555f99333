"""The job that a trace is of, as its recorder or a YAML file beside it describes it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from megatron_balance import reading
from megatron_balance.errors import BalanceError
from megatron_balance.topology import Topology

FIELDS_OF_JOB = ("name", "world_size", "layers", "in_turn", "sends_ahead", "shapes")
MOST_RANKS = 1 << 22
_META = {  # key of the YAML file: field of Topology
    "pp_size": "pipeline_size",
    "vpp_size": "virtual_size",
    "tp_size": "tensor_size",
    "dsp_size": "context_size",
    "dp_size": "data_size",
}
_MOST_LAYERS = 1_000_000


def described_job(path: Path, stored: bytes | None, meta: Path | None) -> dict[str, Any]:
    """Fields of a Topology and, of a Job, ``FIELDS_OF_JOB``, as far as files tell them.

    Args:
        path: of the trace.
        stored: the job's sizes as the recorder wrote them into the trace (``METADATA_KEY``).
        meta: a YAML file, which goes before; None for the only one in the trace's folder where nothing is stored.

    Raises:
        BalanceError: what is there is damaged.
    """
    described: dict[str, Any] = {}
    if stored is not None:
        described = _from_recorder(stored, path)
    if meta is None and stored is None and path.is_dir():
        beside = sorted(file for file in path.iterdir() if file.suffix in (".yaml", ".yml"))
        meta = beside[0] if len(beside) == 1 else None
    if meta is not None:
        described.update(_from_yaml(meta))
    return described


def _from_yaml(meta: Path) -> dict[str, Any]:
    try:
        import yaml
    except ImportError as error:
        raise BalanceError(f"{meta} needs PyYAML: pip install pyyaml ({error})") from error
    try:
        values = yaml.safe_load(meta.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise BalanceError(f"{meta} cannot be read as YAML: {str(error).splitlines()[0]}") from error
    if not isinstance(values, dict):
        raise BalanceError(f"{meta} is not a job's sizes: it needs keys such as pp_size and dp_size")
    described = {field: _size(values[key], key, meta) for key, field in _META.items() if values.get(key) is not None}
    if values.get("layers") is not None:
        described["layers"] = _layers(values["layers"], meta)
    if values.get("trial_name") is not None:
        described["name"] = str(values["trial_name"])
    if values.get("world_size") is not None:
        described["world_size"] = _size(values["world_size"], "world_size", meta)
    return described


def _from_recorder(stored: bytes, path: Path) -> dict[str, Any]:
    try:
        values = json.loads(stored.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise BalanceError(f"the job's sizes in {path} are damaged: {error}") from error
    if not isinstance(values, dict):
        raise BalanceError(f"the job's sizes in {path} are damaged: they are no JSON object")
    topology = values.get("topology", values)
    if not isinstance(topology, Mapping):
        raise BalanceError(f"the job's sizes in {path} are damaged: topology is no JSON object")
    described: dict[str, Any] = {}
    for field in fields(Topology):
        if topology.get(field.name) is None:
            continue
        value = topology[field.name]
        described[field.name] = value is True if field.name == "overlap_moe" else _size(value, field.name, path)
    if values.get("stages") is not None:
        described["layers"] = _built_layers(values["stages"], path)
    described["name"] = str(values.get("name") or path.name)
    if values.get("world_size") is not None:
        described["world_size"] = _size(values["world_size"], "world_size", path)
    described |= {name: values.get(name) is True for name in ("in_turn", "sends_ahead")}
    try:
        described["shapes"] = reading.scalars(values.get("shapes", {}), "shapes")
    except reading.DamageError as error:
        raise BalanceError(f"the job's sizes in {path} are damaged: {error}") from error
    return described


def _layers(value: Any, source: Path) -> tuple[int, ...]:
    good = isinstance(value, list) and value and all(type(each) is int and 0 <= each <= _MOST_LAYERS for each in value)
    if not good:
        raise BalanceError(
            f"{source}: layers must be a list of whole numbers, those of each stage, not {repr(value)[:40]}"
        )
    return tuple(value)


def _built_layers(value: Any, source: Path) -> tuple[int, ...]:
    """Layers of each stage, from what the recorder says that each pipeline rank's chunks hold."""
    try:
        by_rank = [[len(chunk["layers"]) for chunk in chunks] for chunks in value]
        chunks = [list(row) for row in zip(*by_rank, strict=True)]
    except (KeyError, TypeError, ValueError) as error:
        raise BalanceError(f"the job's stages in {source} are damaged: {error}") from error
    return _layers([layers for row in chunks for layers in row], source)


def _size(value: Any, key: str, source: Path) -> int:
    if type(value) is not int or not 1 <= value <= MOST_RANKS:
        shown = repr(value)
        raise BalanceError(f"{source}: {key} must be a whole number from 1 to {MOST_RANKS}, not {shown[:40]}")
    return value
