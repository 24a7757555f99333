"""Published models as chains of FLOPs and bytes, by the formulas of the two tables that ``split.py`` reproduces.

FLOPs are those of one token, as picoseconds: only their proportions matter. The embedding costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_balance.costs.chain import ChainCosts, ElementCost
from megatron_balance.costs.memory import ChainMemory, ElementMemory

_FREE = ElementCost(0.0, 0.0)


@dataclass(frozen=True)
class Dense:
    """A dense model: published sizes, and the length of the sequences that it is trained on."""

    num_layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    sequence: int

    def costs(self) -> ChainCosts:
        """FLOPs by matrix products and causal attention; backward 2 and 2.5 times the forward pass."""
        weights = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads) + 3 * self.hidden * self.ffn
        layer = _cost(weights, 2 * self.sequence * self.heads * self.head_dim)
        return ChainCosts(_FREE, (layer,) * self.num_layers, _cost(self.hidden * self.vocabulary), "FLOPs")

    def square_costs(self) -> ChainCosts:
        """FLOPs as in comparisons of split rules: heads as wide as the hidden size, backward twice the forward pass."""
        layer = 2 * self.square_layer_parameters + 2 * self.hidden * self.sequence
        head = 2 * self.table_parameters
        layer_cost, head_cost = (ElementCost(1e-12 * flops, 2e-12 * flops) for flops in (layer, head))
        return ChainCosts(_FREE, (layer_cost,) * self.num_layers, head_cost, "FLOPs")

    @property
    def square_layer_parameters(self) -> float:
        return self.hidden**2 * (2 + 2 * self.kv_heads / self.heads) + 3 * self.hidden * self.ffn

    @property
    def table_parameters(self) -> int:
        """Of the embedding, and of the output layer."""
        return self.hidden * self.vocabulary


def _cost(weights: float, attention_flops: float = 0.0) -> ElementCost:
    """Of so many weights and of attention; backward 2 and 2.5 times the forward pass."""
    flops = 2 * weights
    return ElementCost(1e-12 * (flops + attention_flops), 1e-12 * (2 * flops + 2.5 * attention_flops))


LLAMA_3_8B = Dense(32, 4096, 14336, 32, 8, 128, 128256, 8192)
LLAMA_3_70B = Dense(80, 8192, 28672, 64, 8, 128, 128256, 8192)
LLAMA_31_405B = Dense(126, 16384, 53248, 128, 8, 128, 128256, 8192)
LLAMA_2_7B = Dense(32, 4096, 11008, 32, 32, 128, 32000, 4096)
QWEN_25_7B = Dense(28, 3584, 18944, 28, 4, 128, 152064, 4096)
GEMMA_2_9B = Dense(42, 3584, 14336, 16, 8, 256, 256000, 8192)
GEMMA_2_27B = Dense(46, 4608, 36864, 32, 16, 128, 256000, 8192)

# --- DeepSeek-V3: multi-latent attention, 3 dense and 58 mixture-of-experts layers, one depth of prediction (MTP)

_V3_HIDDEN, _V3_VOCABULARY, _V3_SEQUENCE = 7168, 129280, 4096
_V3_DOWN = _V3_HIDDEN * (1536 + 512 + 64)
_V3_UP = 1536 * 128 * (128 + 64) + 512 * 128 * (128 + 128)
_V3_ATTENTION = _V3_DOWN + _V3_UP + 128 * 128 * _V3_HIDDEN
_V3_EXPERT = 3 * _V3_HIDDEN * 2048
_V3_MLP = 3 * _V3_HIDDEN * 18432
_V3_PROJECTION = 2 * _V3_HIDDEN**2


def deepseek_v3_costs(head: float = 1.0) -> ChainCosts:
    """As trained on 4k tokens; the head counts ``head`` times, once for the model and once for the depth."""
    core_flops = _V3_SEQUENCE * 128 * (128 + 64 + 128)
    dense = _cost(_V3_ATTENTION + _V3_MLP, core_flops)
    moe_weights = _V3_ATTENTION + 9 * _V3_EXPERT + 256 * _V3_HIDDEN  # 8 routed, 1 shared, the router
    moe = _cost(moe_weights, core_flops)
    mtp = _cost(moe_weights + _V3_PROJECTION, core_flops)
    output = _cost(_V3_HIDDEN * _V3_VOCABULARY) * (2 * head)
    return ChainCosts(_FREE, (dense,) * 3 + (moe,) * 58, output, "FLOPs", mtp)


def deepseek_v3_memory() -> ChainMemory:
    """Bytes on a rank in Megatron-Bridge's bf16 recipe for 1,024 H100: TP2, SP, EP64, recomputing ``mla_up_proj`` and ``mlp``.

    Weights take 2 bytes, gradients 4, and the distributed optimizer 12 over the 64 data-parallel ranks (experts: over 2).
    Activations are what the layers keep in bf16: residuals and norms (split over TP), the latents twice (before and behind
    their norms), the core attention's output, each expert's input, first product and activation.
    """
    tensor, dense_bytes, expert_bytes = 2, 6 + 12 / 64, 6 + 12 / 2
    attention = _V3_DOWN + (_V3_ATTENTION - _V3_DOWN) / tensor
    kept = 4 * _V3_HIDDEN / tensor + 2 * (1536 + 512 + 64) + 128 * 128 / tensor
    routed = 8 / tensor * (_V3_HIDDEN + 3 * 2048) + 3 * 2048 / tensor
    table_bytes = _V3_HIDDEN * _V3_VOCABULARY / tensor * dense_bytes
    dense = ElementMemory((attention + _V3_MLP / tensor) * dense_bytes, 2 * _V3_SEQUENCE * kept)
    moe_dense = attention + _V3_EXPERT / tensor + 256 * _V3_HIDDEN
    moe = ElementMemory(
        moe_dense * dense_bytes + 256 / 64 * _V3_EXPERT * expert_bytes, 2 * _V3_SEQUENCE * (kept + routed)
    )
    embedding = ElementMemory(table_bytes)
    # The depth has an embedding of its own, where it is not on the embedding's rank, and keeps what joins the two.
    joined = 2 * _V3_SEQUENCE * 5 * _V3_HIDDEN / tensor
    mtp = ElementMemory(
        moe.state_bytes + _V3_PROJECTION / tensor * dense_bytes + table_bytes, moe.activation_bytes + joined
    )
    return ChainMemory(
        embedding, (dense,) * 3 + (moe,) * 58, mtp, _head_memory(table_bytes, _V3_VOCABULARY / tensor, 2)
    )


def _head_memory(table_bytes: float, vocabulary: float, outputs: int) -> ElementMemory:
    """Logits of 4k tokens in fp32 for each output, and once their gradient."""
    logits_bytes = 4 * 4096 * vocabulary
    return ElementMemory(table_bytes, outputs * logits_bytes, logits_bytes)


# --- GPT-OSS-120B: mixture of experts in all 36 layers, every other with a window of 128 tokens

_OSS_HIDDEN, _OSS_VOCABULARY, _OSS_SEQUENCE = 2880, 201088, 4096
_OSS_ATTENTION = _OSS_HIDDEN * 64 * (2 * 64 + 2 * 8)
_OSS_EXPERT = 3 * _OSS_HIDDEN**2


def gpt_oss_120b_costs() -> ChainCosts:
    weights = _OSS_ATTENTION + 4 * _OSS_EXPERT + 128 * _OSS_HIDDEN
    keys = 128 * (1 - 128 / (2 * _OSS_SEQUENCE)), _OSS_SEQUENCE / 2
    windowed, full = (_cost(weights, 4 * 64 * 64 * seen) for seen in keys)
    return ChainCosts(_FREE, (windowed, full) * 18, _cost(_OSS_HIDDEN * _OSS_VOCABULARY), "FLOPs")


def gpt_oss_120b_memory(recompute: bool = False) -> ChainMemory:
    """Bytes on a rank in Megatron-Bridge's bf16 recipe for 64 H100: TP1, EP8.

    Counted as DeepSeek-V3's, the distributed optimizer over 16 data-parallel ranks (experts: over 2).

    Args:
        recompute: as in the recipe's newest version ``layernorm`` and ``moe_act``: the norms' outputs and the experts'
            activations are not kept. Parameters then weigh more, and equal memory allows less.
    """
    dense_bytes, expert_bytes = 6 + 12 / 16, 6 + 12 / 2
    norms, expert = (2, 3) if recompute else (4, 4)
    kept = norms * _OSS_HIDDEN + 64 * (64 + 2 * 8) + 64 * 64 + 4 * expert * _OSS_HIDDEN
    layer = ElementMemory(
        (_OSS_ATTENTION + 128 * _OSS_HIDDEN) * dense_bytes + 128 / 8 * _OSS_EXPERT * expert_bytes,
        2 * _OSS_SEQUENCE * kept,
    )
    table_bytes = _OSS_HIDDEN * _OSS_VOCABULARY * dense_bytes
    head = _head_memory(table_bytes, _OSS_VOCABULARY, 1)
    return ChainMemory(ElementMemory(table_bytes), (layer,) * 36, ElementMemory(), head)


# --- The public trace of a job with 36 layers as 9 on each of 4 ranks (ByteDance-Seed/StragglerAnalysis, "ST")


def st_trace_costs() -> ChainCosts:
    """As published, of passes of the trace; ``split_trace.py`` derives them from the file."""
    layer, head = ElementCost(7.48e-3, 15.94e-3), ElementCost(72.4e-3, 60.0e-3)
    return ChainCosts(_FREE, (layer,) * 36, head, "trace")
