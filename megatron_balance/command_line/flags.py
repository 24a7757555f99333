"""The flags that matter to a plan, by Megatron's names: one table, with Megatron's own types and defaults.

The tests compare it with Megatron's parser, and hold it to what a plan reads.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

MOST_LAYERS = 100_000  # of a list by layer; a slip of the keyboard must not fill the memory


# --- The types of values that Megatron has beyond argparse's ----------------------------------------------------------


def per_layer(text: str) -> int | list[int]:
    """A layer frequency: a whole number, or a list written with ``+`` and ``*``, as ``([0]*3+[1]*58)``.

    Megatron evaluates such a list as Python; here it is read as sums and products of lists and whole numbers, and nothing
    else.

    Raises:
        ValueError: it is neither.
    """
    if "[" not in text:
        return int(text)
    try:
        value = _evaluate(ast.parse(text, mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError("not a list") from error
    if not isinstance(value, list):
        raise ValueError("not a list")
    return value


def _evaluate(node: ast.expr) -> int | list[int]:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.List):
        values = [_evaluate(element) for element in node.elts]
        if all(isinstance(value, int) for value in values):
            return values
    if isinstance(node, ast.BinOp):
        left, right = _evaluate(node.left), _evaluate(node.right)
        if isinstance(node.op, ast.Add) and type(left) is type(right):
            return left + right
        if isinstance(node.op, ast.Mult) and isinstance(left, int | list) and int in (type(left), type(right)):
            return _product(left, right)
    raise ValueError("only whole numbers, lists of them, + and * are understood")


def _product(left: int | list[int], right: int | list[int]) -> int | list[int]:
    values, times = (left, right) if isinstance(left, list) else (right, left)
    if isinstance(values, list) and len(values) * times > MOST_LAYERS:
        raise ValueError(f"more than {MOST_LAYERS} layers")
    return values * times


def window(text: str) -> tuple[int, ...]:
    """Sizes with commas between them, with or without parentheses around them: ``128,0``.

    Raises:
        ValueError: one is no whole number.
    """
    return tuple(int(size) for size in text.strip("()").split(","))


# --- The table of flags -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Flag:
    """A flag of Megatron's.

    Attributes:
        names: how it may be written.
        dest: name of the argument.
        default: value where it is not given.
        read: turns its text into a value; None for a switch, which takes none and turns ``default`` round.
        nargs: how many values follow, in argparse's words; None is one.
        choices: values that some version of Megatron takes; empty for all.
        only: the versions of Megatron core that have it, where 0.19 has not.
    """

    names: tuple[str, ...]
    dest: str
    default: Any = None
    read: Callable[[str], Any] | None = None
    nargs: int | str | None = None
    choices: tuple[str, ...] = ()
    only: str | None = None

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        """Let ``parser`` read the flag; where it is not given, the argument is left out."""
        if self.read is None:
            action = "store_false" if self.default else "store_true"
            parser.add_argument(*self.names, dest=self.dest, action=action, default=argparse.SUPPRESS)
        else:
            parser.add_argument(
                *self.names,
                dest=self.dest,
                type=self.read,
                nargs=self.nargs,
                choices=self.choices or None,
                default=argparse.SUPPRESS,
            )


def _dest(name: str) -> str:
    return name.replace("-", "_")


def _counts(names: str, default: int | None = None) -> tuple[Flag, ...]:
    return tuple(Flag((f"--{name}",), _dest(name), default, int) for name in names.split())


def _switches(names: str) -> tuple[Flag, ...]:
    return tuple(Flag((f"--{name}",), _dest(name), False) for name in names.split())


def _off(names: str, dest: str) -> Flag:
    """A switch that turns something off."""
    return Flag(tuple(f"--{name}" for name in names.split()), dest, True)


def _value(name: str, read: Callable[[str], Any] = str, default: Any = None, choices: str = "", **more: Any) -> Flag:
    return Flag((f"--{name}",), more.pop("dest", _dest(name)), default, read, choices=tuple(choices.split()), **more)


FLAGS: tuple[Flag, ...] = (
    # Shape of the model.
    *_counts("num-layers encoder-num-layers hidden-size ffn-hidden-size num-attention-heads kv-channels"),
    *_counts("seq-length encoder-seq-length max-position-embeddings vocab-size padded-vocab-size"),
    *_counts("num-query-groups", 1),
    *_counts("make-vocab-size-divisible-by", 128),
    *_switches("group-query-attention untie-embeddings-and-output-weights swiglu quick-geglu add-qkv-bias"),
    *_switches("qk-layernorm attention-output-gate use-rotary-position-embeddings"),
    _off("disable-bias-linear", "add_bias_linear"),
    _off("no-pad-vocab-size disable-pad-vocab-size", "pad_vocab_size"),
    _value("normalization", default="LayerNorm", choices="LayerNorm RMSNorm"),
    _value(
        "position-embedding-type",
        default="learned_absolute",
        choices="learned_absolute rope yarn mrope relative none",
    ),
    _value("softmax-type", default="vanilla", choices="vanilla off-by-one learnable"),
    _value("window-size", window),
    _value("window-attn-skip-freq", per_layer),
    _value("tokenizer-type"),
    _value("tokenizer-model"),
    _value("spec", nargs="*"),
    # Mixture of experts.
    *_counts("num-experts moe-ffn-hidden-size moe-shared-expert-intermediate-size moe-latent-size"),
    *_counts("moe-router-topk", 2),
    *_switches("moe-shared-expert-gate moe-layer-recompute"),
    _value("moe-layer-freq", per_layer, 1),
    # Multi-latent attention, multi-token prediction, Mamba, layers of their own.
    *_switches("multi-latent-attention mtp-use-repeated-layer is-hybrid-model"),
    Flag(("--enable-mhc-connections",), "enable_mhc_connections", False, only="later than 0.19"),
    *_counts("q-lora-rank mtp-num-layers mamba-num-heads"),
    *_counts("kv-lora-rank", 32),
    *_counts("qk-head-dim v-head-dim mamba-state-dim", 128),
    *_counts("qk-pos-emb-head-dim mamba-head-dim", 64),
    *_counts("mamba-num-groups", 8),
    _value("hybrid-layer-pattern"),
    _value("hybrid-override-pattern"),
    _value("mtp-hybrid-override-pattern"),
    _value("hybrid-attention-ratio", float, 0.0, only="0.16 and older"),
    _value("hybrid-mlp-ratio", float, 0.0, only="0.16 and older"),
    _value("heterogeneous-layers-config-path"),
    _value("heterogeneous-layers-config-encoded-json"),
    _value("experimental-attention-variant"),
    # How a layer is computed, and what of it is kept.
    *_switches("fp16 bf16 recompute-activations cross-entropy-loss-fusion"),
    _value("fp8-format", dest="fp8", choices="e4m3 hybrid"),
    _value("fp4-format", dest="fp4", choices="e2m1"),
    _value("transformer-impl", default="transformer_engine", choices="local transformer_engine inference_optimized"),
    _value("cross-entropy-fusion-impl", default="native", choices="native te"),
    _value("recompute-granularity", choices="full selective"),
    _value("recompute-method", choices="uniform block"),
    *_counts("recompute-num-layers"),
    _value("recompute-modules", nargs="+"),
    _value("hidden-dropout", float, 0.1),
    _value("attention-dropout", float, 0.1),
    _off("no-gradient-accumulation-fusion", "gradient_accumulation_fusion"),
    # Parallel sizes and the batch.
    *_counts("tensor-model-parallel-size pipeline-model-parallel-size context-parallel-size", 1),
    *_counts("expert-model-parallel-size num-distributed-optimizer-instances", 1),
    *_counts("expert-tensor-parallel-size tensor-parallel-num-weight-shards expert-tensor-parallel-num-weight-shards"),
    *_counts("micro-batch-size global-batch-size"),
    *_switches("sequence-parallel"),
    _value("step-batch-size-schedule"),
    # The pipeline.
    *_counts("decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers"),
    *_counts("num-layers-per-virtual-pipeline-stage num-virtual-stages-per-pipeline-rank"),
    *_switches("account-for-embedding-in-pipeline-split account-for-loss-in-pipeline-split"),
    *_switches("overlap-moe-expert-parallel-comm"),
    _value("pipeline-model-parallel-layout"),
    _value("microbatch-group-size-per-virtual-pipeline-stage", int, dest="microbatch_group_size_per_vp_stage"),
    _off("no-overlap-p2p-communication", "overlap_p2p_comm"),
    # Gradients and the optimizer's state.
    *_switches("use-distributed-optimizer use-precision-aware-optimizer accumulate-allreduce-grads-in-fp32"),
    *_switches("grad-reduce-in-bf16 fp8-param-gather fp4-param-gather"),
    *_switches("optimizer-cpu-offload use-megatron-fsdp use-torch-fsdp2"),
    _value("optimizer", default="adam", choices="adam sgd muon dist_muon lion soap adaptive_muon"),
    _value("optimizer-offload-fraction", float, 1.0),
    _value("sgd-momentum", float, 0.9),
    _value("main-grads-dtype", default="fp32", choices="fp32 bf16"),
    _value("main-params-dtype", default="fp32", choices="fp32 fp16"),
    _value("exp-avg-dtype", default="fp32", choices="fp32 fp16 bf16 fp8"),
    _value("exp-avg-sq-dtype", default="fp32", choices="fp32 fp16 bf16 fp8"),
)

DEFAULTS: Mapping[str, Any] = {flag.dest: flag.default for flag in FLAGS}
