"""Transfers between pipeline stages."""

from __future__ import annotations

import pytest

from megatron_balance.costs.devices import CPU_CORE, Link, device_chosen
from megatron_balance.costs.transfer import transfer_bytes, transfer_s
from megatron_balance.model import ModelSpec
from megatron_balance.topology import Topology

MODEL = {"num_layers": 4, "hidden_size": 1024, "num_attention_heads": 8, "padded_vocab_size": 512, "seq_length": 4096,
         "bf16": True}  # fmt: skip


@pytest.mark.parametrize(
    ("sizes", "sequence_parallel", "bytes_sent"),
    [
        ({}, False, 4096 * 1024 * 2),
        ({"micro_batch_size": 3}, False, 3 * 4096 * 1024 * 2),
        ({"tensor_size": 4}, False, 4096 * 1024 * 2),
        ({"tensor_size": 4}, True, 1024 * 1024 * 2),
        ({"tensor_size": 4, "context_size": 2}, True, 512 * 1024 * 2),
    ],
)
def test_bytes_of_a_transfer(sizes: dict[str, int], sequence_parallel: bool, bytes_sent: int) -> None:
    model = ModelSpec.from_arguments({**MODEL, "sequence_parallel": sequence_parallel})
    assert transfer_bytes(model, Topology(4, 8, **sizes)) == bytes_sent


def test_seconds_are_latency_and_bandwidth() -> None:
    assert Link(0.5, 4.0).seconds(2.0) == 1.0
    model, topology = ModelSpec.from_arguments(MODEL), Topology(4, 8)
    assert transfer_s(model, topology, device_chosen("H100")) == pytest.approx(10e-6 + 4096 * 1024 * 2 / 50e9)
    assert transfer_s(model, topology, device_chosen("A100")) == pytest.approx(10e-6 + 4096 * 1024 * 2 / 25e9)
    assert transfer_s(model, topology, CPU_CORE) == 0.0
