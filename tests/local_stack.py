"""A hybrid model's layers of attention, MLP and experts in Megatron's own modules, for `--spec local_stack stack`.

Megatron's `hybrid_stack_spec` is made of Transformer Engine's. Mamba layers are left out: their kernels run on GPUs alone.
"""

from functools import partial

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.hybrid import hybrid_block
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

hybrid_block.TENorm = WrappedTorchNorm  # the final norm, which no specification names

_attention = ModuleSpec(
    module=SelfAttention,
    params={"attn_mask_type": AttnMaskType.causal},
    submodules=SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear, core_attention=DotProductAttention, linear_proj=RowParallelLinear
    ),
)
_mlp = partial(
    MLP.as_mlp_submodule, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
)
_depth = ModuleSpec(
    module=MultiTokenPredictionLayer,
    submodules=MultiTokenPredictionLayerSubmodules(
        enorm=WrappedTorchNorm,
        hnorm=WrappedTorchNorm,
        eh_proj=ColumnParallelLinear,
        mtp_model_layer=None,  # the pattern says which
        layer_norm=WrappedTorchNorm,
    ),
)
stack = ModuleSpec(
    module=HybridStack,
    submodules=HybridStackSubmodules(
        attention_layer=ModuleSpec(
            module=TransformerLayer,
            submodules=TransformerLayerSubmodules(
                input_layernorm=WrappedTorchNorm, self_attention=_attention, self_attn_bda=get_bias_dropout_add
            ),
        ),
        mlp_layer=ModuleSpec(
            module=MLPLayer,
            submodules=TransformerLayerSubmodules(
                pre_mlp_layernorm=WrappedTorchNorm, mlp=_mlp, mlp_bda=get_bias_dropout_add
            ),
        ),
        mtp_block_spec=ModuleSpec(
            module=MultiTokenPredictionBlock, submodules=MultiTokenPredictionBlockSubmodules(layer_specs=[_depth])
        ),
    ),
)
