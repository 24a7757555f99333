"""Costs of the chain from its shapes: every operation as a matrix product or as bytes moved, on a roofline.

What is counted is what Megatron runs for one micro-batch on one rank. Not counted: communication (tensor, context and
expert parallel), dropout, and what happens once a step (gradient synchronisation, optimizer), a tied head's included.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_balance import __version__
from megatron_balance.costs.chain import ChainCosts, ElementCost
from megatron_balance.costs.devices import Device, Kernel
from megatron_balance.costs.parameters import chain_parameters, layer_parameters
from megatron_balance.costs.table import CostTable, ElementRow, LayerRow, LengthRow, lengths_to_cost, shapes_of
from megatron_balance.model import LayerKind, ModelSpec
from megatron_balance.topology import Topology

_FP32 = 4


def analytic_costs(model: ModelSpec, topology: Topology, device: Device) -> ChainCosts:
    """Costs of one micro-batch on one rank of ``topology``, in seconds on ``device``.

    Raises:
        BalanceError: the device has no matrix products in the model's precision.
    """
    return analytic_table(model, topology, device).chain(model, topology)


def analytic_table(model: ModelSpec, topology: Topology, device: Device) -> CostTable:
    """The same by kind of element, as a costs file holds it; what follows the pipeline once a step is not estimated.

    Raises:
        BalanceError: the device has no matrix products in the model's precision.
    """
    operations = _Operations(model, topology)
    parameters = chain_parameters(model, topology)
    return CostTable(
        kind="analytic",
        device=device.name,
        embedding=_element(operations.embedding().cost(device), parameters.embedding.total),
        layers={str(kind): _layer(model, topology, device, kind) for kind in dict.fromkeys(model.layers)},
        head=_element(operations.head().cost(device), (parameters.mtp + parameters.head).total),
        update_s_per_parameter=None,
        holds_for=shapes_of(model, topology),
        provenance={},
        created_by=f"megatron_balance {__version__}",
    )


def _element(cost: ElementCost, parameters: int) -> ElementRow:
    return ElementRow(cost.forward_s, cost.backward_s, None, None, parameters)


def _layer(model: ModelSpec, topology: Topology, device: Device, kind: LayerKind) -> LayerRow:
    lengths = lengths_to_cost(model.seq_length, topology)
    costs = [
        _Operations(replace(model, seq_length=length), topology).recomputed_layer(kind).cost(device)
        for length in lengths
    ]
    return LayerRow.of(
        _element(costs[-1], layer_parameters(model, topology, kind).total),
        [LengthRow(length, cost.forward_s, cost.backward_s) for length, cost in zip(lengths, costs, strict=True)],
        topology.micro_batch_size,
    )


def layer_flops(model: ModelSpec, topology: Topology, layer: int) -> float:
    """Forward matrix FLOPs of layer number ``layer`` for one micro-batch on one rank."""
    return _Operations(model, topology).layer(model.layers[layer]).forward_flops


def head_flops(model: ModelSpec, topology: Topology) -> float:
    """Forward matrix FLOPs of output layer and multi-token prediction for one micro-batch on one rank."""
    return _Operations(model, topology).head().forward_flops


@dataclass(frozen=True)
class _Work:
    """The kernels of a part of the model."""

    forward: tuple[Kernel, ...] = ()
    backward: tuple[Kernel, ...] = ()

    def __add__(self, other: _Work) -> _Work:
        return _Work(self.forward + other.forward, self.backward + other.backward)

    def __mul__(self, times: int) -> _Work:
        return _Work(self.forward * times, self.backward * times)

    @property
    def forward_flops(self) -> float:
        return sum(kernel.flops for kernel in self.forward)

    def cost(self, device: Device) -> ElementCost:
        return ElementCost(device.seconds(self.forward), device.seconds(self.backward))


@dataclass(frozen=True)
class _Operations:
    """The parts of ``model`` as one rank of ``topology`` runs them."""

    model: ModelSpec
    topology: Topology

    @property
    def tokens(self) -> float:
        """Tokens of a micro-batch on one context-parallel rank."""
        return self.topology.micro_batch_size * self.model.seq_length / self.topology.context_size

    def embedding(self) -> _Work:
        """Look-up, position embedding, transpose; in the backward pass a dense gradient of the whole table."""
        model, output = self.model, self.tokens * self.model.hidden_size
        work = self._table(model.padded_vocab_size / self.topology.tensor_size) + self._elementwise(output, 2, 2)
        if self.topology.tensor_size > 1:  # rows of other ranks are set to zero
            work += self._elementwise(output, 2, 2)
        if model.position_embedding_type == "learned_absolute":
            work += self._table(model.max_position_embeddings) + self._elementwise(output, 3, 0)
        return work

    def recomputed_layer(self, kind: LayerKind) -> _Work:
        """A layer, with what it computes again in the backward pass if it is one of those that do."""
        layer = self.layer(kind)
        return _Work(layer.forward, layer.backward + self._recomputed(kind, layer))

    def layer(self, kind: LayerKind) -> _Work:
        model, tensor = self.model, self.topology.tensor_size
        qkv = (model.query_size + 2 * model.kv_size) / tensor
        attention = (
            self._norm()
            + self._linear(model.hidden_size, qkv)
            + self._rotary()
            + self._core_attention(kind.window)
            + self._linear(model.query_size / tensor, model.hidden_size)
            + self._residual()
        )
        return attention + self._norm() + self._feed_forward(kind) + self._residual()

    def head(self) -> _Work:
        """Final norm, output layer, loss; again for each prediction depth (MTP), after an embedding and a layer."""
        model = self.model
        output = self._norm() + self._output_layer() + self._cross_entropy()
        if not model.mtp_num_layers:
            return output
        hidden = model.hidden_size
        joined = self._norm() * 2 + self._linear(2 * hidden, hidden / self.topology.tensor_size)
        depth = self.embedding() + joined + self.recomputed_layer(model.layers[-1]) + output
        return output + depth * model.mtp_num_layers

    # Parts of a layer.

    def _core_attention(self, window: int | None) -> _Work:
        """Scores, softmax and their product with the values, without the projections around them."""
        return self._flash_attention(window) if self.model.fused_kernels else self._local_attention()

    def _flash_attention(self, window: int | None) -> _Work:
        """One kernel each way that visits the unmasked half only and keeps no scores: 2 products, and 5 backward."""
        model, tensor = self.model, self.topology.tensor_size
        seen = min(model.seq_length, window + 1) if window is not None else model.seq_length
        keys = seen * (1 - seen / (2 * model.seq_length))
        flops = 2 * 2 * self.tokens * keys * model.query_size / tensor
        values = self.tokens * 2 * (model.query_size + model.kv_size) / tensor
        moved = values * model.dtype_bytes
        return _Work((Kernel(moved, flops, model.dtype),), (Kernel(2 * moved, 2.5 * flops, model.dtype),))

    def _local_attention(self) -> _Work:
        """Batched products over the full square of scores, which the mask and the softmax read and write."""
        model, tensor = self.model, self.topology.tensor_size
        scores = self.tokens * model.seq_length * model.num_attention_heads / tensor
        product = Kernel(
            model.dtype_bytes * (scores + 2 * self.tokens * model.query_size / tensor),
            2 * self.tokens * model.seq_length * model.query_size / tensor,
            model.dtype,
        )
        products = _Work((product, product), (product,) * 4)
        return products + self._elementwise(scores, 2, 2) + self._elementwise(scores, 2, 3)

    def _rotary(self) -> _Work:
        """Rotary position embedding of queries and keys: one kernel, or five simple ones in the local layers."""
        model = self.model
        if model.position_embedding_type in ("learned_absolute", "none"):
            return _Work()
        values = self.tokens * (model.query_size + model.kv_size) / self.topology.tensor_size
        return self._elementwise(values, 2, 2) * (1 if model.fused_kernels else 5)

    def _feed_forward(self, kind: LayerKind) -> _Work:
        if not kind.moe:
            return self._mlp(self.tokens, self.model.ffn_hidden_size)
        experts, hidden = self.model.experts, self.model.hidden_size
        copies = self.tokens * experts.topk
        routed = self._mlp(copies, experts.ffn_hidden_size, weight_copies=self._expert_weights())
        permuted = self._elementwise(copies * hidden / self.topology.tensor_size, 2, 2) * 2
        shared = self._mlp(self.tokens, experts.shared_ffn_hidden_size) if experts.shared_ffn_hidden_size else _Work()
        return self._linear(hidden, experts.count) + permuted + routed + shared

    def _expert_weights(self) -> float:
        """Weights of experts on one rank, in experts divided by the tensor-parallel size (the unit of `_mlp`)."""
        return self.model.experts.count * self.topology.tensor_size / self.model.experts.shards

    def _mlp(self, tokens: float, ffn_hidden_size: int, weight_copies: float = 1) -> _Work:
        model, ffn = self.model, ffn_hidden_size / self.topology.tensor_size
        reads = 2 if model.gated else 1
        return (
            self._linear(model.hidden_size, reads * ffn, tokens, weight_copies)
            + self._elementwise(tokens * ffn, reads + 1, 2 * reads + 1)
            + self._linear(ffn, model.hidden_size, tokens, weight_copies)
        )

    def _norm(self) -> _Work:
        """Reads and writes the residual stream; backward reads it and its gradient and writes another."""
        return self._elementwise(self._residual_values, 2, 3)

    def _residual(self) -> _Work:
        """Bias and residual addition; backward adds the gradients of both branches."""
        return self._elementwise(self._residual_values, 3, 3)

    @property
    def _residual_values(self) -> float:
        split = self.topology.tensor_size if self.model.sequence_parallel else 1
        return self.tokens * self.model.hidden_size / split

    def _recomputed(self, kind: LayerKind, layer: _Work) -> tuple[Kernel, ...]:
        recompute = self.model.recompute
        if recompute.granularity == "full":
            return layer.forward
        again = _Work()
        if "core_attn" in recompute.modules:
            again += self._core_attention(kind.window)
        if ("moe" if kind.moe else "mlp") in recompute.modules:
            again += self._feed_forward(kind)
        return again.forward

    # Parts of embedding and head.

    def _table(self, rows: float) -> _Work:
        """An embedding table: rows looked up; zeros, the gradient scattered into them, and main gradients added.

        torch makes the gradient of the whole table, whichever rows were looked up.
        """
        model, values = self.model, rows * self.model.hidden_size
        looked_up = 2 * self.tokens * model.hidden_size * model.dtype_bytes
        zeros = Kernel(values * model.dtype_bytes)
        return _Work((Kernel(looked_up),), (zeros, Kernel(1.5 * looked_up), self._accumulation(values)))

    def _output_layer(self) -> _Work:
        """Always in the model's dtype, as Megatron keeps fp8 out of it."""
        model = self.model
        return self._linear(model.hidden_size, model.padded_vocab_size / self.topology.tensor_size, dtype=model.dtype)

    def _cross_entropy(self) -> _Work:
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
        return _Work(*(tuple(Kernel(logits * moved) for moved in passes) for passes in (forward, backward)))

    # Kernels.

    def _linear(
        self,
        inputs: float,
        outputs: float,
        tokens: float | None = None,
        weight_copies: float = 1,
        dtype: str | None = None,
    ) -> _Work:
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
            return _Work((product,), (product, product, self._accumulation(weights)))
        into_main = Kernel(activations + 2 * weights * model.main_gradient_bytes, flops, product.dtype)
        return _Work((product,), (product, into_main))

    def _accumulation(self, values: float) -> Kernel:
        """A gradient is read and added to the main gradient."""
        return Kernel(values * (self.model.dtype_bytes + 2 * self.model.main_gradient_bytes))

    def _elementwise(self, values: float, forward_passes: int, backward_passes: int) -> _Work:
        """One kernel each way that reads or writes ``values`` so many times; none for 0 passes."""
        width = self.model.dtype_bytes
        return _Work(
            *((Kernel(values * passes * width),) * (passes > 0) for passes in (forward_passes, backward_passes))
        )
