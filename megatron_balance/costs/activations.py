"""What the parts of a model keep from their forward pass for their backward pass, in bytes.

The tensors that autograd saves, each storage once, of one micro-batch on one rank. Those of Megatron's local layers are
counted on layers built by it (see the tests). Those of Transformer Engine's layers, which need a GPU, follow its
documentation and code: a linear layer with a norm keeps the norm's input and output; flash attention keeps queries, keys,
values, output and one fp32 number for each head and token (arXiv 2205.14135, section 3.1). Both leave activation
functions fused (Megatron's default), which keep their input alone. See also Korthikanti et al., arXiv 2205.05198.

Left out: the attention mask (one a micro-batch, small beside the scores), buffers of communication, fp32 residuals.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_balance.model import Experts, LatentAttention, LayerKind, Mamba, ModelSpec
from megatron_balance.topology import Topology

_FP32, _INT64 = 4, 8
_MASK = 1  # a byte a value, as torch's CUDA dropout keeps it
LOW_PRECISION_BYTES = {"fp8": 1.0, "fp4": 0.5}  # of a value in matrix products alone


@dataclass(frozen=True)
class Saved:
    """Bytes that a part keeps.

    Attributes:
        kept: from forward to backward pass.
        again: made again in the backward pass, by selective recomputation.
        widest: of the largest run of values between two sums over the hidden size, whose gradients are there at a time.
    """

    kept: float = 0.0
    again: float = 0.0
    widest: float = 0.0

    def __add__(self, other: Saved) -> Saved:
        return Saved(self.kept + other.kept, self.again + other.again, max(self.widest, other.widest))

    @property
    def all(self) -> float:
        return self.kept + self.again


@dataclass(frozen=True)
class Activations:
    """What the parts of ``model`` keep on one rank of ``topology``."""

    model: ModelSpec
    topology: Topology

    @property
    def tokens(self) -> float:
        """Tokens of a micro-batch on one context-parallel rank."""
        return self.topology.micro_batch_size * self.model.seq_length / self.topology.context_size

    @property
    def residual(self) -> float:
        """Bytes of the residual stream, the input of a layer."""
        return self._residual_tokens * self.model.hidden_size * self.model.dtype_bytes

    def embedding(self) -> float:
        """Numbers of tokens and positions, and a dropout mask. Its output is the input of the first layer."""
        learned = self.model.position_embedding_type == "learned_absolute"
        return self.tokens * _INT64 * (1 + learned) + self._dropped()

    def layer(self, kind: LayerKind) -> Saved:
        """A layer without full recomputation, its input included."""
        parts = Saved()
        if kind.mixer is not None:
            parts += self._norm() + self._mixer(kind) + Saved(self._dropped())
        if kind.feed_forward is not None:
            parts += self._norm() + self._feed_forward(kind) + Saved(self._dropped())
        return parts

    def mtp_depth(self) -> Saved:
        """A multi-token-prediction depth: embedding, two norms, both joined in a projection, layers and their norm."""
        joined = Saved(2 * self.residual * self._linear_share)
        norms = Saved(3 * self._normed())
        return sum((self.layer(kind) for kind in self.model.depth_layers), Saved(self.embedding()) + joined + norms)

    def head(self) -> float:
        """Final norm, output layer and loss; for each multi-token-prediction depth another output layer and loss."""
        outputs = 1 + self.model.mtp_num_layers
        return self._normed() + outputs * (self.residual + self.tokens * (_INT64 + _MASK) + self._kept_logits)

    @property
    def logits(self) -> float:
        """Values of the logits."""
        return self.tokens * self.model.padded_vocab_size / self.topology.tensor_size

    @property
    def _kept_logits(self) -> float:
        """Softmax in fp32; Transformer Engine's loss keeps the gradient in the place of the logits."""
        return self.logits * (self.model.dtype_bytes if self.model.cross_entropy_fusion == "te" else _FP32)

    # Parts of a layer.

    def _norm(self) -> Saved:
        """A norm before a linear layer: its input, and its output, which the layer keeps."""
        output = self._recomputable(self.residual * self._linear_share, "layernorm")
        return Saved(self._normed()) + output

    def _mixer(self, kind: LayerKind) -> Saved:
        if kind.mixer == "mamba":
            return self._mamba(self.model.mamba)
        if kind.mixer == "linear":
            return Saved()
        latent = self.model.latent_attention
        return self._latent_attention(latent) if latent else self._attention(kind)

    def _attention(self, kind: LayerKind) -> Saved:
        model = self.model
        groups = kind.num_query_groups or model.num_query_groups
        queries, keys = model.query_size, groups * model.kv_channels
        normed = self._head_norms(queries, keys) if model.qk_layernorm else 0.0
        gate = 3 * self._bytes(queries) * model.attention_output_gate  # what it scales, its sigmoid, its input
        kept = Saved(normed + gate + self._attended(queries), widest=self._bytes(2 * queries + 2 * keys))
        if model.fused_kernels:
            mixed = self._bytes(queries + 2 * keys) * model.qk_layernorm  # the norms' input
            return kept + Saved(self._bytes(queries + 2 * keys) + mixed) + self._core()
        return kept + self._local_inputs(queries, keys, model.num_attention_heads > groups) + self._core()

    def _local_inputs(self, queries: int, keys: int, grouped: bool) -> Saved:
        """Queries, keys and values of local attention, which repeats the keys and values of a group for each query.

        Slices of the joint projection keep all of it. A rotary position embedding copies queries and keys and keeps its
        cosines and sines, for each of them.
        """
        rotary = self._is_rotary
        tables = 4 * self.model.seq_length / self.topology.context_size * self.model.kv_channels * rotary
        copied = rotary or self.model.qk_layernorm
        joint = queries + 2 * keys
        if "core_attn" in self.model.recompute.modules:  # what goes into the function that is run again
            sources = joint + (queries + keys) * copied
        else:
            normed = self.model.qk_layernorm and not self._converts  # keeps its inputs: queries copied, keys a slice
            sources = 3 * queries + (queries + joint) * normed if grouped else joint + (queries + keys) * copied
        return Saved(self._bytes(sources) + tables * self.model.dtype_bytes)

    def _core(self) -> Saved:
        """The inside of attention: a number for each head and token in flash attention, else all scores."""
        model = self.model
        heads = model.num_attention_heads / self.topology.tensor_size
        if model.fused_kernels:
            return self._recomputable(_FP32 * self.tokens * heads, "core_attn")
        scores = self.tokens * model.seq_length * heads
        dropped = (_MASK + model.dtype_bytes) * (model.attention_dropout > 0)
        inside = self._recomputable(scores * (model.dtype_bytes + dropped), "core_attn")
        return inside + Saved(widest=3 * scores * model.dtype_bytes)

    def _latent_attention(self, latent: LatentAttention) -> Saved:
        """Latent queries, keys and values before and after their norms; queries, keys and values of all heads.

        By the code of Megatron's layers; not counted on built ones, which need Transformer Engine.
        """
        model, heads = self.model, self.model.num_attention_heads
        narrow = (latent.q_lora_rank or 0) + latent.kv_lora_rank
        latents = 2 * self._residual_tokens * (narrow + latent.qk_pos_emb_head_dim) * model.dtype_bytes
        outputs = heads * latent.v_head_dim
        wide = 2 * heads * latent.head_dim + outputs
        if not model.fused_kernels:  # values are slices of the joint projection
            wide += heads * latent.qk_head_dim
        up = self._recomputable(self._bytes(wide), "mla_up_proj")
        kept = Saved(latents + self._attended(outputs), widest=self._bytes(wide + outputs))
        return kept + up + self._core()

    def _mamba(self, mamba: Mamba) -> Saved:
        """The joint projection, and the scan's output before and after its gate and norm; the scan runs again anyway.

        By the code of Megatron's mixer and of mamba_ssm's fused kernel; not counted on built layers.
        """
        inside = self._bytes(mamba.projected_size + mamba.inner_size)
        return Saved(inside + self._linear_input(mamba.inner_size), widest=inside)

    def _feed_forward(self, kind: LayerKind) -> Saved:
        if kind.feed_forward == "linear":
            return Saved()
        if kind.moe:
            return self._moe(self.model.experts)
        inside = self._mlp(self.tokens, kind.ffn_hidden_size or self.model.ffn_hidden_size)
        return self._recomputable(inside.kept, "mlp") + Saved(widest=inside.widest)

    def _mlp(self, tokens: float, ffn_hidden_size: int, shards: int | None = None) -> Saved:
        """The activation function's input, and its output, which the second linear layer keeps."""
        width = tokens * ffn_hidden_size / (shards or self.topology.tensor_size)
        inputs = width * (2 if self.model.gated else 1) * self.model.dtype_bytes
        output = width * self.model.dtype_bytes
        return Saved(inputs + output * self._linear_share, widest=inputs + output)

    def _moe(self, experts: Experts) -> Saved:
        """Routing, the copies of tokens that visit this rank's experts (evenly many on every rank), and the experts."""
        width = self.model.dtype_bytes
        copies = self.tokens * experts.topk * experts.tensor_shards / self.topology.tensor_size
        visiting = copies * (experts.latent_size or self.model.hidden_size) * width * self._linear_share
        routing = self._residual_tokens * experts.topk * (4 * _INT64 + _FP32 + width)
        routed = self._experts(copies, experts)
        shared = self._mlp(self.tokens, experts.shared_ffn_hidden_size)
        gated = self.residual * experts.shared_gate
        latent = 2 * self._residual_tokens * (experts.latent_size or 0) * width
        inside = Saved(routing + visiting + latent, widest=max(routed.widest, shared.widest)) + routed
        inside += self._recomputable(shared.kept + gated, "shared_experts")
        return Saved(again=inside.all, widest=inside.widest) if "moe" in self.model.recompute.modules else inside

    def _experts(self, copies: float, experts: Experts) -> Saved:
        """Their MLPs. Without gate the probability is a product of its own, which keeps its input."""
        mlp = self._mlp(copies, experts.ffn_hidden_size, experts.tensor_shards)
        output = copies * experts.ffn_hidden_size / experts.tensor_shards * self.model.dtype_bytes
        if not self.model.gated:
            return Saved(mlp.kept + output, widest=mlp.widest)
        made_again = self._recomputable(output * self._linear_share, "moe_act")
        return Saved(mlp.kept - made_again.all, widest=mlp.widest) + made_again

    # Tensors.

    @property
    def _residual_tokens(self) -> float:
        """Tokens of the residual stream on one rank."""
        return self.tokens / (self.topology.tensor_size if self.model.sequence_parallel else 1)

    @property
    def _is_rotary(self) -> bool:
        return self.model.position_embedding_type not in ("learned_absolute", "none")

    @property
    def _linear_share(self) -> float:
        """Bytes of a linear layer's kept input, over those in the model's dtype: Transformer Engine keeps what it multiplies."""
        if not self.model.fused_kernels:
            return 1.0
        return LOW_PRECISION_BYTES.get(self.model.matmul_dtype, self.model.dtype_bytes) / self.model.dtype_bytes

    def _bytes(self, width: float) -> float:
        """Of values that tensor parallelism splits, ``width`` of them a token."""
        return self.tokens * width / self.topology.tensor_size * self.model.dtype_bytes

    def _linear_input(self, width: float) -> float:
        return self._bytes(width) * self._linear_share

    def _attended(self, width: float) -> float:
        """Attention's output, which the projection behind it keeps too: the same tensor where their precision is the same."""
        apart = self._linear_share < 1
        return self._linear_input(width) + self._bytes(width) * apart

    def _normed(self) -> float:
        """What a norm of the residual stream keeps, without its output."""
        return self._norm_bytes(self._residual_tokens * self.model.hidden_size, self._residual_tokens)

    def _head_norms(self, queries: int, keys: int) -> float:
        """What the norms of queries and keys keep; their input, a slice of the joint projection, only where it is copied."""
        shards = self.topology.tensor_size
        values = self.tokens * (queries + keys) / shards
        own = self._norm_bytes(values, values / self.model.kv_channels)
        return own if self._converts else own - values * self.model.dtype_bytes

    def _norm_bytes(self, values: float, vectors: float) -> float:
        """Input, and a mean (LayerNorm) and a scale for each vector.

        The local RMSNorm is torch's: an input in fp32 and a normalized one, by its composite form (on CPUs and, before
        torch 2.9, on GPUs).
        """
        model = self.model
        if self._converts:
            return 2 * _FP32 * values + _FP32 * vectors
        statistics = vectors * (_FP32 if model.fused_kernels else model.dtype_bytes)
        return values * model.dtype_bytes + statistics * (2 if model.normalization == "LayerNorm" else 1)

    @property
    def _converts(self) -> bool:
        return not self.model.fused_kernels and self.model.normalization == "RMSNorm"

    def _dropped(self) -> float:
        """Mask of the dropout before a residual sum, or behind the embedding."""
        return self._residual_tokens * self.model.hidden_size * _MASK * (self.model.hidden_dropout > 0)

    def _recomputable(self, size: float, module: str) -> Saved:
        """Bytes that are kept unless ``module`` is one of those that are computed again."""
        return Saved(again=size) if module in self.model.recompute.modules else Saved(kept=size)
