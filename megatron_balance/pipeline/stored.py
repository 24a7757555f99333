"""The layout that a checkpoint was saved with: how it is kept beside the checkpoint, and how Megatron's arguments imply it.

The file is JSON with these keys: `format` ("megatron-balance layout"), `format_version` (1), `layout` (the string for
``--pipeline-model-parallel-layout``), `layers` (of each stage, in the order of the data), `pipeline_size`, `virtual_size`
(stages on each rank) and `created_by`; and where the job packs documents, `packing`: the cursor of the next global batch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_balance import __version__, reading
from megatron_balance.errors import BalanceError
from megatron_balance.pipeline import stock
from megatron_balance.pipeline.layout import Layout, parse_layout
from megatron_balance.topology import Topology

FILE_NAME = "megatron_balance.json"
_FORMAT = "megatron-balance layout"
_FORMAT_VERSION = 1


@dataclass(frozen=True)
class StoredLayout:
    """A split over pipeline ranks.

    Attributes:
        layout: layers of each stage; stage ``chunk * pipeline_size + rank`` is chunk ``chunk`` of that rank.
        pipeline_size: pipeline ranks.
        virtual_size: stages on each rank.
        packing: cursor of the next global batch's documents, as JSON; None without packing.
    """

    layout: Layout
    pipeline_size: int
    virtual_size: int
    packing: Mapping[str, Any] | None = field(default=None, compare=False)

    def __str__(self) -> str:
        return str(self.layout)

    @property
    def shape(self) -> str:
        """Ranks and virtual stages, for messages."""
        return f"{self.pipeline_size} pipeline rank(s) of {self.virtual_size} stage(s)"

    def to_json(self) -> str:
        """The text of the file."""
        values = {
            "format": _FORMAT,
            "format_version": _FORMAT_VERSION,
            "layout": str(self),
            "layers": self.layout.layers,
            "pipeline_size": self.pipeline_size,
            "virtual_size": self.virtual_size,
            "created_by": f"megatron_balance {__version__}",
        }
        if self.packing is not None:
            values["packing"] = self.packing
        return json.dumps(values, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str, name: str) -> StoredLayout:
        """Read what ``to_json`` wrote.

        Args:
            text: contents of a file, which may come from anywhere.
            name: what to call it in errors.

        Raises:
            BalanceError: this is not a whole, undamaged file of this format; names the key.
        """
        try:
            return _read(reading.parse_object(text))
        except reading.DamageError as damage:
            raise BalanceError(f"{name} {damage}") from damage


def _read(values: Mapping[str, Any]) -> StoredLayout:
    reading.check_format(values, _FORMAT, _FORMAT_VERSION, "a stored layout")
    packing = values.get("packing")
    reading.checked(packing, "packing", packing is None or isinstance(packing, dict), "a mapping")
    reading.check_keys(
        {*values} - {"packing"},
        ("format", "format_version", "layout", "layers", "pipeline_size", "virtual_size", "created_by"),
    )
    reading.text(values["created_by"], "created_by")
    try:
        layout = parse_layout(reading.text(values["layout"], "layout"))
    except BalanceError as error:
        raise reading.DamageError(f"is damaged: {error}") from error
    sizes = [reading.count(values[key], key) for key in ("pipeline_size", "virtual_size")]
    stages = f"{sizes[0]} * {sizes[1]}, the pipeline's size"
    reading.checked(len(layout.layers), "the number of stages", len(layout.layers) == sizes[0] * sizes[1], stages)
    expected = list(layout.layers)
    reading.checked(values["layers"], "layers", values["layers"] == expected, f"{expected}, as the layout has them")
    return StoredLayout(layout, *sizes, packing)


def layout_of_arguments(arguments: Mapping[str, Any]) -> StoredLayout | None:
    """The layout that Megatron builds from validated arguments; None where it cannot be told.

    A hybrid model has none in its arguments, but borders of stages in its pattern of layers, which stand for one.

    Args:
        arguments: Megatron's, by name, of this job or out of a checkpoint.
    """
    num_layers, ranks = arguments.get("num_layers"), arguments.get("pipeline_model_parallel_size")
    if not num_layers or not ranks:
        return None
    virtual_size = arguments.get("virtual_pipeline_model_parallel_size") or 1
    pattern = arguments.get("hybrid_layer_pattern") or arguments.get("hybrid_override_pattern") or ""
    try:
        layout = stock.own_split(
            arguments,
            num_layers,
            arguments.get("mtp_num_layers") or 0,
            Topology(ranks, num_microbatches=1, virtual_size=virtual_size),
            pattern.partition("/")[0].split("|"),
        )
    except BalanceError:
        return None
    if sum(layout.layers) != num_layers or len(layout.layers) != ranks * virtual_size:
        return None
    return StoredLayout(layout, ranks, virtual_size)
