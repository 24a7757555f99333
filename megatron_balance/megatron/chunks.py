"""What Megatron's model chunks consist of, and what they pass on."""

from __future__ import annotations

from typing import Any


def contents(chunk: Any) -> dict[str, Any]:
    """Numbers of a chunk's layers in the model, from 1, and whether it has embedding and head."""
    model = inner(chunk)
    layers = getattr(getattr(model, "decoder", None), "layers", ())
    return {
        "layers": [layer.layer_number for layer in layers],
        "embedding": hasattr(model, "embedding"),
        "head": hasattr(model, "output_layer"),
    }


def inner(chunk: Any) -> Any:
    """The model within data-parallel and precision wrappers."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def first_tensor(tensors: Any) -> Any:
    """The tensor, or the first of nested lists of them: Megatron passes either."""
    while isinstance(tensors, list | tuple) and tensors:
        tensors = tensors[0]
    return tensors
