"""What the elements of a model occupy in a rank's memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron_balance.costs.activations import LOW_PRECISION_BYTES, Activations
from megatron_balance.costs.parameters import Parameters, chain_parameters
from megatron_balance.errors import BalanceError
from megatron_balance.model import LayerKind, ModelSpec
from megatron_balance.topology import Topology

_FP32 = 4.0
_WIDTHS = {"fp32": 4.0, "float32": 4.0, "bf16": 2.0, "bfloat16": 2.0, "fp16": 2.0, "float16": 2.0,
           "fp8": 1.0, "uint8": 1.0}  # fmt: skip
_MOMENTS = {"adam": ("exp_avg_dtype", "exp_avg_sq_dtype"), "sgd": ("exp_avg_dtype",), "lion": ("exp_avg_dtype",)}


@dataclass(frozen=True)
class ElementMemory:
    """Bytes that one element takes on one rank.

    Attributes:
        state_bytes: parameters, gradients and optimizer state; always there.
        activation_bytes: what its forward pass keeps for its backward pass, for each micro-batch in flight.
        working_bytes: what comes on top while it runs, once however many micro-batches are in flight: the logits'
            gradient, a layer computed again.
    """

    state_bytes: float = 0.0
    activation_bytes: float = 0.0
    working_bytes: float = 0.0

    @classmethod
    def together(cls, elements: Iterable[ElementMemory]) -> ElementMemory:
        """Elements of one stage, of which one runs at a time."""
        elements = list(elements)
        return cls(
            sum(element.state_bytes for element in elements),
            sum(element.activation_bytes for element in elements),
            max((element.working_bytes for element in elements), default=0.0),
        )


@dataclass(frozen=True)
class ChainMemory:
    """The same along the chain; elements as in ``ChainCosts``."""

    embedding: ElementMemory
    layers: tuple[ElementMemory, ...]
    mtp: ElementMemory
    head: ElementMemory


@dataclass(frozen=True)
class Optimizer:
    """What a parameter's optimizer state takes.

    Attributes:
        bytes_per_parameter: of main parameter (a copy in fp32 beside one of 16 bits) and moments, on the device.
        distributed: the state is sharded over the ranks that hold copies of the parameter: data times context parallel
            ranks, for routed experts those of expert data parallelism.
        instances: groups of such ranks that each hold all of a sharded state.
        low_precision: parameters of layers are there in the precision of the products alone (``--fp8-param-gather``).
    """

    bytes_per_parameter: float
    distributed: bool = False
    instances: int = 1
    low_precision: bool = False

    @classmethod
    def from_arguments(cls, arguments: Mapping[str, Any]) -> Optimizer:
        """The optimizer that Megatron builds from ``arguments``, its argument names with their values.

        An optimizer that is not known is counted as Adam. Copies of the gradients in fp32, which some optimizers make while
        they step, are not counted: no activations are there then.

        Raises:
            BalanceError: a dtype that is none.
        """
        aware = bool(arguments.get("use_precision_aware_optimizer"))
        main = _width(arguments, "main_params_dtype") if aware else _FP32
        half = bool(arguments.get("bf16") or arguments.get("fp16"))
        low_precision = any(arguments.get(name) and arguments.get(f"{name}_param_gather") for name in ("fp8", "fp4"))
        if aware and arguments.get("bf16") and main == _FP32 and not low_precision:
            main = 2.0  # Transformer Engine's Adam keeps the 16 bits that the parameter lacks
        names = _MOMENTS.get(str(arguments.get("optimizer") or "adam"), _MOMENTS["adam"])
        if names == _MOMENTS["sgd"] and arguments.get("sgd_momentum") == 0:
            names = ()
        moments = sum(_width(arguments, name) if aware else _FP32 for name in names)
        offloaded = arguments.get("optimizer_offload_fraction", 1.0) if arguments.get("optimizer_cpu_offload") else 0.0
        return cls(
            bytes_per_parameter=(main * half + moments) * (1 - offloaded),
            distributed=bool(arguments.get("use_distributed_optimizer")),
            instances=arguments.get("num_distributed_optimizer_instances") or 1,
            low_precision=low_precision,
        )

    def state_bytes(self, parameters: Parameters, model: ModelSpec, topology: Topology) -> float:
        """Bytes of one rank's optimizer state."""
        if not self.distributed:
            return self.bytes_per_parameter * parameters.total
        replicas = topology.data_size * topology.context_size
        expert_replicas = replicas * topology.tensor_size / (model.experts.shards if model.experts else 1)
        shards, expert_shards = (max(1.0, each / self.instances) for each in (replicas, expert_replicas))
        return self.bytes_per_parameter * (parameters.dense / shards + parameters.expert / expert_shards)


def chain_memory(model: ModelSpec, topology: Topology, optimizer: Optimizer) -> ChainMemory:
    """Memory of ``model``'s elements on one rank of ``topology``.

    Parameters are exact; activations are those of ``costs.activations``. Working bytes are an estimate: gradients of the
    widest part of a layer, what is computed again, logits and their gradient, gradients of whole tables. With the
    recomputation method ``block`` each layer carries its share, as it does in the costs.
    """
    return _Chain(model, topology, optimizer).memory()


@dataclass(frozen=True)
class _Chain:
    """The elements of ``model`` on one rank of ``topology``."""

    model: ModelSpec
    topology: Topology
    optimizer: Optimizer

    def memory(self) -> ChainMemory:
        model, parameters = self.model, chain_parameters(self.model, self.topology)
        kinds = {kind: self._layer(kind) for kind in dict.fromkeys(model.layers)}
        layers = (
            replace(kinds[kind], state_bytes=self._states(own, cached=True))
            for kind, own in zip(model.layers, parameters.layers, strict=True)
        )
        return ChainMemory(
            embedding=ElementMemory(self._states(parameters.embedding), self._kept.embedding(), self._table_bytes),
            layers=tuple(layers),
            mtp=self._mtp(parameters.mtp) if model.mtp_num_layers else ElementMemory(),
            head=ElementMemory(self._states(parameters.head), self._kept.head(), self._loss_bytes),
        )

    @property
    def _kept(self) -> Activations:
        return Activations(self.model, self.topology)

    def _states(self, parameters: Parameters, cached: bool = False) -> float:
        """Parameters, main gradients and optimizer state; of ``cached`` ones the copies for low-precision products too.

        Transformer Engine makes one copy for the forward pass and a transposed one for the backward pass.
        """
        model = self.model
        copies = 2 * LOW_PRECISION_BYTES.get(model.matmul_dtype, 0.0) * cached
        own = 0.0 if copies and self.optimizer.low_precision else model.dtype_bytes
        width = own + copies + model.main_gradient_bytes
        return width * parameters.total + self.optimizer.state_bytes(parameters, model, self.topology)

    def _layer(self, kind: LayerKind) -> ElementMemory:
        """Activations and working bytes of a layer."""
        recompute, saved, kept = self.model.recompute, self._kept.layer(kind), self._kept
        if recompute.granularity != "full":
            return ElementMemory(0.0, saved.kept, saved.again + saved.widest)
        share = recompute.full_share(self.model.num_layers, self.topology.num_stages)
        together = 1 if recompute.method == "block" else min(recompute.num_layers or 1, self.model.num_layers)
        activation = share * kept.residual / together + (1 - share) * saved.all
        return ElementMemory(0.0, activation, together * saved.all + saved.widest)

    def _mtp(self, parameters: Parameters) -> ElementMemory:
        """All depths; with full, uniform recomputation each is computed again as a whole, from its two inputs.

        Megatron recomputes none of them by the method ``block``.
        """
        depth, depths = self._kept.mtp_depth(), self.model.mtp_num_layers
        states, recompute = self._states(parameters, cached=True), self.model.recompute
        if recompute.granularity == "full" and recompute.method != "block":
            activation = depths * (2 * self._kept.residual + self._kept.embedding())
            return ElementMemory(states, activation, max(depth.all + depth.widest, self._table_bytes))
        working = max(depth.again + depth.widest, self._table_bytes)
        return ElementMemory(states, depths * depth.kept, working)

    @property
    def _table_bytes(self) -> float:
        """The gradient of a whole word embedding, which torch makes whichever rows were looked up."""
        model = self.model
        return model.hidden_size * model.padded_vocab_size / self.topology.tensor_size * model.dtype_bytes

    @property
    def _loss_bytes(self) -> float:
        """Logits of 16 bits beside their fp32 softmax, the gathered input, and the weights' gradient where it is apart."""
        model, kept = self.model, self._kept
        converted = model.dtype_bytes < _FP32 and model.cross_entropy_fusion != "te"
        logits = kept.logits * model.dtype_bytes * converted
        gathered = kept.tokens * model.hidden_size * model.dtype_bytes
        return logits + gathered + self._table_bytes * (not model.gradient_accumulation_fusion)


def _width(arguments: Mapping[str, Any], name: str) -> float:
    """Bytes of a dtype, by its name or torch's; fp32 by default."""
    value = str(arguments.get(name) or "fp32").removeprefix("torch.")
    if value not in _WIDTHS:
        raise BalanceError(f"{name} is {value}, none of {', '.join(_WIDTHS)}: choose one of them")
    return _WIDTHS[value]
