"""Documents to pack: what Megatron's indexes and files of lengths hold, and what is said of damaged ones."""

from __future__ import annotations

import os
import re
import struct
from pathlib import Path

import numpy as np
import pytest
from packed_data import wlb_like_file

from megatron_balance.errors import BalanceError
from megatron_balance.packing.documents import (
    Blend,
    Documents,
    Totals,
    default_cache_folder,
    parse_data_path,
    read_blend,
    read_documents,
    read_indexed,
    read_lengths,
)
from megatron_balance.packing.pieces import DROP, TRUNCATE, PieceRule

LENGTHS = [5, 1, 0, 300, 2]


def write_indexed(prefix: Path, lengths: list[int], code: int = 8, token_bytes: int = 2) -> Path:
    """A data set as Megatron writes it, `test_megatron_agrees` says."""
    sizes = np.array(lengths, dtype="<i8") * token_bytes
    index = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, code, len(lengths), len(lengths) + 1)
    index += np.array(lengths, dtype="<i4").tobytes() + (np.cumsum(sizes) - sizes).astype("<i8").tobytes()
    Path(f"{prefix}.idx").write_bytes(index + np.arange(len(lengths) + 1, dtype="<i8").tobytes())
    Path(f"{prefix}.bin").write_bytes(b"\0" * int(sizes.sum()))
    return prefix


@pytest.fixture
def prefix(tmp_path) -> Path:
    return write_indexed(tmp_path / "wiki_text_document", LENGTHS)


def refusal(function, *arguments) -> str:
    with pytest.raises(BalanceError) as refused:
        function(*arguments)
    message = str(refused.value)
    assert "\n" not in message
    return message


# --- a Megatron index


@pytest.mark.megatron
@pytest.mark.parametrize(("dtype", "code"), [("uint16", 8), ("int32", 4), ("uint8", 1), ("int64", 5)])
@pytest.mark.parametrize("multimodal", [False, True])
def test_megatron_agrees(tmp_path, dtype, code, multimodal):
    torch = pytest.importorskip("torch")
    indexed_dataset = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    stock = str(tmp_path / "stock")
    kind = getattr(np, dtype)
    builder = indexed_dataset.IndexedDatasetBuilder(f"{stock}.bin", dtype=kind, multimodal=multimodal)
    for length in LENGTHS:
        builder.add_item(torch.ones(length, dtype=torch.int64))
        builder.end_document()
    builder.finalize(f"{stock}.idx")

    reader = indexed_dataset.IndexedDataset(stock, multimodal=multimodal)
    documents = read_indexed(stock)
    assert documents.lengths.tolist() == reader.sequence_lengths.tolist() == LENGTHS
    assert documents.content == Documents.of("the same", np.array(LENGTHS)).content
    if not multimodal:
        ours = write_indexed(tmp_path / "ours", LENGTHS, code, np.dtype(dtype).itemsize)
        assert Path(f"{ours}.idx").read_bytes() == Path(f"{stock}.idx").read_bytes()


def test_lengths_are_mapped_and_cannot_be_changed(prefix):
    lengths = read_indexed(prefix).lengths
    assert isinstance(lengths.base, np.memmap) or isinstance(lengths.base.base, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        lengths[0] = 1


def test_an_ending_is_left_out(prefix):
    assert {read_documents(f"{prefix}{ending}").name for ending in ("", ".idx", ".bin")} == {str(prefix)}


@pytest.mark.parametrize(
    ("place", "content", "said"),
    [
        (0, b"PK", "is not the index of a Megatron data set"),
        (9, struct.pack("<Q", 2), "is of version 2, which no Megatron writes; only 1 is known"),
        (17, b"\x09", "the type of its tokens has the code 9, which is none of 1 to 8"),
        (
            18,
            struct.pack("<Q", 6),
            "is cut short: 142 bytes, but 6 sequences and 6 document boundaries take 154; 12 are missing",
        ),
        (18, struct.pack("<Q", 2**63), "is cut short: 142 bytes"),
        (26, struct.pack("<Q", 5), "is damaged: 142 bytes, but 5 sequences and 5 document boundaries take 134"),
        (34, struct.pack("<i", -5), "length 0 is -5, not a whole number"),
        (34, struct.pack("<i", 6), "has 616 bytes, but the lengths in .*idx come to 618 \\(2 a token\\)"),
        (34 + 20 + 32, struct.pack("<q", 600), "its last sequence is at byte 600 and has 4, but .*bin ends at 616"),
    ],
)
def test_a_damaged_index(prefix, place, content, said):
    index = Path(f"{prefix}.idx")
    whole = bytearray(index.read_bytes())
    whole[place : place + len(content)] = content
    index.write_bytes(whole)
    assert re.search(said, refusal(read_documents, prefix))


def test_an_index_cut_short_anywhere(prefix):
    index = Path(f"{prefix}.idx")
    whole = index.read_bytes()
    for size in range(len(whole)):
        index.write_bytes(whole[:size])
        said = refusal(read_documents, prefix)
        if size >= 34:
            assert f"is cut short: {size} bytes" in said and f"; {len(whole) - size} are missing" in said
        else:
            assert f"{34 - size} bytes of its header are missing" in said


def test_a_bin_cut_short(prefix):
    os.truncate(f"{prefix}.bin", 615)
    assert "has 615 bytes, but the lengths in" in refusal(read_documents, prefix)


def test_missing_files(prefix):
    mistyped = prefix.with_name("wiki_text_documents")
    assert f"has 1: pass {prefix}" in refusal(read_documents, mistyped)
    assert "and so is its folder" in refusal(read_documents, prefix / "elsewhere" / "data")
    os.unlink(f"{prefix}.bin")
    assert f"{prefix}.idx is there, but {prefix}.bin is not" in refusal(read_documents, prefix)
    os.unlink(f"{prefix}.idx")
    assert "ends in .idx" in refusal(read_documents, prefix)


def test_an_empty_data_set(tmp_path):
    assert "holds no documents" in refusal(read_documents, write_indexed(tmp_path / "empty", []))


# --- files of lengths


def write(folder: Path, name: str, content: str | np.ndarray) -> Path:
    path = folder / name
    np.save(path, content) if isinstance(content, np.ndarray) else path.write_text(content, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.json", "[5, 1, 0, 300, 2]"),
        ("a.json", '{"source": "a table", "lengths": [5, 1, 0, 300, 2.0]}'),
        ("a.csv", "5\n1\n0\n300\n2\n"),
        ("a.csv", "\ufefflength\r\n5\r\n1\r\n0\r\n\r\n300\r\n2"),
        ("a.csv", 'url,num_tokens\n"a,b",5\n,1\nc,0\nd,300\ne,2.0\n'),
        ("a.npy", np.array(LENGTHS)),
        ("a.npy", np.array(LENGTHS, dtype=np.uint16)),
        ("a.npy", np.array(LENGTHS, dtype=np.float64)),
        ("a.npy", np.array(LENGTHS, dtype=">i4")),
    ],
)
def test_a_file_of_lengths(tmp_path, name, content):
    documents = read_documents(write(tmp_path, name, content))
    assert documents.lengths.dtype == np.int32 and documents.lengths.tolist() == LENGTHS
    assert documents.content == Documents.of("the same", np.array(LENGTHS, dtype=np.int32)).content


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.json", "[]", "holds no documents"),
        ("a.json", "[3, NaN]", "item 1 is nan, not a whole number of 0 to 2147483647"),
        ("a.json", "[3, -1]", "item 1 is -1, not"),
        ("a.json", "[3, 1.5]", "item 1 is 1.5, not"),
        ("a.json", "[true]", "item 0 is True, not"),
        ("a.json", '[3, "4"]', "item 1 is '4', not"),
        ("a.json", "[2147483648]", "item 0 is 2147483648, not"),
        ("a.json", "[3, [" + "1, " * 99 + "1]]", r"item 1 is \[1, 1, .*\.\.\., not"),
        ("a.json", "[3, 4", "is not whole JSON"),
        ("a.json", "[" * 100_000, "is not whole JSON"),
        ("a.json", '{"a": [1], "b": [2]}', "an object with 2 lists"),
        ("a.json", "3", "neither a list nor an object"),
        ("a.csv", "", "holds no documents"),
        ("a.csv", "length\n", "holds no documents"),
        ("a.csv", "length\n3\nnan\n", "line 3 is nan, not"),
        ("a.csv", "3\nmany\n", "line 2 is 'many', not"),
        ("a.csv", "3\n-3\n", "line 2 is -3.0, not"),
        ("a.csv", "3\n1e400\n", "line 2 is inf, not"),
        ("a.csv", "id,size\n1,2\n", "has 2 columns, 0 of them named"),
        ("a.csv", "tokens,length\n1,2\n", "has 2 columns, 2 of them named"),
        ("a.csv", "id,length\n1,2\n3\n", "line 3 has 1 columns, the first line 2"),
        ("a.npy", np.array([], dtype=np.int64), "holds no documents"),
        ("a.npy", np.array([3, -1]), "length 1 is -1, not"),
        ("a.npy", np.array([3, -1], dtype=np.int32), "length 1 is -1, not"),
        ("a.npy", np.array([3.0, np.nan]), "length 1 is nan, not"),
        ("a.npy", np.array([3.0, 2.5]), "length 1 is 2.5, not"),
        ("a.npy", np.array([3, 2**31]), "length 1 is 2147483648, not"),
        ("a.npy", np.array([3, 2**31], dtype=np.float32), "length 1 is 2147483648.0, not"),
        ("a.npy", np.array([3, np.inf], dtype=np.float16), "length 1 is inf, not"),
        ("a.npy", np.array([[3, 1]]), r"int64 of shape \[1, 2\]"),
        ("a.npy", np.array(["3"]), "holds <U1 of shape"),
        ("a.npy", np.array([3, None]), "is not a whole .npy file"),
        ("a.npy", "length", "is not a whole .npy file"),
        ("a.npy", "PK\x03\x04", "is not a whole .npy file"),
        ("a.npy", "", "is not a whole .npy file"),
        ("a.txt", "3", "is none of .json, .csv, .npy"),
    ],
)
def test_what_is_no_length(tmp_path, name, content, said):
    assert re.search(said, refusal(read_lengths, write(tmp_path, name, content)))


def test_a_file_that_cannot_be_read(tmp_path):
    for name in ("none.json", "none.csv", "none.npy"):
        assert "cannot be read (No such file or directory)" in refusal(read_documents, tmp_path / name)


def test_a_cut_npy(tmp_path):
    path = write(tmp_path, "a.npy", np.arange(1000))
    os.truncate(path, 4000)
    assert "is not a whole .npy file" in refusal(read_documents, path)


def test_public_lengths():
    documents = read_documents(wlb_like_file())
    totals = Totals.of(documents, PieceRule(32768))
    assert (totals.documents, totals.longest_tokens) == (99_519, 124_913)
    assert documents.lengths[:3].tolist() == [2792, 4238, 642]


# --- what they hold


def test_content():
    """The digest tells lengths apart, wherever they differ, and stays what it is: caches are found by it."""
    lengths = np.arange(10_000_000, dtype=np.int32)
    other = lengths.copy()
    other[-1] += 1
    contents = {Documents.of("a", each).content for each in (lengths, other, lengths[:-1], lengths[::-1])}
    assert len(contents) == 4
    assert Documents.of("a", lengths[:5]).content == "c3c7fb2fb7eac037ac673018ca0ed7fa"
    assert Documents.of("a", lengths).content == "83ee9419772e4f217c4e38182147b7d9"


def test_totals():
    documents = Documents.of("a", np.array([0, 1, 2, 5, 6, 9]))  # labels: none, none, 1, 4, 5, 8
    split = Totals.of(documents, PieceRule(4))
    assert (split.documents, split.tokens, split.labels, split.longest_tokens) == (6, 23, 18, 9)
    assert (split.without_labels, split.longer_than_bin, split.kept_labels) == (2, 2, 18)
    assert Totals.of(documents, PieceRule(4, long_documents=TRUNCATE)).kept_labels == 1 + 4 + 4 + 4
    assert Totals.of(documents, PieceRule(4, long_documents=DROP)).kept_labels == 1 + 4


def test_cache_folder(prefix):
    """As Megatron, beside the data; and never in a file's place."""
    assert default_cache_folder(read_documents(prefix)) == prefix / "cache" / "megatron_balance"
    lengths = write(prefix.parent, "a.json", "[3]")
    assert default_cache_folder(read_documents(lengths)) == prefix.parent / "a" / "cache" / "megatron_balance"


# --- blends


def test_blends_by_weight_and_by_tokens(tmp_path):
    first, second = (str(write_indexed(tmp_path / name, lengths)) for name, lengths in (("a", [10, 20]), ("b", [90])))
    weighted = read_blend(["1", first, "3", f" {second} "])
    assert weighted.weights == (0.25, 0.75) and [each.name for each in weighted.data_sets] == [first, second]
    assert read_blend([first, second]).weights == (0.25, 0.75)
    assert read_blend([first]).weights == (1.0,)
    assert read_blend(["7", first]).weights == (1.0,)
    assert parse_data_path(["a", "b", "c"]) == (["a", "b", "c"], None)


@pytest.mark.parametrize("ending", ["csv", "npy", "json"])
def test_a_pipe_of_lengths_is_not_waited_for(tmp_path, ending):
    pipe = tmp_path / f"pipe.{ending}"
    os.mkfifo(pipe)
    assert refusal(read_documents, pipe) == f"{pipe} cannot be read (it is not a regular file): pass another"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "no data sets"),
        ("0.3 {} 0.7", "word 1 of 3, '0.3', is a number, but weights and prefixes do not alternate"),
        ("{} 0.3 {} 0.7", "word 2 of 4, '0.3', is a number"),
        ("1 {} -2 {}", "the weight of .* is -2.0: give a number above 0"),
        ("1 {} nan {}", "the weight of .* is nan: give a number above 0"),
        ("1 {} inf {}", "the weight of .* is inf: give a number above 0"),
        ("1 {} 0 {}", "the weight of .* is 0.0: give a number above 0"),
        ("1 {} 1e-320 {}", "the weight of .*, 1e-320, is nothing of 1.0, all: leave it out"),
        ("1e308 {} 1e308 {}", "the weight of .*, 1e.308, is nothing of inf"),
    ],
)
def test_a_wrong_blend(prefix, words, said):
    assert re.search(said, refusal(read_blend, words.replace("{}", str(prefix)).split()))


def test_a_data_set_without_labels(prefix):
    useless = Documents.of("useless", np.array([1, 1, 0]))
    assert "none of the 3 documents of useless has two tokens" in refusal(Blend.of, [read_documents(prefix), useless])
    assert "1 weights for 2 data sets" in refusal(Blend.of, [read_documents(prefix)] * 2, [1.0])
