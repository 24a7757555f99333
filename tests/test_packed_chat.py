"""Packed conversations give the gradient of one a padded row, and train the same on every topology."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from chat_files import CHATML, EARNEST, write_chat, write_tokenizer
from launch import TINY, launch, trained
from test_packed_training import DRIVER, evaluated, fed

from megatron_balance.chat.conversations import open_conversations

pytest.importorskip("transformers")
pytest.importorskip("megatron.training")

FLAGS = (
    "--num-layers 4 --untie-embeddings-and-output-weights --sft --varlen-packing --calculate-per-token-loss --train-iters 20"
    " --eval-iters 1 --eval-interval 10 --tokenizer-type HuggingFaceTokenizer --seq-length 256"
    " --max-position-embeddings 256 --global-batch-size 4"
)
REPEATED = 4


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"), CHATML, bytewise=True)


def test_gradient_is_that_of_one_conversation_a_row(tmp_path, tokenizer):
    chat, script = tmp_path / "chat.jsonl", Path(__file__).with_name("packed_chat.py")
    single = [line for line in EARNEST.read_text(encoding="utf-8").splitlines() if line.count('"system"') < 2]
    chat.write_text("\n".join(single), encoding="utf-8")
    command = [sys.executable, "-W", "ignore", script, tmp_path / "store", chat, tokenizer, tmp_path / "tokens"]
    done = subprocess.run(list(map(os.fspath, command)), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    difference, packed_labels, padded_labels, otherwise = json.loads(done.stdout.splitlines()[-1])
    assert packed_labels == padded_labels > 100
    assert difference <= 1e-5
    assert otherwise > 0.01  # the test would see it


@pytest.fixture(scope="module")
def chat(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("chat") / "chat.jsonl"
    path.write_bytes(EARNEST.read_bytes() * REPEATED)
    return path


def arguments(tokenizer: Path, chat: Path, flags: str = "") -> list[str]:
    kept = [argument for argument in TINY if argument != "--mock-data"]
    kept[kept.index("--split") : kept.index("--split") + 2] = []
    data = [
        "--train-data-path",
        chat,
        "--valid-data-path",
        chat,
        "--test-data-path",
        chat,
        "--tokenizer-model",
        tokenizer,
    ]
    return [*kept, *FLAGS.split(), *map(os.fspath, data), *flags.split()]


@pytest.mark.training
def test_losses_and_evaluation_do_not_depend_on_the_topology(tokenizer, chat, tmp_path):
    alone = trained(
        launch(tmp_path / "alone", arguments(tokenizer, chat, f"--save {tmp_path / 'first'} --save-interval 20"))
    )
    assert "conversations are truncated to 257 tokens, 0 of them before the assistant says anything" in alone.output
    assert alone.losses[-1] < alone.losses[0] - 0.2
    start = f"--load {tmp_path / 'first'} --finetune --no-load-optim --no-load-rng"
    runs = [
        trained(launch(tmp_path / name, arguments(tokenizer, chat, f"{start} {flags}"), processes))
        for name, flags, processes in (
            ("one", "", 1),
            ("PP2-TP2", "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2", 4),
            ("DP2", "--micro-batch-size 2", 2),
        )
    ]
    for run in runs[1:]:
        assert run.losses == pytest.approx(runs[0].losses, rel=3e-6)
        assert evaluated(run) == pytest.approx(evaluated(runs[0]), rel=3e-6)
    assert evaluated(runs[0])


@pytest.mark.training
def test_every_answer_is_learned_once_an_epoch_also_across_a_kill_and_another_topology(tokenizer, chat, tmp_path):
    save = f"--save {tmp_path / 'checkpoint'} --save-interval 3"
    flags = f"--pipeline-model-parallel-size 2 {save}"
    killed = launch(
        tmp_path / "killed",
        arguments(tokenizer, chat, flags),
        2,
        driver=DRIVER,
        environment={"HELD_AT": str(8 * 4)},
        kill_when="iteration        8/",
    )
    assert killed.status < 0
    again = f"--load {tmp_path / 'checkpoint'} {save} --num-workers 2"
    trained(launch(tmp_path / "resumed", arguments(tokenizer, chat, again), 2, driver=DRIVER))
    before, after = fed(tmp_path / "killed"), fed(tmp_path / "resumed")
    steps = {**before, **after}
    assert sorted(steps) == list(range(0, 20 * 4, 4)) and min(after) in before
    dealt, epoch = sum(steps.values(), Counter()), answers(chat, tokenizer, tmp_path)
    assert {*dealt} <= {*epoch}
    times = [dealt[piece] / count for piece, count in epoch.items()]
    assert min(times) >= 1 and max(times) - min(times) <= 1


def answers(chat: Path, tokenizer: Path, folder: Path) -> Counter:
    """Counted inputs and labels of each conversation, which `test_chat.py` checks."""
    data = open_conversations(chat, folder / "tokens", os.fspath(tokenizer))
    found = Counter()
    for number, length in enumerate(data.sequence_lengths.clip(max=257).tolist()):
        tokens, said = data.get(number, 0, length), data.said(number, 1, length - 1)
        found[tuple(tokens[:-1][said].tolist()), tuple(tokens[1:][said].tolist())] += 1
    return found


@pytest.mark.training
def test_faulty_lines_are_refused_before_training(tokenizer, tmp_path):
    chat = write_chat(tmp_path / "chat.jsonl", [("user", "Lane?"), ("assistant", "Yes, sir.")], [("user", "Lane?")])
    run = launch(tmp_path, arguments(tokenizer, chat))
    assert run.status != 0 and not run.ranks
    assert f"megatron-balance: error: {chat}: 1 lines" in run.output
    assert "line 2: no assistant turn (turns 1 to 1); mend them or take them out" in run.output
