"""Datasets of our `pretrain_gpt`, from Megatron's command line."""

from __future__ import annotations

import json
from dataclasses import fields
from functools import partial
from typing import Any

from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank
from megatron.training import get_args, get_tokenizer, print_rank_0
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.datasets.fim_dataset import GPTFIMDataset, GPTFIMDatasetConfig
from megatron.training.datasets.sft_dataset import SFTDataset
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

# Dataset config fields whose command-line argument has another name; all others have the same.
_RENAMED = {
    "random_seed": "seed",
    "sequence_length": "seq_length",
    "path_to_cache": "data_cache_path",
    "create_attention_mask": "create_attention_mask_in_dataloader",
    "fast_cache_load": "dataloader_fast_cache_load",
    "defer_npy_index_mmap": "dataloader_defer_npy_index_mmap",
    "inter_document_masking": "dataloader_inter_document_masking",
}


def has_mtp(args: Any, vp_stage: int | None) -> bool:
    """Whether this stage predicts further tokens, so that it reads tokens although it is neither first nor last."""
    layout = core_transformer_config_from_args(args).pipeline_model_parallel_layout
    return mtp_on_this_rank(layout=layout, mtp_num_layers=args.mtp_num_layers, ignore_virtual=False, vp_stage=vp_stage)


def carries_lengths(args: Any) -> bool:
    """Whether batches carry `cu_seqlens`, which every pipeline stage needs."""
    return args.sft or getattr(args, "dataloader_inter_document_masking", False)


def datasets(num_samples: list[int], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
    """Train, validation and test dataset for Megatron's `pretrain`; ``num_samples`` holds the size of each."""
    args = get_args()
    kind, config_kind = _dataset_kind(args)
    is_built = partial(_is_built_here, args, vp_stage)
    print_rank_0("> building train, validation, and test datasets for GPT ...")
    built = BlendedMegatronDatasetBuilder(kind, num_samples, is_built, _dataset_config(args, config_kind)).build()
    print_rank_0("> finished creating GPT datasets ...")
    return built


datasets.is_distributed = True  # Megatron: build on every rank that `_is_built_here` names


def _dataset_kind(args: Any) -> tuple[type, type]:
    if args.sft:
        return SFTDataset, GPTDatasetConfig
    if args.mock_data:
        return MockGPTDataset, GPTDatasetConfig
    if args.fim_data:
        return GPTFIMDataset, GPTFIMDatasetConfig
    return GPTDataset, GPTDatasetConfig


def _is_built_here(args: Any, vp_stage: int | None) -> bool:
    if mpu.get_tensor_model_parallel_rank() != 0:
        return False
    # Stock builds none on middle stages with --dataloader-inter-document-masking, but reads one there.
    return carries_lengths(args) or is_first_or_last_pipeline_stage(vp_stage) or has_mtp(args, vp_stage)


def _dataset_config(args: Any, kind: type) -> GPTDatasetConfig:
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    values: dict[str, Any] = {
        "blend": blend,
        "blend_per_split": blend_per_split,
        "tokenizer": get_tokenizer(),
        "sequence_parallel_size": args.tensor_model_parallel_size * args.sequence_parallel,
        "sequences_per_dataset": _sequences_per_dataset(args),
    }
    if kind is GPTFIMDatasetConfig:
        names = ("prefix", "middle", "suffix", "pad", "eod")
        values["fim_extra_tokens"] = {name: getattr(args, f"fim_{name}_token") for name in names}
    for field in fields(kind):
        argument = _RENAMED.get(field.name, field.name)
        if field.init and field.name not in values and hasattr(args, argument):
            values[field.name] = getattr(args, argument)
    return kind(**values)


def _sequences_per_dataset(args: Any) -> dict[str, int] | None:
    if args.per_dataset_sequences_path is None:
        return None
    with open(args.per_dataset_sequences_path, encoding="utf-8") as file:
        return json.load(file)
