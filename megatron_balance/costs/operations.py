"""The parts of a model as the operations that one rank runs for a micro-batch: matrix products and bytes moved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron_balance.costs.chain import ElementCost
from megatron_balance.costs.devices import Device, Kernel
from megatron_balance.model import LayerKind, ModelSpec
from megatron_balance.topology import Topology

_FP32 = 4
_SCAN_CHUNK = 128  # tokens, Megatron's chunk_size of Mamba layers


@dataclass(frozen=True)
class Work:
    """The kernels of a part of the model."""

    forward: tuple[Kernel, ...] = ()
    backward: tuple[Kernel, ...] = ()

    def __add__(self, other: Work) -> Work:
        return Work(self.forward + other.forward, self.backward + other.backward)

    def __mul__(self, times: int) -> Work:
        return Work(self.forward * times, self.backward * times)

    def cost(self, device: Device) -> ElementCost:
        return ElementCost(device.seconds(self.forward), device.seconds(self.backward))


_EMPTY_LAYER = Work((Kernel(0.0),), (Kernel(0.0),))  # nothing but the framework around it


@dataclass(frozen=True)
class _Widths:
    """Widths of attention, all heads together."""

    queries: int
    keys: int
    values: int
    outputs: int

    @property
    def total(self) -> int:
        return self.queries + self.keys + self.values + self.outputs


@dataclass(frozen=True)
class Operations:
    """The parts of ``model`` as one rank of ``topology`` runs them."""

    model: ModelSpec
    topology: Topology

    @property
    def tokens(self) -> float:
        """Tokens of a micro-batch on one context-parallel rank."""
        return self.topology.micro_batch_size * self.model.seq_length / self.topology.context_size

    def embedding(self) -> Work:
        """Look-up, position embedding, transpose; in the backward pass a dense gradient of the whole table."""
        model, output = self.model, self.tokens * self.model.hidden_size
        work = self._table(model.padded_vocab_size / self.topology.tensor_size) + self._elementwise(output, 2, 2)
        if self.topology.tensor_size > 1:  # rows of other ranks are set to zero
            work += self._elementwise(output, 2, 2)
        if model.position_embedding_type == "learned_absolute":
            work += self._table(model.max_position_embeddings) + self._elementwise(output, 3, 0)
        return work

    def layer(self, kind: LayerKind) -> Work:
        """Norm, mixer and residual; norm, feed-forward part and residual; as far as it has them."""
        parts = Work()
        if kind.mixer is not None:
            parts += self._norm() + self._mixer(kind) + self._residual()
        if kind.feed_forward is not None:
            parts += self._norm() + self._feed_forward(kind) + self._residual()
        return parts if parts.forward else _EMPTY_LAYER

    def recomputed_layer(self, kind: LayerKind) -> Work:
        """A layer, with what it computes again in the backward pass if it is one of those that do."""
        layer = self.layer(kind)
        again = layer.forward if self.model.recompute.granularity == "full" else self._selected(kind).forward
        return Work(layer.forward, layer.backward + again)

    def recomputed_attention(self, kind: LayerKind) -> Work:
        """What of ``recomputed_layer`` grows with the square of the sequence, for a layer with attention."""
        core, recompute = self._core_attention(kind), self.model.recompute
        again = recompute.granularity == "full" or "core_attn" in recompute.modules
        return Work(core.forward, core.backward + core.forward) if again else core

    def mtp(self) -> Work:
        """All prediction depths (MTP): embedding look-up, two norms, their projection, layers and a norm.

        Full recomputation has it all but the look-up computed again, whatever its method.
        """
        model = self.model
        hidden = model.hidden_size
        joined = self._norm() * 2 + self._linear(2 * hidden, hidden / self.topology.tensor_size)
        around = joined + self._norm()
        if model.recompute.granularity == "full":
            around = Work(around.forward, around.backward + around.forward)
        layers = sum((self.recomputed_layer(kind) for kind in model.depth_layers), Work())
        return (self.embedding() + around + layers) * model.mtp_num_layers

    def head(self) -> Work:
        """Final norm, output layer and loss, the latter two once more for each prediction depth (MTP)."""
        output = self._output_layer() + self._cross_entropy()
        return self._norm() + output * (1 + self.model.mtp_num_layers)

    # Mixers.

    def _mixer(self, kind: LayerKind) -> Work:
        if kind.mixer == "mamba":
            return self._mamba()
        if kind.mixer == "linear":
            return self._replacement()
        outputs = self._widths(kind).outputs / self.topology.tensor_size
        projections = self._latent_projections() if self.model.latent_attention else self._projections(kind)
        return projections + self._core_attention(kind) + self._linear(outputs, self.model.hidden_size)

    def _replacement(self) -> Work:
        """One matrix in the place of attention or MLP."""
        hidden = self.model.hidden_size
        return self._linear(hidden, hidden / self.topology.tensor_size)

    def _widths(self, kind: LayerKind) -> _Widths:
        model = self.model
        if latent := model.latent_attention:
            heads = model.num_attention_heads
            query, value = heads * latent.head_dim, heads * latent.v_head_dim
            return _Widths(queries=query, keys=query, values=value, outputs=value)
        groups = kind.num_query_groups or model.num_query_groups
        return _Widths(model.query_size, groups * model.kv_channels, groups * model.kv_channels, model.query_size)

    def _projections(self, kind: LayerKind) -> Work:
        """Queries, keys and values in one product, their norms, their rotary embedding, and the gate of the output."""
        model, widths, tensor = self.model, self._widths(kind), self.topology.tensor_size
        gate = widths.queries if model.attention_output_gate else 0
        work = self._linear(model.hidden_size, (widths.queries + widths.keys + widths.values + gate) / tensor)
        if model.qk_layernorm:
            work += self._norm_over(widths.queries / tensor) + self._norm_over(widths.keys / tensor)
        if gate:
            work += self._elementwise(self.tokens * gate / tensor, 3, 5)
        return work + self._rotary(self.tokens * (widths.queries + widths.keys) / tensor)

    def _latent_projections(self) -> Work:
        """Down to latent queries, keys and values, their norms, and up again."""
        model, latent = self.model, self.model.latent_attention
        work = self._whole_linear(model.hidden_size, latent.kv_lora_rank + latent.qk_pos_emb_head_dim)
        if latent.q_lora_rank:
            work += self._whole_linear(model.hidden_size, latent.q_lora_rank)
        if model.qk_layernorm:
            work += self._norm_over(latent.kv_lora_rank) + self._norm_over(latent.q_lora_rank or 0)
        return work + self._latent_up()

    def _latent_up(self) -> Work:
        """From latent queries, keys and values to those of each head, rotated."""
        model, latent = self.model, self.model.latent_attention
        heads = model.num_attention_heads / self.topology.tensor_size
        return (
            self._linear(latent.q_lora_rank or model.hidden_size, heads * latent.head_dim)
            + self._linear(latent.kv_lora_rank, heads * (latent.qk_head_dim + latent.v_head_dim))
            + self._rotary(self.tokens * heads * 2 * latent.head_dim)
        )

    def _norm_over(self, width: float) -> Work:
        """A norm of queries or keys."""
        return self._elementwise(self.tokens * width, 2, 3)

    def _rotary(self, values: float) -> Work:
        """Rotary position embedding of queries and keys: one kernel, or five simple ones in the local layers."""
        if self.model.position_embedding_type in ("learned_absolute", "none"):
            return Work()
        return self._elementwise(values, 2, 2) * (1 if self.model.fused_kernels else 5)

    def _core_attention(self, kind: LayerKind) -> Work:
        """Scores, softmax and their product with the values, without the projections around them."""
        widths = self._widths(kind)
        return self._flash_attention(widths, kind.window) if self.model.fused_kernels else self._local_attention(widths)

    def _flash_attention(self, widths: _Widths, window: int | None) -> Work:
        """One kernel each way that visits the unmasked half only and keeps no scores: 2 products, and 5 backward."""
        model, tensor = self.model, self.topology.tensor_size
        seen = min(model.seq_length, window + 1) if window is not None else model.seq_length
        keys = seen * (1 - seen / (2 * model.seq_length))
        flops = 2 * self.tokens * keys * (widths.queries + widths.outputs) / tensor
        moved = self.tokens * widths.total / tensor * model.dtype_bytes
        return Work((Kernel(moved, flops, model.dtype),), (Kernel(2 * moved, 2.5 * flops, model.dtype),))

    def _local_attention(self, widths: _Widths) -> Work:
        """Batched products over the full square of scores, which the mask and the softmax read and write."""
        model, tensor = self.model, self.topology.tensor_size
        scores = self.tokens * model.seq_length * model.num_attention_heads / tensor
        products = tuple(
            Kernel(
                model.dtype_bytes * (scores + 2 * self.tokens * width / tensor),
                2 * self.tokens * model.seq_length * width / tensor,
                model.dtype,
            )
            for width in (widths.queries, widths.outputs)
        )
        return Work(products, products * 2) + self._elementwise(scores, 2, 2) + self._elementwise(scores, 2, 3)

    def _mamba(self) -> Work:
        """Mamba-2 (arXiv 2405.21060): projection, convolution, scan, gated norm, projection."""
        model, mamba, tensor = self.model, self.model.mamba, self.topology.tensor_size
        inner = mamba.inner_size / tensor
        return (
            self._linear(model.hidden_size, mamba.projected_size / tensor)
            + self._elementwise(self.tokens * mamba.convolved_size / tensor, 2, 4)
            + self._scan(inner)
            + self._elementwise(self.tokens * inner, 3, 5)
            + self._linear(inner, model.hidden_size)
        )

    def _scan(self, inner: float) -> Work:
        """The scan in chunks: products within each, and a state a channel between them, in fp32.

        Its FLOPs are those of Megatron's own estimate, 7 for each channel and width of its state. The backward pass computes
        the states again before it makes two gradients of each product. States are written, passed on and read.
        """
        model, mamba = self.model, self.model.mamba
        flops = 7 * self.tokens * inner * mamba.state_dim
        moved = self.tokens * (mamba.convolved_size / self.topology.tensor_size + inner) * model.dtype_bytes
        states = 4 * self.tokens / _SCAN_CHUNK * inner * mamba.state_dim * _FP32
        return Work(
            (Kernel(moved, flops, model.dtype), Kernel(states)),
            (Kernel(3 * moved, 3 * flops, model.dtype), Kernel(3 * states)),
        )

    # Feed-forward parts.

    def _feed_forward(self, kind: LayerKind) -> Work:
        if kind.feed_forward == "linear":
            return self._replacement()
        if not kind.moe:
            return self._mlp(self.tokens, kind.ffn_hidden_size or self.model.ffn_hidden_size)
        return self._routing() + self._routed_experts() + self._shared_experts()

    def _routing(self) -> Work:
        """The router, and tokens sorted by expert, sent there and back; in a latent space if the experts have one."""
        experts, hidden, split = self.model.experts, self.model.hidden_size, self._sequence_split
        work = self._linear(hidden, experts.count, self.tokens / split)
        if experts.latent_size:
            work += self._whole_linear(hidden, experts.latent_size) + self._whole_linear(experts.latent_size, hidden)
        copies = self._expert_tokens * (experts.latent_size or hidden) / self.topology.tensor_size
        return work + self._elementwise(copies, 2, 2) * 2

    def _routed_experts(self) -> Work:
        experts = self.model.experts
        # Weights of experts on one rank, in experts divided by the tensor-parallel size, the unit of `_mlp`.
        weights = experts.count * self.topology.tensor_size / experts.shards
        return self._mlp(self._expert_tokens, experts.ffn_hidden_size, weights, experts.latent_size)

    def _shared_experts(self) -> Work:
        experts = self.model.experts
        if not experts.shared_ffn_hidden_size:
            return Work()
        gate = Work()
        if experts.shared_gate:
            gate = self._linear(self.model.hidden_size, 1, self.tokens / self._sequence_split) + self._residual()
        return self._mlp(self.tokens, experts.shared_ffn_hidden_size) + gate

    @property
    def _expert_tokens(self) -> float:
        """Tokens times the experts that each visits: what a rank gets where all experts are visited alike."""
        return self.tokens * self.model.experts.topk

    def _mlp(
        self, tokens: float, ffn_hidden_size: int, weight_copies: float = 1, input_size: int | None = None
    ) -> Work:
        model, ffn = self.model, ffn_hidden_size / self.topology.tensor_size
        outside = input_size or model.hidden_size
        return (
            self._linear(outside, (2 if model.gated else 1) * ffn, tokens, weight_copies)
            + self._activation(tokens * ffn)
            + self._linear(ffn, outside, tokens, weight_copies)
        )

    def _activation(self, values: float) -> Work:
        reads = 2 if self.model.gated else 1
        return self._elementwise(values, reads + 1, 2 * reads + 1)

    # Around them.

    def _norm(self) -> Work:
        """Reads and writes the residual stream; backward reads it and its gradient and writes another."""
        return self._elementwise(self._residual_values, 2, 3)

    def _residual(self) -> Work:
        """Bias and residual addition; backward adds the gradients of both branches."""
        return self._elementwise(self._residual_values, 3, 3)

    @property
    def _residual_values(self) -> float:
        return self.tokens * self.model.hidden_size / self._sequence_split

    @property
    def _sequence_split(self) -> int:
        """Ranks over which sequence parallelism splits what tensor parallelism leaves whole."""
        return self.topology.tensor_size if self.model.sequence_parallel else 1

    # Recomputation.

    def _selected(self, kind: LayerKind) -> Work:
        """What selective recomputation computes again of a layer."""
        parts: dict[str, Callable[[], Work]] = {}
        if kind.mixer == "attention":
            parts["core_attn"] = lambda: self._core_attention(kind)
            if self.model.latent_attention:
                parts["mla_up_proj"] = self._latent_up
        if kind.moe:
            parts["moe"] = lambda: self._feed_forward(kind)
            parts["shared_experts"] = self._shared_experts
            parts["moe_act"] = self._expert_activation
        elif kind.feed_forward == "mlp":
            parts["mlp"] = lambda: self._feed_forward(kind)
        if kind.mixer != "mamba":
            parts["layernorm"] = lambda: (
                self._norm() * sum(part is not None for part in (kind.mixer, kind.feed_forward))
            )
        return sum((part() for name, part in parts.items() if name in self.model.recompute.modules), Work())

    def _expert_activation(self) -> Work:
        return self._activation(self._expert_tokens * self.model.experts.ffn_hidden_size / self.topology.tensor_size)

    # Parts of embedding and head.

    def _table(self, rows: float) -> Work:
        """An embedding table: rows looked up; zeros, the gradient scattered into them, and main gradients added.

        torch makes the gradient of the whole table, whichever rows were looked up.
        """
        model, values = self.model, rows * self.model.hidden_size
        looked_up = 2 * self.tokens * model.hidden_size * model.dtype_bytes
        zeros = Kernel(values * model.dtype_bytes)
        return Work((Kernel(looked_up),), (zeros, Kernel(1.5 * looked_up), self._accumulation(values)))

    def _output_layer(self) -> Work:
        """Always in the model's dtype, as Megatron keeps fp8 out of it."""
        model = self.model
        return self._linear(model.hidden_size, model.padded_vocab_size / self.topology.tensor_size, dtype=model.dtype)

    def _cross_entropy(self) -> Work:
        """Passes of Megatron's vocabulary-parallel cross-entropy over the logits, which it keeps in fp32.

        Its kernels one by one, each with the bytes it moves for a logit:

        - not fused: a copy in fp32 (if the logits are not), maximum, subtraction, exponential, sum, division; backward
          the product with the loss's gradient and the copy back.
        - ``native``, compiled by torch: copy and maximum; subtraction, exponential and sum; division; backward one.
        - ``te``: one kernel reads twice, then replaces the logits by their gradient; backward scales it.
        """
        model, width = self.model, self.model.dtype_bytes
        converted = width + _FP32
        if model.cross_entropy_fusion == "te":
            forward, backward = (4 * width,), (2 * width,)
        elif model.cross_entropy_fusion == "native":
            forward = (converted if width < _FP32 else _FP32, 2 * _FP32, 2 * _FP32)
            backward = (converted,)
        else:
            copies = (converted,) if width < _FP32 else ()
            forward = (*copies, _FP32, 2 * _FP32, 2 * _FP32, _FP32, 2 * _FP32)
            backward = (2 * _FP32, *copies)
        logits = self.tokens * model.padded_vocab_size / self.topology.tensor_size
        return Work(*(tuple(Kernel(logits * moved) for moved in passes) for passes in (forward, backward)))

    # Kernels.

    def _linear(
        self,
        inputs: float,
        outputs: float,
        tokens: float | None = None,
        weight_copies: float = 1,
        dtype: str | None = None,
    ) -> Work:
        """A linear layer: one product forward, two backward (input, weights), and its gradients added up.

        ``weight_copies``: matrices of this shape that share the tokens (experts).
        """
        model = self.model
        tokens, width = tokens or self.tokens, model.dtype_bytes
        weights = weight_copies * inputs * outputs
        activations = tokens * (inputs + outputs) * width
        flops = 2 * tokens * inputs * outputs
        product = Kernel(activations + weights * width, flops, dtype or model.matmul_dtype)
        if not model.gradient_accumulation_fusion:
            return Work((product,), (product, product, self._accumulation(weights)))
        into_main = Kernel(activations + 2 * weights * model.main_gradient_bytes, flops, product.dtype)
        return Work((product,), (product, into_main))

    def _whole_linear(self, inputs: int, outputs: int) -> Work:
        """A linear layer whose outputs every tensor-parallel rank needs whole.

        Transformer Engine's computes them whole, of its part of the sequence if that is split; the local one a part of the
        outputs of all tokens.
        """
        if self.model.fused_kernels:
            return self._linear(inputs, outputs, self.tokens / self._sequence_split)
        return self._linear(inputs, outputs / self.topology.tensor_size)

    def _accumulation(self, values: float) -> Kernel:
        """A gradient is read and added to the main gradient."""
        return Kernel(values * (self.model.dtype_bytes + 2 * self.model.main_gradient_bytes))

    def _elementwise(self, values: float, forward_passes: int, backward_passes: int) -> Work:
        """One kernel each way that reads or writes ``values`` so many times; none for 0 passes."""
        width = self.model.dtype_bytes
        return Work(
            *((Kernel(values * passes * width),) * (passes > 0) for passes in (forward_passes, backward_passes))
        )
