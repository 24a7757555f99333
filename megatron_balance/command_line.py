"""A training job's command line as it is, read without Megatron: the flags that matter to a plan, by Megatron's names.

One table holds those flags; what is not in it is passed over and named. Names, types and defaults are Megatron's own, which
the tests compare with its parser.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from megatron_balance.errors import BalanceError
from megatron_balance.model.arguments import hybrid_pattern, layer_kinds
from megatron_balance.pipeline.layout import parse_layout
from megatron_balance.topology import Topology

_OURS = "--balanced-pipeline"
_MOST_LAYERS = 100_000  # of a list by layer; a slip of the keyboard must not fill the memory
_GREATEST = 2**53


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
    if isinstance(values, list) and len(values) * times > _MOST_LAYERS:
        raise ValueError(f"more than {_MOST_LAYERS} layers")
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
    *_switches(
        "group-query-attention untie-embeddings-and-output-weights swiglu quick-geglu squared-relu add-qkv-bias"
    ),
    *_switches("qk-layernorm qk-l2-norm attention-output-gate use-rotary-position-embeddings"),
    _off("disable-bias-linear", "add_bias_linear"),
    _off("no-pad-vocab-size disable-pad-vocab-size", "pad_vocab_size"),
    _off("no-position-embedding", "add_position_embedding"),
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
    *_switches("moe-shared-expert-gate moe-grouped-gemm moe-layer-recompute moe-pad-expert-input-to-capacity"),
    _value("moe-layer-freq", per_layer, 1),
    _value("moe-expert-capacity-factor", float),
    _value("moe-token-dispatcher-type", default="allgather", choices="allgather alltoall flex"),
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
    _value("linear-attention-freq", per_layer),
    # How a layer is computed, and what of it is kept.
    *_switches("fp16 bf16 fp32-residual-connection fp16-lm-cross-entropy attention-softmax-in-fp32"),
    *_switches("recompute-activations distribute-saved-activations cross-entropy-loss-fusion use-flash-attn"),
    _value("fp8-format", dest="fp8", choices="e4m3 hybrid"),
    _value("fp8-recipe", default="delayed", choices="tensorwise delayed mxfp8 blockwise custom"),
    _value("fp4-format", dest="fp4", choices="e2m1"),
    _value("transformer-impl", default="transformer_engine", choices="local transformer_engine inference_optimized"),
    _value("attention-backend", default="auto", choices="flash fused unfused local auto"),
    _value("cross-entropy-fusion-impl", default="native", choices="native te"),
    _value("recompute-granularity", choices="full selective"),
    _value("recompute-method", choices="uniform block"),
    *_counts("recompute-num-layers"),
    _value("recompute-modules", nargs="+"),
    _value("hidden-dropout", float, 0.1),
    _value("attention-dropout", float, 0.1),
    _off("no-gradient-accumulation-fusion", "gradient_accumulation_fusion"),
    _off("no-bias-swiglu-fusion", "bias_swiglu_fusion"),
    _off("no-bias-gelu-fusion", "bias_gelu_fusion"),
    _off("no-bias-dropout-fusion", "bias_dropout_fusion"),
    _off("no-masked-softmax-fusion", "masked_softmax_fusion"),
    # Parallel sizes and the batch.
    *_counts("tensor-model-parallel-size pipeline-model-parallel-size context-parallel-size", 1),
    *_counts("expert-model-parallel-size num-distributed-optimizer-instances", 1),
    *_counts("expert-tensor-parallel-size tensor-parallel-num-weight-shards expert-tensor-parallel-num-weight-shards"),
    *_counts("micro-batch-size global-batch-size"),
    *_switches("sequence-parallel hybrid-context-parallel"),
    _value("rampup-batch-size", int, nargs=3),
    _value("step-batch-size-schedule"),
    # The pipeline.
    *_counts("decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers"),
    *_counts("num-layers-per-virtual-pipeline-stage num-virtual-stages-per-pipeline-rank"),
    *_switches("account-for-embedding-in-pipeline-split account-for-loss-in-pipeline-split"),
    *_switches("overlap-moe-expert-parallel-comm delay-wgrad-compute"),
    _value("pipeline-model-parallel-layout"),
    _value("microbatch-group-size-per-virtual-pipeline-stage", int, dest="microbatch_group_size_per_vp_stage"),
    _off("no-overlap-p2p-communication", "overlap_p2p_comm"),
    # Gradients and the optimizer's state.
    *_switches("use-distributed-optimizer use-precision-aware-optimizer accumulate-allreduce-grads-in-fp32"),
    *_switches("grad-reduce-in-bf16 fp8-param-gather fp4-param-gather reuse-grad-buf-for-mxfp8-param-ag"),
    *_switches("optimizer-cpu-offload use-megatron-fsdp use-torch-fsdp2"),
    _value("optimizer", default="adam", choices="adam sgd muon dist_muon lion soap adaptive_muon"),
    _value("optimizer-offload-fraction", float, 1.0),
    _value("sgd-momentum", float, 0.9),
    _value("main-grads-dtype", default="fp32", choices="fp32 bf16"),
    _value("main-params-dtype", default="fp32", choices="fp32 fp16"),
    _value("exp-avg-dtype", default="fp32", choices="fp32 fp16 bf16 fp8"),
    _value("exp-avg-sq-dtype", default="fp32", choices="fp32 fp16 bf16 fp8"),
    _value(
        "data-parallel-sharding-strategy",
        default="optim_grads_params",
        choices="no_shard optim optim_grads optim_grads_params",
    ),
)

DEFAULTS: Mapping[str, Any] = {flag.dest: flag.default for flag in FLAGS}

# Flags that leave the job to something that is not read here.
_REFUSED = {
    "--yaml-cfg": "takes the job from a YAML file, which is not read here: give its settings as Megatron's flags",
    "--config": "is not read here: give its settings as Megatron's flags",
    "--config-file": "is not read here: give its settings as Megatron's flags",
    "--use-checkpoint-args": "takes the model from a checkpoint, which is not read here: leave it out and give the model's"
    " flags",
    "--batch-size": "is no longer valid in Megatron: give --micro-batch-size",
    "--model-parallel-size": "is no longer valid in Megatron: give --tensor-model-parallel-size",
    "--checkpoint-activations": "is no longer valid in Megatron: give --recompute-activations, or --recompute-granularity and"
    " --recompute-method",
}


# --- Reading ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CommandLine:
    """A command line, read.

    Attributes:
        arguments: what it gives, by Megatron's argument names, and by ours for our flags; what it leaves out is missing, and
            Megatron would take it from ``DEFAULTS``.
        ignored: flags that do not matter to a plan, in order, each once.
        world_size: processes that its launcher starts; None where that is not said.
    """

    arguments: dict[str, Any]
    ignored: tuple[str, ...] = ()
    world_size: int | None = None


def read_command_line(argv: Sequence[str]) -> CommandLine:
    """Read the command line of a training job, as its user types it.

    Environment assignments, launcher and script before the flags are passed over; of them only the number of processes is
    taken (``WORLD_SIZE=``, torchrun's ``--nproc-per-node`` and ``--nnodes``). A flag that is not in the table is passed over
    with all words up to the next flag.

    Raises:
        BalanceError: a value is missing, or not what its flag takes; a word belongs to no flag; or the job is described
            elsewhere, in a YAML file or a checkpoint.
    """
    parser = _parser(any(_is_ours(word) for word in argv))
    launcher, words = _split(argv, parser.names)
    known, ignored = _set_apart(words, parser.names)
    arguments = vars(parser.parse_args(known))
    _check_sizes(arguments)
    if arguments.get("bf16") and arguments.get("fp16"):
        raise BalanceError("--bf16 and --fp16 exclude each other: leave one out")
    return CommandLine(arguments, tuple(dict.fromkeys(ignored)), _world_size(launcher))


class _Parser(argparse.ArgumentParser):
    """argparse's parser, whose errors are ours."""

    def error(self, message: str) -> NoReturn:
        raise BalanceError(message)

    @property
    def names(self) -> frozenset[str]:
        """All flags that it reads."""
        return frozenset(self._option_string_actions)


def _parser(with_ours: bool) -> _Parser:
    parser = _Parser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for flag in FLAGS:
        flag.add_to(parser)
    if with_ours:  # defined once, for Megatron's parser
        from megatron_balance.megatron.arguments import add_arguments

        add_arguments(parser)
        for action in parser._actions:
            action.default = argparse.SUPPRESS
    return parser


def _is_ours(word: str) -> bool:
    return word.startswith(_OURS)


def _name(word: str) -> str:
    return word.split("=")[0]


def _is_flag(word: str) -> bool:
    """Whether argparse takes ``word`` for a flag, known or not, and not for a value."""
    return len(word) > 1 and word.startswith("-") and " " not in word and not _is_number(word)


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _split(argv: Sequence[str], names: frozenset[str]) -> tuple[Sequence[str], Sequence[str]]:
    """The launcher with its script, and what follows it.

    The launcher ends with the first ``.py`` before any of the job's flags; without one with the last ``-m MODULE``, or
    where the flags begin. A command line that begins with a flag has no launcher.
    """
    if argv and argv[0].startswith("--"):
        return argv[:0], argv
    first = next((index for index, word in enumerate(argv) if _name(word) in names), len(argv))
    scripts = [index + 1 for index in range(first) if argv[index].endswith(".py") and not _is_flag(argv[index])]
    modules = [index + 2 for index in range(first) if argv[index] == "-m"]
    flags = [index for index, word in enumerate(argv) if _is_flag(word)]
    end = next(iter(scripts or modules[-1:] or flags), len(argv))
    return argv[:end], argv[end:]


def _set_apart(words: Sequence[str], names: frozenset[str]) -> tuple[list[str], list[str]]:
    """The words of flags in the table, and the names of the other flags."""
    known: list[str] = []
    ignored: list[str] = []
    skipping = False
    for word in words:
        name = _name(word)
        if name in _REFUSED:
            raise BalanceError(f"{name} {_REFUSED[name]}")
        if _is_flag(word):
            skipping = name not in names
            if skipping and _is_ours(name):  # as in training; a slip must not plan something else
                raise BalanceError(f"unrecognized arguments: {name}")
            if skipping:
                ignored.append(name)
        if not skipping:
            known.append(word)
    return known, ignored


def _check_sizes(arguments: Mapping[str, Any]) -> None:
    for name, value in arguments.items():
        values = value if isinstance(value, list | tuple) else [value]
        if any(type(number) is int and abs(number) >= _GREATEST for number in values):
            raise BalanceError(f"--{name.replace('_', '-')} {value}: no such number is possible")
    if (arguments.get("num_layers") or 0) > _MOST_LAYERS:
        raise BalanceError(f"--num-layers {arguments['num_layers']}: at most {_MOST_LAYERS} are planned")


_PROCESSES = re.compile(r"--nproc[-_]per[-_]node")
_NODES = re.compile(r"--nnodes")


def _world_size(launcher: Sequence[str]) -> int | None:
    """Processes of all nodes; one node where torchrun is not told how many, as it takes it."""
    for word in launcher:
        if match := re.fullmatch(r"WORLD_SIZE=(\d+)", word):
            return int(match[1])
    processes, nodes = _launcher_value(launcher, _PROCESSES), _launcher_value(launcher, _NODES) or "1"
    return int(processes) * int(nodes) if processes and processes.isdigit() and nodes.isdigit() else None


def _launcher_value(launcher: Sequence[str], name: re.Pattern[str]) -> str | None:
    for word, following in zip(launcher, [*launcher, ""][1:], strict=True):
        flag, separator, value = word.partition("=")
        if name.fullmatch(flag):
            return value if separator else following
    return None


# --- What Megatron makes of it ----------------------------------------------------------------------------------------

_KNOWN_VOCABULARIES = {"GPT2BPETokenizer": 50257}


def completed(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """``arguments`` with what Megatron's ``validate_args`` and its configuration change, where a plan depends on it.

    Only what ``ModelSpec.from_arguments`` does not do by itself. A missing key stands for Megatron's default.

    Raises:
        BalanceError: the size of the vocabulary is not given, and not known from the kind of tokenizer.
    """
    done = dict(arguments)
    if done.get("vocab_size") is None and done.get("padded_vocab_size") is None:
        done["vocab_size"] = _vocabulary(arguments)
    if done.get("fp16"):
        done["bf16"] = False  # that of a Hugging Face config, which a flag outranks
    if done.get("tensor_model_parallel_size", 1) == 1:
        done["sequence_parallel"] = False
    if done.get("moe_layer_recompute"):
        done["recompute_granularity"] = "selective"
        done["recompute_modules"] = list(dict.fromkeys([*(done.get("recompute_modules") or ["core_attn"]), "moe"]))
    if done.get("use_megatron_fsdp"):
        done["use_distributed_optimizer"] = True
    if done.get("optimizer", "adam") not in ("adam", "sgd"):  # each rank keeps the state of whole matrices
        done["use_layer_wise_distributed_optimizer"] = bool(
            done.get("use_distributed_optimizer") or done["optimizer"] == "dist_muon"
        )
        done["use_distributed_optimizer"] = False
    return done


def _vocabulary(arguments: Mapping[str, Any]) -> int:
    kind, model = arguments.get("tokenizer_type"), arguments.get("tokenizer_model")
    if kind in _KNOWN_VOCABULARIES:
        return _KNOWN_VOCABULARIES[kind]
    whose = f"of {kind}{f' {model}' if model else ''} " if kind else ""
    raise BalanceError(
        f"the size of the vocabulary {whose}is not known, as no tokenizer is loaded here: add --vocab-size N, or"
        " --padded-vocab-size N as a checkpoint has it"
    )


def topology_from_arguments(
    arguments: Mapping[str, Any], num_microbatches: int | None = None, world_size: int | None = None
) -> Topology:
    """The sizes of the job that ``arguments`` describe.

    Args:
        arguments: Megatron's argument names with their values; a missing key is Megatron's default.
        num_microbatches: micro-batches of a step (M); None takes them from the global batch of ``world_size`` processes.
        world_size: processes of the job; None is one model replica, which needs ``num_microbatches``.

    Raises:
        BalanceError: sizes are missing, less than 1 or do not divide.
    """
    tensor, pipeline, context = (
        _size(arguments, f"{kind}_parallel_size") for kind in ("tensor_model", "pipeline_model", "context")
    )
    for name, base in (("tensor", tensor), ("expert_tensor", arguments.get("expert_tensor_parallel_size") or tensor)):
        shards = arguments.get(f"{name}_parallel_num_weight_shards")
        if shards not in (None, base):
            raise BalanceError(
                f"--{name.replace('_', '-')}-parallel-num-weight-shards {shards}: weights spread over more ranks than the"
                f" {base} of tensor parallelism are not planned for"
            )
    data_size = _data_size(world_size, tensor * pipeline * context)
    if num_microbatches is None:
        if world_size is None:
            raise BalanceError(
                "the number of micro-batches is not known: add --num-microbatches M, or --world-size N beside"
                " --global-batch-size"
            )
        num_microbatches = _num_microbatches(arguments, data_size)
    virtual = _virtual_size(arguments, pipeline)
    group = arguments.get("microbatch_group_size_per_vp_stage")
    return Topology(
        pipeline_size=pipeline,
        num_microbatches=num_microbatches,
        virtual_size=virtual,
        micro_batch_size=_size(arguments, "micro_batch_size"),
        tensor_size=tensor,
        context_size=context,
        data_size=data_size,
        microbatch_group_size=group if virtual > 1 else None,
        overlap_moe=bool(arguments.get("overlap_moe_expert_parallel_comm")),
    )


def _size(arguments: Mapping[str, Any], name: str, default: int = 1) -> int:
    value = default if arguments.get(name) is None else arguments[name]
    if value < 1:
        raise BalanceError(f"--{name.replace('_', '-')} {value}: must be 1 or more")
    return value


def _data_size(world_size: int | None, replica: int) -> int:
    if world_size is None:
        return 1
    if world_size < 1 or world_size % replica:
        raise BalanceError(
            f"--world-size {world_size} is not a multiple of {replica}, the processes of one model replica (tensor * pipeline"
            " * context parallel size): change one of them"
        )
    return world_size // replica


def _num_microbatches(arguments: Mapping[str, Any], data_size: int) -> int:
    """Of the full batch, where it is ramped up; one where no global batch is given, as Megatron takes it."""
    if arguments.get("step_batch_size_schedule"):
        raise BalanceError("--step-batch-size-schedule changes the number of micro-batches: add --num-microbatches M")
    micro = _size(arguments, "micro_batch_size")
    batch = _size(arguments, "global_batch_size", default=micro * data_size)
    if batch % (micro * data_size):
        raise BalanceError(
            f"--global-batch-size {batch} is not a multiple of micro-batch size * data-parallel size ({micro} *"
            f" {data_size}): change one of them, or give --num-microbatches M"
        )
    return batch // (micro * data_size)


def _virtual_size(arguments: Mapping[str, Any], pipeline: int) -> int:
    """Stages on each rank, by the one flag that gives them."""
    given = {
        name: arguments[name]
        for name in (
            "pipeline_model_parallel_layout",
            "num_virtual_stages_per_pipeline_rank",
            "num_layers_per_virtual_pipeline_stage",
        )
        if arguments.get(name) is not None
    }
    pattern = hybrid_pattern(arguments)
    if len(given) > 1 or (given and pattern):
        flags = [*given, *(["hybrid_layer_pattern"] if pattern else [])]
        raise BalanceError(
            f"{' and '.join('--' + name.replace('_', '-') for name in flags)} each give the number of virtual stages: leave"
            " all but one out"
        )
    if "pipeline_model_parallel_layout" in given:
        stages = len(parse_layout(str(given["pipeline_model_parallel_layout"])).layers)
        return _virtual_of(stages, pipeline, "--pipeline-model-parallel-layout")
    if "num_virtual_stages_per_pipeline_rank" in given:
        return _size(given, "num_virtual_stages_per_pipeline_rank")
    if pattern:
        return _virtual_of(len(pattern.stages), pipeline, "--hybrid-layer-pattern") if len(pattern.stages) > 1 else 1
    return _virtual_of_layers(arguments, pipeline) if given else 1


def _virtual_of(stages: int, pipeline: int, flag: str) -> int:
    if stages % pipeline:
        raise BalanceError(f"{flag} has {stages} stages, not a multiple of --pipeline-model-parallel-size {pipeline}")
    return stages // pipeline


def _virtual_of_layers(arguments: Mapping[str, Any], pipeline: int) -> int:
    each = _size(arguments, "num_layers_per_virtual_pipeline_stage")
    layers = len(layer_kinds(arguments))
    extra = sum(bool(arguments.get(f"account_for_{element}_in_pipeline_split")) for element in ("embedding", "loss"))
    if (layers + extra) % (pipeline * each):
        counted = f" (with {extra} for embedding and loss)" if extra else ""
        raise BalanceError(
            f"{layers + extra} layers{counted} do not divide into {pipeline} pipeline ranks with"
            f" --num-layers-per-virtual-pipeline-stage {each}: give --num-virtual-stages-per-pipeline-rank V"
        )
    return (layers + extra) // (pipeline * each)
