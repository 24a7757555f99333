"""Pretrain a GPT with an installed megatron-core alone: `pretrain_gpt.py` for those who have no Megatron-LM checkout.

Takes every flag of Megatron-LM's script of the same version (0.18 and newer); run by `python -m megatron_balance.run`.
"""

from __future__ import annotations

from typing import Any

from megatron.core.enums import ModelType
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks
from megatron.training import argument_utils, get_args, inprocess_restart, pretrain
from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args

from megatron_balance.megatron.gpt_data import datasets
from megatron_balance.megatron.gpt_step import forward_step


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
    config = config or core_transformer_config_from_args(args)
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


def _layer_spec(args: Any, config: Any, vp_stage: int | None) -> Any:
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as variants
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs import get_gpt_heterogeneous_layer_spec
    from megatron.core.transformer.spec_utils import import_module

    if args.spec is not None:
        return import_module(args.spec)
    if args.experimental_attention_variant is not None:
        return variants.get_transformer_block_with_experimental_attention_variant_spec(config=config, vp_stage=vp_stage)
    if args.heterogeneous_layers_config_path is not None:
        return get_gpt_heterogeneous_layer_spec(config, args.transformer_impl == "transformer_engine")
    return gpt_layer_specs.get_gpt_decoder_block_spec(vp_stage=vp_stage, **_spec_options(args, config))


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
    run, store = inprocess_restart.maybe_wrap_for_inprocess_restart(pretrain)
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "GPT2BPETokenizer"})
    options: dict[str, Any] = {"store": store, "get_embedding_ranks": embedding_ranks}
    if hasattr(argument_utils, "gpt_config_from_args"):  # since 0.19 Megatron builds the model itself
        config = argument_utils.pretrain_cfg_container_from_args(args, argument_utils.gpt_config_from_args(args))
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
