"""The benchmark of scale, on sizes small enough for seconds: its own data are sound, its tables full, its picture drawn."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts" / "bench"))

import scale

from megatron_balance.packing.documents import read_documents


def test_its_index_is_one_and_repeats_what_was_drawn(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(scale, "DRAWN", 64)
    scale._write_index(tmp_path / "data", 150)
    lengths = read_documents(tmp_path / "data").lengths  # which checks both files
    assert lengths.size == 150
    assert np.array_equal(lengths[:64], lengths[64:128]) and len(set(lengths[:64].tolist())) > 50


def test_all_tables_and_the_picture(tmp_path, monkeypatch, capsys) -> None:
    small = scale.Sizes(splits=((8, 1, 1),), documents=(20_000,), ranks=(4, 8), batches=2)
    monkeypatch.setattr(scale, "QUICK", small)
    monkeypatch.setattr(scale, "LARGEST", scale.replace(scale.LARGEST, data_size=4))
    picture = tmp_path / "scale.png"
    pytest.importorskip("matplotlib")
    assert scale.main(["--quick", "--folder", str(tmp_path), "--picture", str(picture)]) == 0
    shown = capsys.readouterr().out
    assert [name for name in scale.COLUMNS if f"**{name}**" in shown] == list(scale.COLUMNS)
    rows = [line.split("|")[1].strip() for line in shown.splitlines() if line.startswith("| ")]
    assert [row for row in rows if row[0].isdigit()] == ["64", "20,000", "20,000", "4", "8", "4", "8"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.iterdir()) == [picture]


def test_a_table_that_there_is_not() -> None:
    assert scale.main(["--only", "nothing"]) == 2
