"""Pretrain a GPT with an installed megatron-core alone: `pretrain_gpt.py` for those who have no Megatron-LM checkout.

Takes the flags of Megatron-LM's script of the same version (0.18 and newer), without ModelOpt, which no wheel carries; run by
`python -m megatron_balance.run`. With `--hybrid-layer-pattern` and `--spec` it trains a hybrid model (0.19 and newer).
"""

from __future__ import annotations

import time
from inspect import signature
from typing import Any

import torch
from megatron.core.enums import ModelType
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks
from megatron.training import argument_utils, get_args, inprocess_restart, pretrain, set_startup_timestamps
from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args

from megatron_balance.megatron.gpt_data import datasets
from megatron_balance.megatron.gpt_step import forward_step

_PROGRAM_START_S = time.time()


def embedding_ranks(pp_ranks: list[int]) -> list[int]:
    """The ranks of one pipeline that hold the word embedding, whose gradients are summed when weights are tied."""
    args = get_args()
    ranks = {pp_ranks[0]}
    if len(pp_ranks) > 1:
        if not args.untie_embeddings_and_output_weights:
            ranks.add(pp_ranks[-1])
        ranks.update(get_mtp_ranks(pp_ranks, core_transformer_config_from_args(args)))
    return sorted(ranks)


def build_model(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> Any:
    """One model chunk, for Megatron 0.18, which has no builder of its own outside its checkout."""
    from megatron.core.models.gpt import GPTModel

    args = get_args()
    if args.record_memory_history:
        torch.cuda.memory._record_memory_history(max_entries=100_000)
    config = config or _config(args)
    layer_spec = _layer_spec(args, config, vp_stage)
    return GPTModel(
        config=config,
        transformer_layer_spec=layer_spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        mtp_block_spec=_mtp_spec(args, config, vp_stage),
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )


def _config(args: Any) -> Any:
    if args.yaml_cfg is not None:
        from megatron.training.yaml_arguments import core_transformer_config_from_yaml

        return core_transformer_config_from_yaml(args, "language_model")
    return core_transformer_config_from_args(args)


def _layer_spec(args: Any, config: Any, vp_stage: int | None) -> Any:
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as variants
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs import get_gpt_heterogeneous_layer_spec
    from megatron.core.transformer.spec_utils import import_module

    if args.spec is not None:
        return import_module(args.spec)
    if args.experimental_attention_variant is not None:
        return variants.get_transformer_block_with_experimental_attention_variant_spec(config=config, vp_stage=vp_stage)
    if args.num_experts:
        return gpt_layer_specs.get_gpt_decoder_block_spec(vp_stage=vp_stage, **_spec_options(args, config))
    if args.heterogeneous_layers_config_path is not None:
        return get_gpt_heterogeneous_layer_spec(config, args.transformer_impl == "transformer_engine")
    kinds = {
        "transformer_engine": gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec,
        "inference_optimized": gpt_layer_specs.get_gpt_layer_with_inference_spec,
        "local": gpt_layer_specs.get_gpt_layer_local_spec,
    }
    make_spec = kinds[args.transformer_impl]
    # Some take what the function that makes their submodules does. Its options bear the names of config fields.
    named_by = getattr(gpt_layer_specs, make_spec.__name__.removesuffix("spec") + "submodules", make_spec)
    names = set(signature(named_by).parameters) - {"fp8"}  # takes no effect, but a warning
    return make_spec(**{name: getattr(config, name) for name in names if hasattr(config, name)})


def _mtp_spec(args: Any, config: Any, vp_stage: int | None) -> Any:
    """Multi-token prediction repeats the model's last layer."""
    from megatron.core.models.gpt import gpt_layer_specs

    if args.mtp_num_layers is None:
        return None
    options = _spec_options(args, config)
    last = gpt_layer_specs.get_gpt_decoder_layer_specs(vp_stage=vp_stage, **options)[-1]
    return gpt_layer_specs.get_gpt_mtp_block_spec(
        config, last, use_transformer_engine=options["use_transformer_engine"], vp_stage=vp_stage
    )


def _spec_options(args: Any, config: Any) -> dict[str, Any]:
    return {
        "config": config,
        "use_transformer_engine": args.transformer_impl == "transformer_engine",
        "normalization": args.normalization,
        "qk_l2_norm": args.qk_l2_norm,
    }


def main() -> None:
    """Parse the command line and train."""
    set_startup_timestamps(program_start=_PROGRAM_START_S, main_entry=time.time())
    run, store = inprocess_restart.maybe_wrap_for_inprocess_restart(pretrain)
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "GPT2BPETokenizer"})
    options: dict[str, Any] = {"store": store, "get_embedding_ranks": embedding_ranks}
    if hasattr(argument_utils, "gpt_config_from_args"):  # since 0.19 Megatron builds the model itself
        hybrid = getattr(args, "hybrid_layer_pattern", None) is not None
        make_config = argument_utils.hybrid_config_from_args if hybrid else argument_utils.gpt_config_from_args
        config = argument_utils.pretrain_cfg_container_from_args(args, make_config(args))
    else:
        config = argument_utils.pretrain_cfg_container_from_args(args)
        options["model_provider"] = build_model
    run(
        config,
        train_valid_test_dataset_provider=datasets,
        model_type=ModelType.encoder_or_decoder,
        forward_step_func=forward_step,
        **options,
    )


if __name__ == "__main__":
    main()
