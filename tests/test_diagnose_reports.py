"""The reports of a diagnosis: JSON, text, page (in a real browser), picture, timeline and comparison."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from traces import made_trace, slowed

from megatron_balance.diagnose_command.comparison import Comparison, read_summary, summary_of
from megatron_balance.diagnose_command.page import MOST_OPERATIONS, page
from megatron_balance.diagnose_command.report import Report
from megatron_balance.diagnose_command.text import render_comparison, render_report, terminal_text
from megatron_balance.diagnose_command.timeline import IDEAL, REAL, perfetto, step_timelines
from megatron_balance.diagnosis.replay import Replay
from megatron_balance.diagnosis.result import (
    NO,
    SEQUENCE_LENGTHS,
    STAGE_SPLIT,
    UNKNOWN,
    WORKER,
    YES,
    Check,
    Diagnosis,
    Fix,
)
from megatron_balance.diagnosis.trace import Sequences, Trace
from megatron_balance.diagnosis.whatif import slowdown_of
from megatron_balance.errors import BalanceError
from megatron_balance.topology import Topology

HOSTILE = "</script><script>document.documentElement.dataset.broken='yes'</script>\"'<img src=x onerror=alert(1)>&amp;\x1b[2J\u202e"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def trace(steps: int = 3, topology: Topology | None = None, name: str = "a job") -> Trace:
    """Of a job whose last stage is twice the others and whose worker (DP 1, PP 0) is slow."""
    topology = topology or Topology(2, 4, data_size=3)
    forward_s = np.full((steps, topology.data_size, topology.num_stages, topology.num_microbatches), 0.01)
    forward_s[:, :, -1] = 0.02
    forward_s *= 1 + 0.01 * np.arange(steps)[:, None, None, None]
    made = slowed(made_trace(topology, forward_s, 2 * forward_s), 1, 0, 1.5)
    return replace(made, job=replace(made.job, name=name))


def report(made: Trace, words: str = "the last stage is slower", answer: str = YES) -> tuple[Report, Replay]:
    replay = Replay(made)
    checks = (
        Check(STAGE_SPLIT, words, f"2.00x {words}", "above 1.1x", answer, 2.0, 1.1),
        Check(SEQUENCE_LENGTHS, "step time follows the longest", "no lengths", "correlation above 0.9", UNKNOWN),
    )
    fixes = (Fix(STAGE_SPLIT, ("--decoder-last-pipeline-num-layers", words), 0.8, 1.0, "free", words),)
    causes = {STAGE_SPLIT: 0.7, SEQUENCE_LENGTHS: 0.0, WORKER: 0.2}
    found = Diagnosis(slowdown_of(made, replay), causes, (STAGE_SPLIT, WORKER), (1, 0), checks, fixes, 1.5, 36.0)
    return Report(made, found), replay


# --- JSON


def test_json_holds_what_was_found():
    shown, _ = report(trace())
    slowdown, values = shown.diagnosis.slowdown, json.loads(json.dumps(shown.values(), allow_nan=False))
    assert values["S"] == slowdown.slowdown and values["S_t"] == slowdown.by_operation
    assert np.array_equal(values["S_w"], slowdown.by_worker) and np.shape(values["S_w"]) == (2, 3)
    assert (values["M_S"], values["M_W"]) == (slowdown.last_stage, slowdown.slowest_workers)
    assert values["causes"] == {STAGE_SPLIT: 0.7, SEQUENCE_LENGTHS: 0.0, WORKER: 0.2}
    assert values["verdict"] == [STAGE_SPLIT, WORKER] and values["worker"] == {"dp_rank": 1, "pp_rank": 0}
    assert values["fix"] == values["fixes"][0] and values["fix"]["gain"] == pytest.approx(0.25)
    assert [check["answer"] for check in values["checklist"]] == [YES, UNKNOWN]
    assert values["checklist"][1]["value"] is None
    assert values["stages"]["forward_s"] == pytest.approx([0.01 * 1.01 * (1 + 0.5 / 3), 0.02 * 1.01])
    assert [step["step"] for step in values["steps"]] == [0, 1, 2]


def test_what_is_no_number_is_null_in_json_and_a_dash_in_text():
    shown, replay = report(trace())
    slowdown = shown.diagnosis.slowdown
    by_worker, by_step = slowdown.by_worker.copy(), slowdown.by_worker_per_step.copy()
    by_worker[:, 2] = by_step[:, :, 2] = np.nan  # a rank whose file is missing
    gone = replace(shown.diagnosis, slowdown=replace(slowdown, by_worker=by_worker, by_worker_per_step=by_step))
    partial = Report(replace(shown.trace, problems=("DP rank 2 is not in the trace",)), gone)
    values = json.loads(json.dumps(partial.values(), allow_nan=False))
    assert [row[2] for row in values["S_w"]] == [None, None] and values["partial"]
    assert "DP rank 2 is not in the trace" in terminal_text(render_report(partial))
    assert embedded(page(partial, replay))["workers"][2] is None


# --- text


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_text_fits_its_width_and_is_plain_where_it_is_piped(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    text = terminal_text(render_report(report(trace(topology=Topology(2, 2, data_size=90), name="n" * 300))[0]))
    assert max(map(len, text.splitlines())) <= columns
    assert "\x1b" not in text and "(DP rank 1, PP rank 0)" in " ".join(text.split())


def test_hostile_names_reach_no_terminal():
    text = terminal_text(render_report(report(trace(name=f"[red]{HOSTILE}"), HOSTILE)[0]))
    assert "\x1b" not in text and "\u202e" not in text and "[red]" in text


# --- page


class Elements(HTMLParser):
    """Names of a page's elements, its text, and what it refers to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.references: list[str] = []
        self.handlers: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.names.append(tag)
        self.references += [value for name, value in attrs if name in ("src", "href", "action", "data", "srcset")]
        self.handlers += [name for name, _ in attrs if name.startswith("on") or name == "style"]

    def handle_data(self, data):
        self.text += data


def embedded(text: str) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)[1])


def test_page_is_one_file_whose_policy_forbids_the_rest():
    text = page(*report(trace()))
    elements = Elements(text)
    assert not elements.references and not elements.handlers
    assert not {"link", "img", "iframe", "object", "embed", "form", "base"} & {*elements.names}
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)[1]
    assert policy.startswith("default-src 'none';") and "unsafe" not in policy and "http" not in policy
    for words in ("Stage split and one worker (DP rank 1, PP rank 0)", "+25.0 %", "2.00x", "not measurable", "70.0 %"):
        assert words in elements.text


def test_hostile_names_stay_text_in_the_page():
    made = trace(name=HOSTILE)
    shown, replay = report(replace(made, problems=(HOSTILE,)), HOSTILE)
    text = page(shown, replay)
    elements = Elements(text)
    plain = Elements(page(*report(trace())))
    assert elements.names.count("script") == plain.names.count("script") == 2 and "img" not in elements.names
    assert elements.text.count("dataset.broken") >= 6
    assert "\x1b" not in text and "\u202e" not in text


def test_data_of_the_page_cannot_end_its_element():
    made = trace()
    shown, replay = report(replace(made, kinds=tuple(f"{kind}{HOSTILE}" for kind in made.kinds)))
    data = embedded(page(shown, replay))
    assert data["kinds"][0].startswith("forward-compute</script><script>")


def test_page_of_many_ranks_stays_small():
    shown, replay = report(trace(16, Topology(4, 4, data_size=128)))
    data = embedded(page(shown, replay))
    assert len(data["workers"]) == 512 and len(data["by_step"]) == 16
    lanes = [row for one in data["timelines"].values() for name in (REAL, IDEAL) for rank in one[name] for row in rank]
    assert sum(len(row) // 4 for row in lanes) <= MOST_OPERATIONS
    assert str(data["typical"]) in data["timelines"]
    for one in data["timelines"].values():
        assert one["last"] == 1 and 1 in one["dp_ranks"] and len(one["dp_ranks"]) == 16


# --- in a browser


def browse(file: Path, folder: Path, *flags: str) -> tuple[str, str]:
    """The page's DOM after its script has run, and what the console said."""
    if CHROMIUM is None:
        pytest.skip("there is no chromium on this machine")
    command = [CHROMIUM, "--headless", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-quic"]
    command += [
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--enable-logging=stderr",
    ]
    command += ["--no-sandbox"]  # of which root, containers and some settings of a kernel allow none; the page is ours
    command += [f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=3000", *flags, file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


def test_page_draws_in_a_browser_without_a_word_on_the_console(tmp_path):
    made = trace(name=HOSTILE)
    shown, replay = report(made, HOSTILE)
    file = tmp_path / "report.html"
    file.write_text(page(shown, replay), encoding="utf-8")
    dom, console = browse(file, tmp_path, "--dump-dom")
    assert not console
    assert 'data-drawn="yes"' in dom and "data-broken" not in dom
    assert "DP rank 1, the last to finish" in dom and re.search(r"s recorded, .*s ideal: \d\.\d+ times", dom)


def test_page_answers_keys_and_selections(tmp_path):
    """The page, without its policy, drives itself."""
    driver = """<script>
      const box = document.getElementById("heatmap");
      for (const key of ["ArrowRight", "ArrowRight", "ArrowUp"]) box.dispatchEvent(new KeyboardEvent("keydown", {key}));
      document.documentElement.dataset.first = document.getElementById("worker-facts").textContent;
      document.getElementById("next").click();
      document.documentElement.dataset.step = document.getElementById("step").value;
      document.documentElement.dataset.timeline = document.getElementById("timeline-step").value;
      const pixels = box.getContext("2d").getImageData(0, 0, box.width, box.height).data;
      document.documentElement.dataset.colours = new Set(Array.from(new Uint32Array(pixels.buffer))).size;
    </script></body>"""
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page(*report(trace())))
    file = tmp_path / "report.html"
    file.write_text(text.replace("</body>", driver), encoding="utf-8")
    dom, console = browse(file, tmp_path, "--dump-dom")
    assert not console
    assert re.search(r'data-first="DP rank 1, PP rank 0: slowdown \d\.\d+ over all steps"', dom)
    assert 'data-step="0"' in dom and 'data-timeline="0"' in dom
    assert int(re.search(r'data-colours="(\d+)"', dom)[1]) > 10


def test_policy_of_the_page_stops_what_is_not_its_own(tmp_path):
    foreign = (
        "<script>document.documentElement.dataset.broken='yes'</script><img src='https://example.org/x.png'></body>"
    )
    file = tmp_path / "report.html"
    file.write_text(page(*report(trace())).replace("</body>", foreign), encoding="utf-8")
    dom, console = browse(file, tmp_path, "--dump-dom")
    assert 'data-drawn="yes"' in dom and "data-broken" not in dom
    assert console.count("Content Security Policy") >= 2


# --- picture and timeline


def test_picture_is_drawn_with_formulas_in_the_name():
    pytest.importorskip("matplotlib")
    from megatron_balance.diagnose_command.picture import picture

    shown, replay = report(trace(name=r"$\frac{1}{$ " + HOSTILE))
    assert picture(shown, step_timelines(replay, shown.typical_step)).startswith(b"\x89PNG")


@pytest.mark.parametrize("topology", [Topology(2, 4, data_size=3), Topology(2, 4, 2, data_size=2), Topology(1, 2)])
def test_timeline_has_every_rank_twice_and_its_events_never_overlap(topology):
    made = (
        trace(topology=topology)
        if topology.data_size > 1
        else made_trace(topology, np.ones((1, 1, 1, 2)), np.ones((1, 1, 1, 2)))
    )
    replay = Replay(made)
    timelines = step_timelines(replay, 0)
    events = json.loads(perfetto(timelines, HOSTILE))["traceEvents"]
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    groups = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    lanes: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for event in events:
        if event["ph"] == "X":
            assert event["ts"] >= 0 and event["dur"] >= 0 and 0 <= event["args"]["waits_us"] <= event["dur"]
            lanes.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    assert {*lanes} == {*named}
    for spans in lanes.values():
        spans.sort()
        assert all(before[1] <= after[0] for before, after in pairwise(spans))
    for name in (REAL, IDEAL):
        shown = {(groups[pid], named[pid, tid].split(":")[0]) for pid, tid in named if groups[pid].startswith(name)}
        workers = {
            (f"{name} step 0, DP rank {dp}", f"PP rank {pp}")
            for dp, pp in np.ndindex(topology.data_size, topology.pipeline_size)
        }
        assert shown == workers
    per_step = sum(event["ph"] == "X" for event in events) / 2
    assert per_step == ((made.step == 0) & (made.kind != made.kinds.index("gc"))).sum()
    slowdown = slowdown_of(made, replay)
    assert timelines[REAL].step_s == pytest.approx(slowdown.recorded_s[0])
    assert timelines[IDEAL].step_s == pytest.approx(slowdown.ideal_s[0])


# --- before and after


def test_comparison_says_what_went_what_was_predicted_and_what_came(tmp_path):
    before, _ = report(trace())
    after, _ = report(trace(topology=Topology(2, 4, data_size=3), name="a job"), answer=NO)
    faster = replace(after.diagnosis.slowdown, actual_s=before.diagnosis.slowdown.actual_s / 1.2)
    after = Report(after.trace, replace(after.diagnosis, slowdown=faster))
    comparison = Comparison(summary_of(before), summary_of(after))
    values = json.loads(json.dumps(comparison.values(), allow_nan=False))
    assert values["gain"] == pytest.approx(0.2) and values["predicted"][0]["gain"] == pytest.approx(0.25)
    assert [change["change"] for change in values["changes"]] == ["gone", "cannot be compared"]
    text = " ".join(terminal_text(render_comparison(comparison)).split())
    assert "+20.0 % (faster)" in text and "+25.0 % by stage split (free" in text and "1 gone" in text
    written = tmp_path / "before.json"
    written.write_text(json.dumps(before.values()))
    assert read_summary(str(written)) == comparison.before


def test_a_step_of_fewer_tokens_is_no_faster_job(tmp_path):
    def of_tokens(each: int | None) -> Report:
        made = trace()
        held = None if each is None else np.full((3, 4, 3), each)
        return report(replace(made, sequences=None if held is None else Sequences(held, held, held**2)))[0]

    full, fewer = of_tokens(100), of_tokens(90)
    comparison = Comparison(summary_of(full), summary_of(fewer))
    assert comparison.gain == pytest.approx(0.9 - 1) and comparison.values()["before"]["tokens"] == 1200
    text = " ".join(terminal_text(render_comparison(comparison)).split())
    assert "its tokens from 1,200 to 1,080, -10.0 % (slower for the same tokens)" in text
    (tmp_path / "before.json").write_text(json.dumps(fewer.values()))
    assert read_summary(str(tmp_path / "before.json")) == comparison.after
    assert Comparison(summary_of(full), summary_of(of_tokens(None))).gain == 0


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"S": 1}', '{"job": {"name": 1}, "causes": {}, "steps": [], "checklist": [], "fixes": []}'],
)
def test_comparison_refuses_what_is_no_report(tmp_path, text):
    file = tmp_path / "before.json"
    file.write_text(text)
    with pytest.raises(BalanceError, match=r"before\.json .*diagnose --json"):
        read_summary(str(file))
