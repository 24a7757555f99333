"""Rows of variable length: what they are cut to, and in which order a pipeline's ranks receive them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megatron_balance.schedule.order import schedule_order
from megatron_balance.topology import Topology

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from megatron_balance.megatron.packed.attention import attention_hook  # noqa: E402
from megatron_balance.megatron.packed.chosen_shapes import row_multiple  # noqa: E402
from megatron_balance.megatron.packed.copies import to_device  # noqa: E402
from megatron_balance.megatron.packed.items import FILLED, LABELS, POSITIONS, TOKENS, VALID  # noqa: E402
from megatron_balance.megatron.packed.shapes import Feed, received, row_of, schedules_hook  # noqa: E402

LENGTH = 12


def item(*filled: tuple[int, ...]) -> dict:
    """A micro-batch of the loader's, of each bin how full its slots are; each of its tokens is another."""
    filled = torch.tensor(filled)
    shape = (*filled.shape, LENGTH)
    tokens = torch.arange(filled.numel() * LENGTH).reshape(shape) + 1
    within = torch.arange(LENGTH).expand(shape) < filled[..., None]
    return {
        TOKENS: tokens, LABELS: tokens + 1, VALID: within.float(), POSITIONS: torch.arange(LENGTH).repeat(*filled.shape, 1),
        FILLED: filled,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("filled", "multiple", "length"),
    [
        ([(5,)], 1, 5),
        ([(5,)], 4, 8),
        ([(12,), (7,)], 8, 24),
        ([(12,), (12,)], 8, 24),
        ([(0,)], 4, 4),
        ([(0,), (3,)], 1, 3),
    ],
)
def test_a_row_is_what_its_bins_hold_and_the_least_padding(filled, multiple, length):
    batch = item(*filled)
    row = row_of(batch, 0, multiple)
    assert {name: value.shape for name, value in row.items()} == dict.fromkeys(row, (1, length))
    held = sum(tokens for (tokens,) in filled)
    for name in (TOKENS, LABELS, POSITIONS):
        wanted = torch.cat([batch[name][bin_, 0, :tokens] for bin_, (tokens,) in enumerate(filled)])
        assert row[name][0, :held].tolist() == wanted.tolist()
    assert row[VALID][0].tolist() == [1.0] * held + [0.0] * (length - held)
    assert row[POSITIONS][0, held:].tolist() == list(range(length - held))  # a sequence of its own
    assert row[POSITIONS][0, 0] == 0


def test_a_feed_tells_lengths_before_it_gives_rows_and_draws_no_more_than_there_are():
    loader = iter([item((5, 2)), item((7, 3)), item((9, 0)), item((1, 1))])
    feed = Feed(loader, of_loader=3, more=2, multiple=1)
    assert feed.length(1) == 7
    assert next(feed)[TOKENS].size(1) == 5
    assert feed.length(4) == 3
    assert [row[TOKENS].tolist()[0] for row in feed] == [
        item((7, 3))[TOKENS][0, 0, :7].tolist(), item((9, 0))[TOKENS][0, 0, :9].tolist(),
        item((5, 2))[TOKENS][0, 1, :2].tolist(), item((7, 3))[TOKENS][0, 1, :3].tolist(),
    ]  # fmt: skip
    assert next(loader)[FILLED].tolist() == [[1, 1]]  # the next run's


@pytest.mark.parametrize(
    ("changes", "on_gpu", "multiple"),
    [
        ({}, False, 4),
        ({}, True, 4 * 8),
        ({"fp8": "e4m3", "fp8_recipe": "delayed"}, True, 4 * 32),
        ({"fp8": "e4m3", "fp8_recipe": "blockwise"}, True, 4 * 128),
        ({"fp4": "e2m1", "fp8_recipe": "blockwise"}, True, 4 * 32),
        ({"fp8_recipe": "blockwise"}, True, 4 * 8),
    ],
)
def test_each_rank_has_whole_blocks_of_rows(changes, on_gpu, multiple):
    args = {
        "pipeline_model_parallel_size": 1, "virtual_pipeline_model_parallel_size": None, "micro_batch_size": 1,
        "tensor_model_parallel_size": 4, "context_parallel_size": 1, "data_parallel_size": 1, "sequence_parallel": True,
    }  # fmt: skip
    assert row_multiple(SimpleNamespace(**args, **changes), on_gpu) == multiple


def test_a_tensor_is_copied_where_there_is_a_gpu():
    tensor = torch.arange(6).reshape(2, 3).t()
    copy = to_device(tensor)
    assert torch.equal(copy.cpu(), tensor)
    assert copy.is_cuda if torch.cuda.is_available() else copy is tensor


def test_arguments_that_are_parsed_again_hook_nothing_twice():
    def more(num_microbatches: int) -> int:
        return 0

    assert schedules_hook(8, more) == schedules_hook(8, more) != schedules_hook(4, more)
    assert attention_hook("torch") == attention_hook("torch") != attention_hook("flash")


@pytest.mark.parametrize(
    "topology",
    [Topology(2, 5), Topology(4, 9), Topology(2, 6, 2), Topology(3, 9, 3), Topology(4, 22, 2, microbatch_group_size=8)],
    ids=str,
)
def test_shapes_come_in_the_order_in_which_the_schedule_sends(topology):
    order, ranks = schedule_order(topology), topology.pipeline_size

    def sent(rank: int, is_backward: bool) -> list[int]:
        """Micro-batches that a rank sends on, as its schedule runs them."""
        end, stop = (0, 0) if is_backward else (ranks - 1, topology.virtual_size - 1)
        return [
            int(microbatch)
            for backward, chunk, microbatch in zip(
                order.is_backward[rank], order.chunk[rank], order.microbatch[rank], strict=True
            )
            if backward == is_backward and not (rank == end and chunk == stop)
        ]

    for rank in range(ranks):
        forward, backward = received(topology.num_microbatches, topology.virtual_size, topology.group_size, rank, ranks)
        assert forward == sent((rank - 1) % ranks, False)
        assert backward == sent((rank + 1) % ranks, True)
