"""Numbers of parameters that one rank holds of each element of the chain, exactly as Megatron builds them.

Tensor parallelism splits the matrices, the biases of column-parallel layers and the word embedding. Norms, the biases of
row-parallel layers, the router and the position embedding are whole on every tensor-parallel rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_balance.model import Experts, LatentAttention, LayerKind, Mamba, ModelSpec
from megatron_balance.topology import Topology

_CONVOLVED_TOKENS = 4  # Megatron's d_conv of Mamba layers


@dataclass(frozen=True)
class Parameters:
    """Parameters of an element on one rank.

    Attributes:
        dense: all but the routed experts'.
        expert: of the routed experts: fewer ranks hold copies of them, over which a distributed optimizer is sharded.
    """

    dense: int = 0
    expert: int = 0

    @property
    def total(self) -> int:
        return self.dense + self.expert

    def __add__(self, other: Parameters) -> Parameters:
        return Parameters(self.dense + other.dense, self.expert + other.expert)

    def __mul__(self, times: int) -> Parameters:
        return Parameters(self.dense * times, self.expert * times)


@dataclass(frozen=True)
class ChainParameters:
    """Parameters of the elements of the chain on one rank.

    Attributes:
        embedding: word and position embedding.
        layers: each layer, in model order. With multi-token prediction the last one brings the final norm, which Megatron
            (0.16 and newer) then builds in the stage of the last layer.
        mtp: the multi-token-prediction layers of all depths, with the embedding of their own that they bring to a stage
            which is not the first.
        head: final norm (without multi-token prediction) and output layer; a tied output layer is a copy of the embedding
            in the last of several pipeline ranks, and nothing of its own on a single one.
    """

    embedding: Parameters
    layers: tuple[Parameters, ...]
    mtp: Parameters
    head: Parameters

    @property
    def total(self) -> Parameters:
        """The whole chain's."""
        return sum(self.layers, self.embedding + self.mtp + self.head)


def chain_parameters(model: ModelSpec, topology: Topology) -> ChainParameters:
    """Parameters of ``model``'s elements on one rank of ``topology``."""
    count = _Count(model, topology.tensor_size)
    layers = [count.layer(kind) for kind in model.layers]
    final_norm, several = count.norm, topology.pipeline_size > 1
    if model.mtp_num_layers:
        layers[-1] += final_norm
        final_norm = Parameters()
    return ChainParameters(
        embedding=count.embedding,
        layers=tuple(layers),
        mtp=count.mtp(own_embedding=several),
        head=final_norm + (count.words if several or model.untied_head else Parameters()),
    )


def layer_parameters(model: ModelSpec, topology: Topology, kind: LayerKind) -> Parameters:
    """Parameters of one layer of ``kind`` on one rank of ``topology``."""
    return _Count(model, topology.tensor_size).layer(kind)


@dataclass(frozen=True)
class _Count:
    """The parts of ``model`` on one of ``tensor_size`` tensor-parallel ranks."""

    model: ModelSpec
    tensor_size: int

    @property
    def norm(self) -> Parameters:
        """A norm over the hidden size."""
        return Parameters(self._norm(self.model.hidden_size))

    @property
    def words(self) -> Parameters:
        """A word embedding or an output layer."""
        return Parameters(self.model.hidden_size * self.model.padded_vocab_size // self.tensor_size)

    @property
    def embedding(self) -> Parameters:
        learned = self.model.position_embedding_type == "learned_absolute"
        return self.words + Parameters(self.model.hidden_size * self.model.max_position_embeddings * learned)

    def mtp(self, own_embedding: bool) -> Parameters:
        """Of all depths: two norms, a projection of both joined, layers and a final norm."""
        model = self.model
        if not model.mtp_num_layers:
            return Parameters()
        projection = Parameters(_column(2 * model.hidden_size, model.hidden_size, self.tensor_size, bias=False))
        depth = sum((self.layer(kind) for kind in model.depth_layers), self.norm * 3 + projection)
        return depth * model.mtp_num_layers + (self.embedding if own_embedding else Parameters())

    def layer(self, kind: LayerKind) -> Parameters:
        parts = Parameters()
        if kind.mixer is not None:
            parts += self.norm + Parameters(self._mixer(kind))
        if kind.feed_forward is not None:
            parts += self.norm + self._feed_forward(kind)
        return parts

    def _mixer(self, kind: LayerKind) -> int:
        if kind.mixer == "mamba":
            return self._mamba(self.model.mamba)
        if kind.mixer == "linear":
            return self._replacement()
        latent = self.model.latent_attention
        return self._latent_attention(latent) if latent else self._attention(kind)

    def _feed_forward(self, kind: LayerKind) -> Parameters:
        if kind.feed_forward == "linear":
            return Parameters(self._replacement())
        if kind.moe:
            return self._moe(self.model.experts)
        return Parameters(self._mlp(kind.ffn_hidden_size or self.model.ffn_hidden_size))

    def _replacement(self) -> int:
        """One matrix in the place of attention or MLP."""
        model = self.model
        return _column(model.hidden_size, model.hidden_size, self.tensor_size, model.add_bias_linear)

    def _norm(self, size: int) -> int:
        return size * (2 if self.model.normalization == "LayerNorm" else 1)

    def _attention(self, kind: LayerKind) -> int:
        model, tensor = self.model, self.tensor_size
        kv_size = (kind.num_query_groups or model.num_query_groups) * model.kv_channels
        widths = model.query_size * (1 + model.attention_output_gate) + 2 * kv_size
        qkv = _column(model.hidden_size, widths, tensor, model.add_qkv_bias)
        output = _row(model.query_size, model.hidden_size, tensor, model.add_bias_linear)
        norms = 2 * self._norm(model.kv_channels) * model.qk_layernorm
        return qkv + output + norms + self._softmax_offsets

    def _latent_attention(self, latent: LatentAttention) -> int:
        """No projection but the last has a bias. Transformer Engine's projections down are whole on every rank."""
        model, tensor, heads = self.model, self.tensor_size, self.model.num_attention_heads
        down = [latent.kv_lora_rank + latent.qk_pos_emb_head_dim, latent.q_lora_rank or 0]
        shards = 1 if model.fused_kernels else tensor
        up = _column(latent.q_lora_rank or model.hidden_size, heads * latent.head_dim, tensor, bias=False)
        up += _column(latent.kv_lora_rank, heads * (latent.qk_head_dim + latent.v_head_dim), tensor, bias=False)
        norms = self._norm(latent.kv_lora_rank + (latent.q_lora_rank or 0)) * model.qk_layernorm
        output = _row(heads * latent.v_head_dim, model.hidden_size, tensor, model.add_bias_linear)
        return model.hidden_size * sum(width // shards for width in down) + up + norms + output + self._softmax_offsets

    @property
    def _softmax_offsets(self) -> int:
        return self.model.num_attention_heads // self.tensor_size * self.model.learnable_softmax

    def _mamba(self, mamba: Mamba) -> int:
        """Two projections, a convolution with its bias, three values a head and a norm of all heads."""
        hidden, tensor = self.model.hidden_size, self.tensor_size
        projections = _column(hidden, mamba.projected_size, tensor, bias=False)
        projections += _row(mamba.inner_size, hidden, tensor, bias=False)
        others = mamba.convolved_size * (_CONVOLVED_TOKENS + 1) + 3 * mamba.num_heads + mamba.inner_size
        return projections + others // tensor

    def _mlp(self, ffn_hidden_size: int, tensor_size: int | None = None, input_size: int | None = None) -> int:
        model, tensor, outside = self.model, tensor_size or self.tensor_size, input_size or self.model.hidden_size
        first = ffn_hidden_size * (2 if model.gated else 1)
        bias = model.add_bias_linear
        return _column(outside, first, tensor, bias) + _row(ffn_hidden_size, outside, tensor, bias)

    def _moe(self, experts: Experts) -> Parameters:
        hidden, bias = self.model.hidden_size, self.model.add_bias_linear
        router = experts.count * (hidden + bias)
        shared = self._mlp(experts.shared_ffn_hidden_size) if experts.shared_ffn_hidden_size else 0
        gate = hidden * experts.shared_gate
        latent = experts.latent_size or 0
        to_latent = 2 * hidden * latent + bias * (hidden + latent) * (latent > 0)
        own = experts.count * experts.tensor_shards // experts.shards
        expert = self._mlp(experts.ffn_hidden_size, experts.tensor_shards, experts.latent_size)
        return Parameters(router + shared + gate + to_latent, own * expert)


def _column(inputs: int, outputs: int, tensor_size: int, bias: bool) -> int:
    """A column-parallel linear layer: each rank computes some outputs, and holds their biases."""
    return (inputs + bias) * outputs // tensor_size


def _row(inputs: int, outputs: int, tensor_size: int, bias: bool) -> int:
    """A row-parallel linear layer: each rank takes some inputs; the bias is added to the sum, and whole on each."""
    return inputs * outputs // tensor_size + bias * outputs
