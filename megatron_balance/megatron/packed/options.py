"""The flags of `--varlen-packing`, and what cannot go with it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_balance.command_line.derived import check_stages_beside_fsdp, check_weight_shards
from megatron_balance.errors import BalanceError
from megatron_balance.megatron.found_checkpoint import is_remote
from megatron_balance.model import refuse_uncovered
from megatron_balance.packing.cost import SHAPES
from megatron_balance.packing.pieces import LONG_DOCUMENTS, SPLIT, TRUNCATE

FLAG = "--varlen-packing"
AUTO, TE, FLASH, TORCH = "auto", "te", "flash", "torch"
ATTENTIONS = (AUTO, TE, FLASH, TORCH)


@dataclass(frozen=True)
class PackingOptions:
    """Our flags.

    Attributes:
        long_documents: what happens to a document that is longer than a bin.
        attention: what attends within the sequences.
        shapes: of micro-batches: ``fixed``, ``variable`` or ``auto``.
        micro_batches: how many more a step has than Megatron counts.
    """

    long_documents: str
    attention: str
    shapes: str
    micro_batches: int

    @classmethod
    def from_args(cls, args: Any) -> PackingOptions | None:
        """The options of parsed arguments; None when packing is not asked for.

        Raises:
            BalanceError: an option is given without the flag that it belongs to.
        """
        names = ("long_documents", "attention", "shapes", "micro_batches")
        given = {name: getattr(args, f"varlen_packing_{name}", None) for name in names}
        if not getattr(args, "varlen_packing", False):
            for name, value in given.items():
                if value is not None:
                    raise BalanceError(
                        f"{FLAG}-{name.replace('_', '-')} does nothing without {FLAG}: add it or leave both out"
                    )
            return None
        usual = TRUNCATE if trains_on_conversations(args) else SPLIT
        return cls(
            given["long_documents"] or usual,
            given["attention"] or AUTO,
            given["shapes"] or AUTO,
            given["micro_batches"] or 0,
        )


def trains_on_conversations(args: Any) -> bool:
    """Whether ``--sft`` was given: packing takes it over, so that Megatron's own loss and data do not meet it."""
    return bool(getattr(args, "varlen_packing_conversations", False) or getattr(args, "sft", False))


def add_arguments(group: argparse._ArgumentGroup) -> None:
    """Add the flags to Megatron's parser."""
    group.add_argument(
        FLAG,
        action="store_true",
        help="Train on bins of whole documents instead of text chopped at every sequence length: each document attends to itself"
        " alone, and each global batch's documents are placed so that ranks and micro-batches take equally long. Needs"
        " --calculate-per-token-loss.",
    )
    group.add_argument(
        f"{FLAG}-long-documents",
        choices=LONG_DOCUMENTS,
        help="Documents longer than --seq-length: split them into bins and a rest (the default), truncate (the"
        " default with --sft) or drop them.",
    )
    group.add_argument(
        f"{FLAG}-attention",
        choices=ATTENTIONS,
        help="What attends within the documents: Transformer Engine's layers, or for local layers flash-attn's kernel or torch."
        " Default: Transformer Engine where its layers are used, else flash-attn on a GPU where it is installed, else torch.",
    )
    group.add_argument(
        f"{FLAG}-shapes",
        choices=(AUTO, *SHAPES),
        help="Micro-batches padded to --seq-length (fixed), or of the length of their documents, so that padding is not computed"
        " (variable; no shapes are sent between stages). Default: auto, which is variable unless something in the job needs"
        " fixed shapes: faster on the CPU, and on a GPU by simulation alone.",
    )
    group.add_argument(
        f"{FLAG}-micro-batches",
        type=more_micro_batches,
        metavar="+K",
        help="Spread the documents of a global batch over K more micro-batches than its size says, which variable shapes"
        " allow: the same documents, samples and learning rate, and bins that need not be full.",
    )


def more_micro_batches(text: str) -> int:
    """K of ``+K``.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    if not (text.startswith("+") and text[1:].isascii() and text[1:].isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r}: give how many more, as +2")
    return int(text)


@dataclass(frozen=True)
class Conflict:
    """An argument of Megatron's that packing cannot go with.

    Attributes:
        name: of the argument.
        is_set: whether its value is one that clashes.
        flag: as the user typed it.
        reason: why, and what to do.
    """

    name: str
    is_set: Callable[[Any], bool]
    flag: str
    reason: str


def _one_of(*values: Any) -> Callable[[Any], bool]:
    return lambda value: bool({*value} & {*values}) if isinstance(value, list | tuple) else value in values


_OWN_BOUNDS = "the bounds of documents come from the index, not from end-of-document tokens: leave it out"
_OTHER_PACKER = "it packs by a rule of its own: leave one of the two out"
_BY_PLACE = (
    "a teacher's values are stored by place in stock's batches, and packed ones hold other tokens there: leave it out"
)
_BESIDE = "a resume finds the place in the data in a file beside checkpoints"
_FIXED_ITEMS = "every item has its place in a global batch that is planned as a whole: leave it out"

CONFLICTS = (
    Conflict("reset_position_ids", bool, "--reset-position-ids", _OWN_BOUNDS),
    Conflict("reset_attention_mask", bool, "--reset-attention-mask", _OWN_BOUNDS),
    Conflict("dataloader_inter_document_masking", bool, "--dataloader-inter-document-masking", _OTHER_PACKER),
    Conflict("hybrid_context_parallel", bool, "--hybrid-context-parallel", _OTHER_PACKER),
    # The next two are of Megatron's development branch.
    Conflict("dynamic_context_parallel", bool, "--dynamic-context-parallel", _OTHER_PACKER),
    Conflict("sequence_packing_scheduler", bool, "--sequence-packing-scheduler", _OTHER_PACKER),
    Conflict("fim_data", bool, "--fim-data", "it rewrites documents to other lengths: leave one of the two out"),
    Conflict(
        "retro_add_retriever", bool, "--retro-add-retriever", "it reads neighbours of chopped chunks: leave it out"
    ),
    Conflict(
        "moe_router_load_balancing_type",
        _one_of("seq_aux_loss"),
        "--moe-router-load-balancing-type seq_aux_loss",
        "this loss is over sequences, and depends on which documents share one: take aux_loss or another",
    ),
    Conflict(
        "moe_router_load_balancing_type",
        _one_of("sinkhorn", "quantile_balancing"),
        "--moe-router-load-balancing-type sinkhorn|quantile_balancing",
        "it routes a document's tokens by all others of its micro-batch: take aux_loss or another",
    ),
    Conflict(
        "overlap_moe_expert_parallel_comm",
        bool,
        "--overlap-moe-expert-parallel-comm",
        "Megatron's schedule plan does not pass the bounds of sequences on: leave it out",
    ),
    Conflict(
        "dataloader_type",
        _one_of("cyclic", "external"),
        "--dataloader-type cyclic|external",
        f"{_FIXED_ITEMS} (single)",
    ),
    Conflict("logits_save_dir", bool, "--logits-save-dir", _BY_PLACE),
    Conflict("logits_load_dir", bool, "--logits-load-dir", _BY_PLACE),
    Conflict("decrease_batch_size_if_needed", bool, "--decrease-batch-size-if-needed", _FIXED_ITEMS),
    Conflict(
        "non_persistent_ckpt_type",
        _one_of("local"),
        "--non-persistent-ckpt-type local",
        f"{_BESIDE}, global ones only: take global",
    ),
    Conflict(
        "object_storage_cache_path",
        bool,
        "--object-storage-cache-path",
        "documents are read from a file system: copy the data there",
    ),
    Conflict("phase_transition_iterations", bool, "--phase-transition-iterations", _FIXED_ITEMS),
    Conflict("iterations_to_skip", bool, "--iterations-to-skip", _FIXED_ITEMS),
    Conflict(
        "check_for_spiky_loss",
        bool,
        "--check-for-spiky-loss",
        "it compares sums over micro-batches, which hold different numbers of labels: leave it out",
    ),
    Conflict(
        "moe_expert_capacity_factor",
        lambda value: True,
        "--moe-expert-capacity-factor",
        "which tokens of a document are dropped would depend on the others in its micro-batch and on padding: leave it out",
    ),
    Conflict(
        "position_embedding_type",
        _one_of("mrope"),
        "--position-embedding-type mrope",
        "its positions have three axes, documents of text have one: take rope",
    ),
    Conflict(
        "softmax_type",
        _one_of("off-by-one", "learnable"),
        "--softmax-type",
        "attention within sequences has no such softmax here: take vanilla",
    ),
)


def refuse_conflicts(args: Any) -> None:
    """Refuse what packing cannot go with.

    Raises:
        BalanceError: names the argument and says why.
    """
    for conflict in CONFLICTS:
        value = getattr(args, conflict.name, None)
        if value is not None and conflict.is_set(value):
            raise BalanceError(f"{FLAG} cannot be used with {conflict.flag}: {conflict.reason}")
    refuse_uncovered(without_spec(args), FLAG, f"Leave out {FLAG}.")
    _check_graphs(args)
    _check_folders(args)
    check_weight_shards(vars(args))
    check_stages_beside_fsdp(vars(args))
    if getattr(args, "full_validation", False):
        _check_full_validation(args)
    if not getattr(args, "calculate_per_token_loss", False):
        raise BalanceError(
            f"{FLAG} needs --calculate-per-token-loss: micro-batches hold different numbers of labels, and without it the"
            " gradient would depend on which documents share one"
        )


def without_spec(args: Any) -> dict[str, Any]:
    """The arguments of the model that documents are placed for: layers of one's own are taken to cost what Megatron's do.

    Where that is wrong, ranks wait for one another, and nothing else is.
    """
    return {**vars(args), "spec": None}


def _check_folders(args: Any) -> None:
    for name in ("save",) if args.finetune else ("save", "load"):
        if is_remote(getattr(args, name)):
            raise BalanceError(
                f"{FLAG} cannot be used with --{name} of a storage that is no file system (://): {_BESIDE}: take a folder"
            )


def _check_graphs(args: Any) -> None:
    """CUDA graphs keep what they were captured with: the bounds of sequences, whose number is another in every micro-batch."""
    given = [
        getattr(args, name, None) for name in ("cuda_graph_modules", "cuda_graph_scope", "cuda_graph_scope_deprecated")
    ]
    parts = {
        getattr(part, "name", part) for each in given if each for part in (each if isinstance(each, list) else [each])
    }
    kind = getattr(args, "cuda_graph_impl", None) or "none"
    old = [name for name in ("enable_cuda_graph", "external_cuda_graph") if getattr(args, name, False)]
    if kind == "none" and not old:
        return
    flag = f"--{old[0].replace('_', '-')}" if old else f"--cuda-graph-impl {kind}"
    if not parts or parts & {"attn", "full", "full_iteration", "mamba"} or kind == "full_iteration":
        raise BalanceError(
            f"{FLAG} cannot be used with {flag}: a graph that holds attention keeps the first micro-batch's bounds of sequences."
            " Capture other parts alone (--cuda-graph-modules or --cuda-graph-scope, of mlp, moe_router, moe_preprocess), or leave"
            " it out"
        )


def _check_full_validation(args: Any) -> None:
    if not args.multiple_validation_sets:
        raise BalanceError(
            "--full-validation alone stops at the first evaluation in Megatron itself (up to 0.19: it takes the number of"
            " iterations for a list): give --multiple-validation-sets, too, and the sets with --valid-data-path"
        )
    size = getattr(args, "eval_micro_batch_size", None) or args.micro_batch_size
    if size is not None and size > 1:
        raise BalanceError(
            f"--full-validation evaluates in micro-batches of one sequence, this job's have {size}: give"
            " --eval-micro-batch-size 1, or --micro-batch-size 1 where this Megatron has no such flag"
        )
