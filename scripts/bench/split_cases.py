"""The splits to reach: published layouts and the best figures known, on analytic costs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import split_models as models
import split_peers as peers
from split_trace import RECORDED

from megatron_balance.costs.chain import ChainCosts
from megatron_balance.costs.memory import ChainMemory
from megatron_balance.diagnosis.costs import RecordedSplit
from megatron_balance.diagnosis.fix import layers_in_flight
from megatron_balance.pipeline import stock
from megatron_balance.pipeline.chain import stage_costs
from megatron_balance.pipeline.layout import Layout, parse_layout
from megatron_balance.schedule.simulate import Simulator
from megatron_balance.topology import Topology

TOLERANCE = 0.002  # of a published figure
NEAR_EQUAL = 0.001  # splits so close are equal; the one that stands a wrong head best is taken


def step_s(costs: ChainCosts, simulator: Simulator, layers: tuple[int, ...], mtp_stage: int | None = None) -> float:
    """Simulated seconds of a step."""
    stages = stage_costs(costs, layers, mtp_stage)
    return simulator.step_s([stage.forward_s for stage in stages], [stage.backward_s for stage in stages])


def even_s(costs: ChainCosts, topology: Topology) -> float:
    """Seconds of a step whose work is cut into equal stages, by the textbook formula."""
    passes = topology.num_microbatches + (topology.pipeline_size - 1) / topology.virtual_size
    return passes * costs.total.total_s / topology.pipeline_size


@dataclass(frozen=True)
class Case:
    """One row of the table.

    Attributes:
        name: of the row.
        costs, topology: of the job.
        reference_name, reference: the layout to compare with; None where Megatron has none.
        target: step over an even split's that has to be reached; with ``gain`` what is gained over the reference; None where
            nothing is known.
        published_reference: the reference's published figure.
        memory: elements' bytes, where the reference's worst rank is the limit.
        gain: the figure is the reference's step over ours, minus 1: more is better.
        rest_s: seconds of the step beside the pipeline, the same for every split; part of a gain alone.
        never_worse: ours may not be slower than the reference.
        proven: the bound has to be reached, too.
        mtp_last: multi-token prediction stays beside the head, as Megatron before 0.16 wants it.
    """

    name: str
    costs: ChainCosts
    topology: Topology
    target: float | None
    reference_name: str = ""
    reference: Layout | None = None
    published_reference: float | None = None
    memory: ChainMemory | None = None
    gain: bool = False
    rest_s: float = 0.0
    never_worse: bool = False
    proven: bool = False
    mtp_last: bool = False

    @property
    def even_s(self) -> float:
        """Seconds of an even split's step."""
        return even_s(self.costs, self.topology)

    @property
    def reference_mtp_stage(self) -> int | None:
        """The reference's stage of multi-token prediction; None where it has none."""
        return self.reference.mtp.index(max(self.reference.mtp)) if any(self.reference.mtp) else None

    def figure(self, seconds: float, reference_s: float | None) -> float:
        if self.gain:
            return (reference_s + self.rest_s) / (seconds + self.rest_s) - 1
        return seconds / self.even_s

    def reached(self, seconds: float, reference_s: float | None) -> bool:
        """Whether a split that takes ``seconds`` is as good as has to be."""
        if self.never_worse and seconds > reference_s * (1 + NEAR_EQUAL):
            return False
        if self.target is None:
            return True
        figure = self.figure(seconds, reference_s)
        return figure >= self.target - TOLERANCE if self.gain else figure <= self.target + TOLERANCE

    @property
    def mtp_stages(self) -> tuple[int, ...] | None:
        """Stages in which multi-token prediction may stand, as for ``megatron-balance plan``."""
        return (
            stock.mtp_stages(self.topology, by_pattern=False) if self.costs.mtp.total_s and not self.mtp_last else None
        )

    @property
    def allow_empty(self) -> bool:
        """Whether middle stages may hold no layer, as for ``megatron-balance plan``."""
        return self.topology.virtual_size > 1


def cases(trace: RecordedSplit | None = None) -> list[Case]:
    """Every row, in the order of the table; those of a whole step only with the trace that has it."""
    return [*_megatron_cases(), *_hand_made_cases(), *_trace_cases(), *([] if trace is None else step_cases(trace))]


def _megatron_cases() -> list[Case]:
    """Against Megatron's own flags: even stages, or embedding and loss counted as layers (E+L)."""
    llama_405b = models.LLAMA_31_405B.costs()
    heavy_405b = replace(llama_405b, head=llama_405b.from_layers(2.51, 2.51))
    rows = [
        ("Llama-3-8B", models.LLAMA_3_8B.costs(), (4, 32), 1.044, None),
        ("Llama-3-8B", models.LLAMA_3_8B.costs(), (8, 32), 1.103, None),
        ("Llama-3-8B", models.LLAMA_3_8B.costs(), (16, 64), 1.2456, None),
        ("Llama-3-8B", models.LLAMA_3_8B.costs(), (4, 32, 4), 1.046, None),
        ("Llama-3-70B", models.LLAMA_3_70B.costs(), (8, 128, 5), 1.077, 1.096),
        ("Llama-3-70B", models.LLAMA_3_70B.costs(), (4, 32, 5), 1.023, None),
        ("Llama-3.1-405B", llama_405b, (16, 256, 8), 1.0099, 1.0099),
        ("Llama-3.1-405B, head 2.51 layers", heavy_405b, (16, 256, 8), 1.145, 1.183),
        ("Qwen2.5-7B", models.QWEN_25_7B.costs(), (4, 32), 1.047, None),
        ("Qwen2.5-7B", models.QWEN_25_7B.costs(), (8, 64), 1.047, None),
        ("Gemma-2-9B", models.GEMMA_2_9B.costs(), (4, 32), 1.036, None),
        ("Gemma-2-9B", models.GEMMA_2_9B.costs(), (16, 64), 1.278, None),
        ("Gemma-2-27B", models.GEMMA_2_27B.costs(), (4, 32), 1.001, 1.071),
        ("Gemma-2-27B", models.GEMMA_2_27B.costs(), (8, 64), 1.001, 1.141),
        ("Gemma-2-27B", models.GEMMA_2_27B.costs(), (16, 128), 1.001, 1.282),
    ]
    return [_flag_case(name, costs, Topology(*sizes), target, figure) for name, costs, sizes, target, figure in rows]


def _flag_case(
    name: str, costs: ChainCosts, topology: Topology, target: float, published_reference: float | None
) -> Case:
    num_layers, stages = len(costs.layers), topology.num_stages
    layers = peers.even(num_layers, stages)
    flag = "" if layers is None else "uniform" if num_layers % stages == 0 else "E+L"
    reference = None if layers is None else Layout.of(layers)
    name = f"{name} {_sizes(topology)}"
    return Case(
        name, costs, topology, target, flag, reference, published_reference,
        never_worse=reference is not None, proven=topology.virtual_size == 1,
    )  # fmt: skip


def _sizes(topology: Topology) -> str:
    return f"{topology.pipeline_size}x{topology.virtual_size} M{topology.num_microbatches}"


def _hand_made_cases() -> list[Case]:
    """Against NVIDIA's layouts and sizes, of Megatron-Bridge."""
    v3, v3_memory = models.deepseek_v3_costs(), models.deepseek_v3_memory()
    v3_virtual = "NVIDIA Et|(tt|)*30mL", parse_layout("Et|(tt|)*30mL")
    v3_plain = "NVIDIA Et*4|(t*4|)*14tmL", parse_layout("Et*4|(t*4|)*14tmL")
    oss, oss_uniform = models.gpt_oss_120b_costs(), ("uniform", Layout.of((9,) * 4))
    job, oss_job = Topology(8, 256, 4), Topology(4, 80)
    return [
        Case("DeepSeek-V3 8x4 M256, equal memory", v3, job, 1.107, *v3_virtual, 1.215, v3_memory, never_worse=True),
        Case(
            "DeepSeek-V3 8x4 M256, equal memory, MTP last", v3, job, None, *v3_virtual, 1.215, v3_memory,
            never_worse=True, mtp_last=True,
        ),
        Case("DeepSeek-V3 8x4 M256", v3, job, 1.074, *v3_virtual, 1.215, never_worse=True),
        Case("DeepSeek-V3 16x1 M16", v3, Topology(16, 16), 0.9925, *v3_plain, 1.097, never_worse=True, proven=True),
        Case(
            "DeepSeek-V3 8x4 M256, half the head, equal memory", models.deepseek_v3_costs(head=0.5), job, 1.0708,
            *v3_virtual, 1.0708, v3_memory, never_worse=True,
        ),
        Case(
            "DeepSeek-V3 8x4 M256, half the head, equal memory, MTP last", models.deepseek_v3_costs(head=0.5), job, 1.0708,
            *v3_virtual, 1.0708, v3_memory, never_worse=True, mtp_last=True,
        ),
        Case(
            "GPT-OSS-120B 4x1 M80, equal memory, nothing recomputed", oss, oss_job, 1.0945, *oss_uniform, 1.307,
            models.gpt_oss_120b_memory(), never_worse=True, proven=True,
        ),
        Case(
            "GPT-OSS-120B 4x1 M80, equal memory, recomputing layernorm and moe_act", oss, oss_job, None, *oss_uniform, 1.307,
            models.gpt_oss_120b_memory(recompute=True), never_worse=True, proven=True,
        ),
        Case("GPT-OSS-120B 4x1 M80", oss, oss_job, 1.0165, *oss_uniform, 1.307, never_worse=True),
    ]  # fmt: skip


def _trace_cases() -> list[Case]:
    """A real job's measured costs; published are the gains of its pipeline."""
    costs, topology = models.st_trace_costs(), Topology(4, 4)
    job = costs, topology
    uniform = "uniform", Layout.of(RECORDED)
    memory = layers_in_flight(36)
    return [
        Case("ST trace 4x1 M4, 36 layers in flight", *job, 0.152, *uniform, memory=memory, gain=True),
        Case("ST trace 4x1 M4", *job, 0.215, *uniform, gain=True),
    ]


def step_cases(trace: RecordedSplit) -> list[Case]:
    """The same job's whole step, on the costs and the rest that its trace itself has."""
    job = trace.costs, trace.simulator.topology
    uniform = "uniform", Layout.of(RECORDED)
    whole, memory = {"gain": True, "rest_s": trace.rest_s}, layers_in_flight(36)
    return [
        Case("ST trace 4x1 M4, whole step, 36 layers in flight", *job, 0.136, *uniform, memory=memory, **whole),
        Case("ST trace 4x1 M4, whole step", *job, 0.191, *uniform, **whole),
    ]


# --- the comparison of split rules


@dataclass(frozen=True)
class PeerRow:
    """What each rule's split takes over an even one, 1F1B with four micro-batches a rank.

    Attributes:
        name, model, ranks: of the row.
        published: figures of ``RULES``, None where a rule refuses; then the best known.
    """

    name: str
    model: models.Dense
    ranks: int
    published: tuple[float | None, ...]
    best: float

    @property
    def topology(self) -> Topology:
        return Topology(self.ranks, 4 * self.ranks)

    @property
    def costs(self) -> ChainCosts:
        return self.model.square_costs()

    def splits(self) -> list[tuple[int, ...] | None]:
        """The layers of each stage by every rule of ``RULES``."""
        model, ranks, costs = self.model, self.ranks, self.costs
        n, head = model.num_layers, costs.in_layers(costs.head)[0]
        return [
            peers.even(n, ranks),
            peers.torchtitan(n, ranks, 1),
            peers.torchtitan(n, ranks, round(head)),
            peers.deepspeed(n, ranks, model.square_layer_parameters, model.table_parameters),
            peers.nanotron(n, ranks, costs.mean_layer.forward_s, costs.head.forward_s),
            peers.smallest_maximum(n, ranks, head),
        ]


RULES = ("even or E+L", "torchtitan, output 1", "torchtitan, round(head)", "DeepSpeed", "nanotron", "min-max")


def peer_rows() -> list[PeerRow]:
    return [
        PeerRow("Llama-3-8B, 8 ranks", models.LLAMA_3_8B, 8, (1.341, 1.154, 1.108, 1.120, 1.114, 1.132), 1.102),
        PeerRow("Llama-3-8B, 16", models.LLAMA_3_8B, 16, (1.733, 1.358, 1.249, 1.261, 1.278, 1.320), 1.243),
        PeerRow("Qwen2.5-7B, 8", models.QWEN_25_7B, 8, (None, 1.089, 1.042, 1.089, 1.042, 1.042), 1.035),
        PeerRow("Gemma-2-9B, 4", models.GEMMA_2_9B, 4, (1.178, 1.178, 1.028, 1.096, 1.023, 1.028), 1.023),
        PeerRow("Gemma-2-9B, 16", models.GEMMA_2_9B, 16, (None, 1.622, None, 1.345, 1.622, 1.345), 1.345),
        PeerRow("Llama-2-7B, 8", models.LLAMA_2_7B, 8, (1.102, 1.140, 1.140, 1.102, 1.134, 1.102), 1.102),
    ]
