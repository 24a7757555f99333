"""Starts a patched training script on the CPU as a job without the launcher does: SCRIPT, then its arguments.

Every parameter gets values that depend on its name in the whole model alone, so that all splits train the same model; each
rank says which layers it built.
"""

import os
import re
import runpy
import sys
import zlib
from pathlib import Path

from megatron_balance import cpu

script, *_ = sys.argv = sys.argv[1:]
sys.path.insert(0, str(Path(script).parent))  # as Python does for a script
cpu.install()
cpu.prepare_megatron()

import torch  # noqa: E402
from megatron.training import training  # noqa: E402

set_up = training.setup_model_and_optimizer


def in_whole_model(name: str, chunk: torch.nn.Module) -> str:
    """``name`` with the layer's number in the model for its number in this chunk."""
    layers = chunk.get_submodule(name.split(".layers.")[0] + ".layers") if ".layers." in name else ()
    return re.sub(r"\.layers\.(\d+)\.", lambda found: f".layer {layers[int(found[1])].layer_number}.", name)


def fill(parameter: torch.nn.Parameter, name: str) -> None:
    name = name.replace("output_layer", "embedding.word_embeddings")  # tied on the last stage
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    values = torch.randn(parameter.shape, generator=generator)
    parameter.data.copy_(0.02 * values if parameter.dim() > 1 else 1 + 0.02 * values)


def set_up_by_name(*args, **kwargs):
    model, *rest = set_up(*args, **kwargs)
    numbers = []
    for chunk in model:
        numbers.append(
            [layer.layer_number for name, layer in chunk.named_modules() if re.search(r"\.layers\.\d+$", name)]
        )
        for name, parameter in chunk.named_parameters():
            fill(parameter, in_whole_model(name, chunk))
    print(f"rank {os.environ['RANK']} built {numbers}", flush=True)
    return model, *rest


training.setup_model_and_optimizer = set_up_by_name
runpy.run_path(script, run_name="__main__")
