"""What `scripts/reproduce_*_imbalance.sh` concludes from traces: made ones here, real training in the scripts themselves."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from traces import made_trace, write_ranks

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
pytest.importorskip("pyarrow")

from quickstart.proof import Proof, table
from reproduce import __main__ as reproduce
from reproduce.failures import FAILURES, Failure, Run

from megatron_balance.diagnosis.result import SEQUENCE_LENGTHS, STAGE_SPLIT
from megatron_balance.diagnosis.trace import Sequences
from megatron_balance.topology import Topology

PP2, DP2 = Topology(2, 8), Topology(1, 1, data_size=2)
STEPS = 8


def split_trace(folder: Path, layers: tuple[int, int], head: float = 0.5, scale: float = 1.0) -> Path:
    """Two stages whose last one has a head that takes as long as so many layers."""
    work = 0.01 * scale * np.array([[layers[0]], [layers[1] + head]]) * np.ones(PP2.num_microbatches)
    random = np.random.default_rng(0)
    noise = 1 + 0.01 * random.standard_normal((STEPS, 1, *work.shape))
    trace = made_trace(PP2, work * noise, 2 * work * noise)
    folder.mkdir(parents=True)
    return write_ranks(replace(trace, job=replace(trace.job, layers=layers)), folder)


def test_a_mended_split_is_proved(tmp_path) -> None:
    proof = Proof.of(STAGE_SPLIT, split_trace(tmp_path / "a", (4, 12)), split_trace(tmp_path / "b", (8, 8)))
    assert proof.predicted == pytest.approx(proof.measured, rel=0.03) and proof.measured > 1.2
    assert len(proof.symptoms) >= 3 and [*proof.failures()] == []
    assert proof.to_json()["symptoms_gone"] == len(proof.symptoms)


def test_a_fix_that_does_nothing_is_told(tmp_path) -> None:
    stays = Proof.of(STAGE_SPLIT, split_trace(tmp_path / "a", (4, 12)), split_trace(tmp_path / "b", (4, 12)))
    assert len(stays.stays) == len(stays.symptoms) and [line for line in stays.failures() if "reads 'yes'" in line]


def test_another_cause_and_a_wrong_prediction_are_told(tmp_path) -> None:
    before, after = split_trace(tmp_path / "a", (4, 12)), split_trace(tmp_path / "b", (8, 8), scale=0.8)
    assert [line for line in Proof.of(STAGE_SPLIT, before, after).failures() if "was predicted" in line]
    lines = [*Proof.of(SEQUENCE_LENGTHS, before, after).failures()]
    assert "is diagnosed stage split, not sequence lengths" in lines[0]


def lengths_trace(folder: Path, even: bool, filled: float = 1.0) -> Path:
    """Two ranks that are dealt shares of the same work, which take as much longer backward as forward."""
    random = np.random.default_rng(1)
    first = 0.5 if even else random.uniform(0.3, 0.7, (STEPS, 1, 1))
    work = np.stack(
        [first * np.ones((STEPS, 1, 1)), (1 - first) * np.ones((STEPS, 1, 1))], axis=1
    )  # [steps, DP, stages, M]
    ways = (filled * seconds * work * (1 + 0.002 * random.standard_normal(work.shape)) for seconds in (1.0, 2.0))
    folder.mkdir(parents=True)
    tokens = np.full((STEPS, 1, 2), int(1000 * filled))
    squares = (tokens**2 * work[:, :, 0].swapaxes(1, 2)).astype(int)
    return write_ranks(made_trace(DP2, *ways, Sequences(tokens, tokens, squares)), folder)


def test_mended_lengths_are_proved(tmp_path) -> None:
    proof = Proof.of(SEQUENCE_LENGTHS, lengths_trace(tmp_path / "a", False), lengths_trace(tmp_path / "b", True))
    assert proof.predicted == pytest.approx(proof.measured, rel=0.03) and proof.measured > 1.1
    assert len(proof.symptoms) >= 2 and [*proof.failures()] == []


def test_what_steps_of_fewer_tokens_save_is_no_gain(tmp_path) -> None:
    full, fuller = (lengths_trace(tmp_path / name, even) for name, even in (("a", False), ("b", True)))
    emptier = lengths_trace(tmp_path / "c", True, filled=0.9)
    alike, fewer = (Proof.of(SEQUENCE_LENGTHS, full, after) for after in (fuller, emptier))
    assert fewer.measured == pytest.approx(alike.measured, rel=0.01)


def test_the_table_has_a_column_for_each_proof(tmp_path, capsys) -> None:
    from rich.console import Console

    split = Proof.of(STAGE_SPLIT, split_trace(tmp_path / "a", (4, 12)), split_trace(tmp_path / "b", (8, 8)))
    Console(width=100).print(table([split]))
    shown = capsys.readouterr().out
    assert f"{split.predicted:.3f}" in shown and f"{split.measured:.3f}" in shown and "stage split" in shown


# --- the script around it


def stand_in(tmp_path: Path, mended: tuple[int, int]) -> Failure:
    """A failure whose training writes made traces."""

    def train(run: Run, progress: object) -> tuple[Path, ...]:
        layers = [(4, 12), mended][: 1 + run.mends]
        return tuple(split_trace(run.folder / str(number), each) for number, each in enumerate(layers))

    return replace(FAILURES["stage"], text=lambda out, device, pairs, progress: out / "tokens", train=train)


@pytest.mark.parametrize(("mended", "status"), [((8, 8), 0), ((5, 11), 1)])
def test_the_script_ends_with_the_comparison_and_its_status(tmp_path, capsys, mended, status) -> None:
    assert reproduce._reproduce(stand_in(tmp_path, mended), tmp_path, quick=True) == status
    shown = capsys.readouterr().out
    assert "$ megatron-balance diagnose --before" in shown
    assert ("not as it should be" in shown) == bool(status)
    assert (tmp_path / "summary.json").exists()
