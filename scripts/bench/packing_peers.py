"""What others pack with: their own code where it is installed, and rules written from their descriptions.

An installed peer runs as itself, through the functions that its trainer calls; what is added here is what lies around them: the
lengths go in, and what comes out is dealt to ranks as the peer's own trainer does. A rule says so in its name.
"""

from __future__ import annotations

import contextlib
import heapq
import importlib
import importlib.metadata
import io
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from megatron_balance.packing.baselines import Packed, in_order
from megatron_balance.packing.cost import BinCost
from megatron_balance.packing.grid import Grid
from megatron_balance.packing.pieces import PieceRule

Bins = Sequence[Sequence[int]]  # tokens, or numbers, of the documents in each bin


@dataclass(frozen=True, eq=False)
class Batch:
    """Documents that are all to be packed.

    Attributes:
        tokens: of each, int64 of shape [documents].
        bin_cost, rule, grid: what they cost and where they go; a packer may take more micro-batches.
        seed: that they were drawn with.
    """

    tokens: np.ndarray
    bin_cost: BinCost
    rule: PieceRule
    grid: Grid
    seed: int

    @property
    def cost(self) -> np.ndarray:
        """Seconds of each document."""
        return self.bin_cost.piece_s(self.tokens).sum(axis=0)

    @property
    def data_size(self) -> int:
        return self.grid.topology.data_size


@dataclass(frozen=True)
class Peer:
    """A way to pack.

    Attributes:
        name: with the version where it is somebody's own code.
        pack: documents to bins.
        missing: why it cannot be run; then ``pack`` is None.
    """

    name: str
    pack: Callable[[Batch], Packed] | None
    missing: str = ""


@cache
def peers() -> tuple[Peer, ...]:
    """Everybody, installed or not."""
    return (
        Peer("Megatron dp_balanced (rule)", lambda batch: in_order(batch.tokens, batch.rule, batch.grid)),
        _installed("TRL bfd", "trl", "trl", _trl),
        _installed("NeMo first_fit_decreasing", "nemo_toolkit", "nemo.utils.sequence_packing_utils", _nemo),
        _installed("OpenRLHF", "openrlhf", "openrlhf.utils.seqlen_balancing", _open_rlhf),
        _installed("slime first-fit", "slime", "slime.utils.dp_schedule", lambda module: _slime(module, False)),
        _installed("slime balance_by_flops", "slime", "slime.utils.dp_schedule", lambda module: _slime(module, True)),
        _installed("verl", "verl", "verl.utils.seqlen_balancing", _verl),
        Peer("ByteDance greedy (rule)", _bytedance),
        Peer("WLB-LLM Alg. 1, no queue (rule)", _wlb),
    )


def _installed(name: str, package: str, module: str, adapt: Callable) -> Peer:
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            loaded = importlib.import_module(module)
    except ImportError as error:
        return Peer(name, None, str(error))
    return Peer(f"{name} {_version(package)}", adapt(loaded))


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "(checkout)"


# --- installed


def _trl(trl) -> Callable[[Batch], Packed]:
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()

    def pack(batch: Batch) -> Packed:
        documents = Dataset.from_dict({"input_ids": [np.zeros(tokens, dtype=np.int8) for tokens in batch.tokens]})
        packed = trl.pack_dataset(documents, batch.rule.seq_length, strategy="bfd", map_kwargs={"batch_size": None})
        return _shuffled(packed["seq_lengths"], batch)

    return pack


def _nemo(nemo) -> Callable[[Batch], Packed]:
    return lambda batch: _shuffled(nemo.first_fit_decreasing(batch.tokens.tolist(), batch.rule.seq_length), batch)


def _open_rlhf(openrlhf) -> Callable[[Batch], Packed]:
    """As its replay buffer: each rank's own documents, in as many micro-batches as first-fit needs on the worst rank."""

    def pack(batch: Batch) -> Packed:
        shares = [share.tolist() for share in np.array_split(batch.tokens, batch.data_size)]
        needed = [openrlhf.get_minimum_num_micro_batch_size(share, batch.rule.seq_length, 1, 1) for share in shares]
        ranks = [openrlhf.get_seqlen_balanced_partitions(share, max(needed), equal_size=False) for share in shares]
        bins = [_at(share, rank) for share, rank in zip(shares, ranks, strict=True)]
        return _of_ranks(bins, batch)

    return pack


def _slime(slime, by_flops: bool) -> Callable[[Batch], Packed]:
    """A model of one layer whose FLOPs are in the ratio of the cost: (2h + 2g + 3f + v) * s + s**2, in units of 2h."""
    model = Namespace(
        num_layers=1, num_experts=None, hidden_size=4096, num_attention_heads=32, num_query_groups=8, kv_channels=128,
        ffn_hidden_size=12288, vocab_size=2048,
    )  # fmt: skip

    def pack(batch: Batch) -> Packed:
        lengths, count = batch.tokens.tolist(), batch.tokens.size
        options = Namespace(
            **vars(model), use_dynamic_batch_size=True, max_tokens_per_gpu=batch.rule.seq_length, micro_batch_size=None,
            balance_by_flops=by_flops, balance_data=True,
        )  # fmt: skip
        sizes = {"dp_size": batch.data_size, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
        partitions, bins, _, _ = slime.build_dp_schedule(
            options, sizes, lengths, global_batch_size=count, rollout_indices=list(range(count))
        )
        ranks = [_at(_at(lengths, [documents])[0], rank) for documents, rank in zip(partitions, bins, strict=True)]
        return _of_ranks(ranks, batch)

    return pack


def _verl(verl) -> Callable[[Batch], Packed]:
    """As its trainer: documents to ranks by workload, then each rank into micro-batches, as many as the worst rank needs."""
    import torch
    from tensordict import TensorDict

    def arranged(share: list[int], capacity: int, least: int | None) -> list[list[int]]:
        documents = torch.nested.nested_tensor_from_jagged(
            torch.zeros(sum(share), dtype=torch.int8), lengths=torch.tensor(share)
        )
        whole = TensorDict({"input_ids": documents}, batch_size=[len(share)])
        _, bins = verl.rearrange_micro_batches(whole, capacity, min_num_micro_batch=least)
        return _at(share, bins)

    def pack(batch: Batch) -> Packed:
        lengths, capacity = batch.tokens, batch.rule.seq_length
        workload = verl.calculate_workload(torch.from_numpy(lengths)).tolist()
        shares = _at(lengths.tolist(), verl.get_seqlen_balanced_partitions(workload, batch.data_size, equal_size=True))
        ranks = [arranged(share, capacity, None) for share in shares]
        while len({len(rank) for rank in ranks}) > 1:  # across ranks verl reduces this number itself
            most = max(map(len, ranks))
            ranks = [
                rank if len(rank) == most else arranged(share, capacity, most)
                for rank, share in zip(ranks, shares, strict=True)
            ]
        return _of_ranks(ranks, batch)

    return pack


# --- rules


def _bytedance(batch: Batch) -> Packed:
    """The costliest document to the rank that has least cost; there to the micro-batch that has fewest tokens and room."""
    cost, capacity = batch.cost, batch.rule.seq_length
    ranks: list[list[int]] = [[] for _ in range(batch.data_size)]
    loads = [(0.0, rank) for rank in range(batch.data_size)]
    for document in np.argsort(-cost, kind="stable"):
        load, rank = heapq.heappop(loads)
        ranks[rank].append(int(batch.tokens[document]))
        heapq.heappush(loads, (load + cost[document], rank))
    bins = [_fewest_tokens(lengths, capacity, batch.grid.topology.num_microbatches) for lengths in ranks]
    return _of_ranks(bins, batch)


def _fewest_tokens(lengths: Sequence[int], capacity: int, count: int) -> list[list[int]]:
    bins: list[list[int]] = [[] for _ in range(count)]
    held = [(0, number) for number in range(count)]
    for tokens in lengths:
        if held[0][0] + tokens > capacity:
            bins.append([])
            heapq.heappush(held, (0, len(bins) - 1))
        full, number = heapq.heappop(held)
        bins[number].append(tokens)
        heapq.heappush(held, (full + tokens, number))
    return bins


def _wlb(batch: Batch) -> Packed:
    """The longest document to the micro-batch with the least workload, else to the shortest one, whichever has room."""
    count, capacity, cost = batch.grid.num_bins, batch.rule.seq_length, batch.cost
    workload, held = np.zeros(count), np.zeros(count, dtype=np.int64)
    bins: list[list[int]] = [[] for _ in range(count)]
    for document in np.argsort(-batch.tokens, kind="stable"):
        tokens = int(batch.tokens[document])
        chosen = int(workload.argmin())
        if held[chosen] + tokens > capacity:
            chosen = int(held.argmin())
        if held[chosen] + tokens > capacity:
            chosen = len(bins)
            bins.append([])
            workload, held = np.append(workload, 0.0), np.append(held, 0)
        bins[chosen].append(tokens)
        workload[chosen] += cost[document]
        held[chosen] += tokens
    return _dealt(bins, batch)


# --- what comes out


def _at(values: Sequence[int], bins: Bins) -> list[list[int]]:
    return [[values[place] for place in each] for each in bins]


def _shuffled(bins: Bins, batch: Batch) -> Packed:
    """Bins dealt round the ranks in a random order, as the trainers of those who only make bins do."""
    order = np.random.default_rng(batch.seed).permutation(len(bins))
    return _dealt([bins[each] for each in order], batch)


def _dealt(bins: Bins, batch: Batch) -> Packed:
    return _of_ranks([bins[rank :: batch.data_size] for rank in range(batch.data_size)], batch)


def _of_ranks(ranks: Sequence[Bins], batch: Batch) -> Packed:
    """Of each rank the tokens of the documents in its micro-batches, in their order."""
    microbatches = max(map(len, ranks))
    grid = replace(batch.grid, topology=replace(batch.grid.topology, num_microbatches=microbatches))
    held = [
        (tokens, k * len(ranks) + rank)
        for rank, bins in enumerate(ranks)
        for k, each in enumerate(bins)
        for tokens in each
    ]
    tokens, bins = np.array(held, dtype=np.int64).T
    if not np.array_equal(np.sort(tokens), np.sort(batch.tokens)):
        raise RuntimeError("documents got lost or came twice on their way through a packer")
    return Packed(tokens, bins.astype(np.int32), grid)
