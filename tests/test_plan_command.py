"""`megatron-balance plan`: what it prints and writes for real command lines, and what it refuses."""

from __future__ import annotations

import ast
import itertools
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_balance.cli import main
from megatron_balance.costs.analytic import analytic_table
from megatron_balance.costs.devices import device_chosen
from megatron_balance.costs.transfer import transfer_s
from megatron_balance.errors import BalanceError
from megatron_balance.pipeline.chain import stage_costs
from megatron_balance.pipeline.layout import parse_layout
from megatron_balance.planning.formats import bridge_line, deepspeed_class, deepspeed_parts, layers_flags
from megatron_balance.planning.job import read_job
from megatron_balance.schedule.simulate import Simulator

MODEL = (
    "--num-layers 16 --hidden-size 1024 --ffn-hidden-size 4096 --num-attention-heads 8 --seq-length 2048 --vocab-size 128000"
    " --swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope --bf16 --micro-batch-size 1"
    " --max-position-embeddings 2048 --untie-embeddings-and-output-weights"
)
PP4 = f"{MODEL} --pipeline-model-parallel-size 4"
KEYS = {
    "layout", "stages", "iteration_s", "iteration_over_even", "lower_bound_over_even", "proven", "bubble_fraction", "limited_by",
    "sensitivity", "alternatives",
}  # fmt: skip


def run(capsys: pytest.CaptureFixture[str], text: str) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of the command."""
    try:
        status = main(["plan", *shlex.split(text)])
    except SystemExit as ended:
        status = ended.code
    return status, *capsys.readouterr()


def planned(capsys: pytest.CaptureFixture[str], text: str) -> dict:
    status, out, err = run(capsys, f"--json {text}")
    assert status == 0, err
    return json.loads(out)


# --- JSON


def test_json_is_all_of_standard_output_and_holds_what_was_simulated(capsys) -> None:
    values = planned(capsys, f"--num-microbatches 8 {PP4}")
    assert set(values) == KEYS
    assert [set(stage) for stage in values["stages"]] == [
        {"layers", "forward_s", "backward_s", "peak_memory_bytes"}
    ] * 4
    layout = parse_layout(values["layout"])
    assert [stage["layers"] for stage in values["stages"]] == list(layout.layers)
    job = read_job(shlex.split(PP4), num_microbatches=8)
    device = device_chosen("generic")
    costs = analytic_table(job.model, job.topology, device).chain(job.model, job.topology)
    simulator = Simulator(job.topology, transfer_s(job.model, job.topology, device))
    stages = stage_costs(costs, layout.layers)
    step_s = simulator.step_s([stage.forward_s for stage in stages], [stage.backward_s for stage in stages])
    even = costs.total * 0.25
    even_s = simulator.step_s([even.forward_s] * 4, [even.backward_s] * 4)
    assert values["iteration_s"] == pytest.approx(step_s)
    assert values["iteration_over_even"] == pytest.approx(step_s / even_s)
    assert values["bubble_fraction"] == pytest.approx(1 - 8 * costs.total.total_s / 4 / step_s)
    assert values["lower_bound_over_even"] <= values["iteration_over_even"] * (1 + 1e-9)
    assert values["proven"] is True  # 16 layers on 4 stages are few
    assert all(stage["peak_memory_bytes"] > 0 for stage in values["stages"])
    assert values["limited_by"]


def test_json_file_leaves_the_text_on_standard_output(capsys, tmp_path) -> None:
    path = tmp_path / "plan.json"
    status, out, _ = run(capsys, f"--json {path} --num-microbatches 8 {PP4}")
    assert status == 0 and out.startswith("Pipeline plan: 16 layers on 4 pipeline ranks")
    assert json.loads(path.read_text()) == planned(capsys, f"--num-microbatches 8 {PP4}")


def test_a_script_is_never_taken_for_the_json_file(capsys, tmp_path) -> None:
    script = tmp_path / "pretrain_gpt.py"
    script.write_text("precious")
    status, out, err = run(capsys, f"--json {script} --num-microbatches 8 {PP4}")
    assert status == 2 and out == "" and r".json" in err
    assert script.read_text() == "precious"


# --- alternatives


def test_alternatives_have_steps_of_their_own_or_reasons(capsys) -> None:
    compared = "Etttttt|ttttt|ttt|ttL", "Ettt|tttL", "Etttt|tttt|tttt|ttttmL"
    flags = " ".join(f"--compare '{layout}'" for layout in compared)
    values = planned(capsys, f"--num-microbatches 8 {flags} {PP4}")
    found = {one["name"]: one for one in values["alternatives"]}
    for one in found.values():
        assert set(one) == {"name", "layout", "legal", "iteration_over_even", "peak_memory_bytes", "reason"}
        assert one["legal"] == (one["iteration_over_even"] is not None) == (one["peak_memory_bytes"] is not None)
        assert one["legal"] or one["reason"]
        if one["legal"]:
            assert one["iteration_over_even"] >= values["iteration_over_even"] * (1 - 1e-9)
    assert found["uniform"]["layout"] == "Etttt|tttt|tttt|ttttL" and found["uniform"]["legal"]
    assert "17" not in found["E (account for embedding)"]["reason"]
    assert found["E (account for embedding)"]["reason"] == "16 layers + embedding are no multiple of 4 stages"
    assert found[compared[0]]["legal"]
    assert "2 stages, this job 4" in found[compared[1]]["reason"]
    assert "1 m, the model 0" in found[compared[2]]["reason"]
    counts = next(one for one in found.values() if one["name"].startswith(("first", "last")))
    assert counts["legal"] and sum(parse_layout(counts["layout"]).layers) == 16


def test_own_flags_are_shown_and_never_beaten_by_them(capsys) -> None:
    own = "--pipeline-model-parallel-layout 'Ettttt|ttttt|tttt|ttL'"
    values = planned(capsys, f"--num-microbatches 8 {PP4} {own}")
    yours = next(one for one in values["alternatives"] if one["name"] == "your flags")
    assert yours["layout"] == "Ettttt|ttttt|tttt|ttL"
    assert values["iteration_over_even"] <= yours["iteration_over_even"] * (1 + 1e-9)
    counts = "--decoder-first-pipeline-num-layers 5 --decoder-last-pipeline-num-layers 1"
    values = planned(capsys, f"--num-microbatches 8 {PP4} {counts}")
    yours = next(one for one in values["alternatives"] if one["name"] == "your flags")
    assert yours["layout"] == "Ettttt|ttttt|ttttt|tL"


def test_layout_that_does_not_parse_is_an_error(capsys) -> None:
    status, out, err = run(capsys, f"--compare Ettx --num-microbatches 8 {PP4}")
    assert status == 2 and out == "" and "'x'" in err


# --- sensitivity and weights


def test_sensitivity_is_of_both_layouts_with_another_head(capsys) -> None:
    values = planned(capsys, f"--num-microbatches 8 {PP4}")
    assert [one["head_scale"] for one in values["sensitivity"]] == [0.5, 0.8, 1.2, 2.0]
    job = read_job(shlex.split(PP4), num_microbatches=8)
    table = analytic_table(job.model, job.topology, device_chosen("generic"))
    costs = table.chain(job.model, job.topology)
    forward, backward = costs.in_layers(costs.head)
    best = min((one for one in values["alternatives"] if one["legal"]), key=lambda one: one["iteration_over_even"])
    for one in values["sensitivity"]:
        weight = f"{forward * one['head_scale']!r},{backward * one['head_scale']!r}"
        flags = f"--balanced-pipeline-head-weight {weight} --compare {values['layout']} --compare {best['layout']}"
        again = {
            found["name"]: found["iteration_over_even"]
            for found in planned(capsys, f"{flags} --num-microbatches 8 {PP4}")["alternatives"]
        }
        assert one["iteration_over_even"] == pytest.approx(again[values["layout"]])
        assert one["gain"] == pytest.approx(again[best["layout"]] / again[values["layout"]] - 1)


def test_heavy_head_says_that_no_split_helps(capsys) -> None:
    status, out, _ = run(capsys, f"--num-microbatches 8 --balanced-pipeline-head-weight 30 {PP4}")
    assert status == 0
    assert "no split helps against a head of" in out and "Use 1 stage (" in out
    assert "limited by  the head" in out


# --- memory


def test_memory_limit_is_kept_and_what_more_would_buy_is_said(capsys) -> None:
    flags = f"--num-microbatches 16 --balanced-pipeline-head-weight 3 {PP4}"
    free = planned(capsys, flags)
    peak = max(stage["peak_memory_bytes"] for stage in free["stages"])
    for share in (0.97, 0.94, 0.91, 0.88, 0.85, 0.82, 0.79, 0.76):  # until the limit costs time
        limit_gb = share * peak / 1e9
        text = f"--balanced-pipeline-memory-gb {limit_gb} {flags}"
        held = planned(capsys, text)
        if held["iteration_s"] > 1.002 * free["iteration_s"]:
            break
    assert held["limited_by"].startswith("memory: without its limit")
    assert max(stage["peak_memory_bytes"] for stage in held["stages"]) <= limit_gb * 1e9
    assert held["iteration_s"] >= free["iteration_s"] * (1 - 1e-3)
    assert held["layout"] != free["layout"]
    _, out, _ = run(capsys, text)
    assert f"at most {limit_gb:.2f} GB a rank" in out and "no limit" in out and "(+10 %)" in out


def test_memory_like_uniform_is_its_worst_rank(capsys) -> None:
    values = planned(capsys, f"--num-microbatches 16 --balanced-pipeline-memory-like uniform {PP4}")
    uniform = next(one for one in values["alternatives"] if one["name"] == "uniform")
    assert max(stage["peak_memory_bytes"] for stage in values["stages"]) <= uniform["peak_memory_bytes"] * (1 + 1e-9)
    layout = "Ettttttt|ttttttt|t|tL"
    values = planned(
        capsys, f"--num-microbatches 16 --balanced-pipeline-memory-like '{layout}' --compare '{layout}' {PP4}"
    )
    known = next(one for one in values["alternatives"] if one["name"] == layout)
    assert known["legal"] and known["reason"] is None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--balanced-pipeline-memory-gb 1e-3", "rank"),
        ("--balanced-pipeline-memory-gb 0", "memory-gb 0"),
        ("--balanced-pipeline-memory-gb nan", "memory-gb nan"),
        ("--balanced-pipeline-memory-gb 5 --balanced-pipeline-memory-like uniform", "leave one out"),
        ("--balanced-pipeline-memory-like Et", "layout 'Et'"),
        ("--balanced-pipeline-memory-like Ettt|tttL", "2 stages, this job 4"),
    ],
)
def test_memory_flags_that_cannot_be(capsys, flags: str, message: str) -> None:
    status, out, err = run(capsys, f"--num-microbatches 8 {flags} {PP4}")
    assert (status, out) == (2, "") and message in err


# --- bad input


def test_files_of_others_are_never_overwritten(capsys, tmp_path) -> None:
    config, same = tmp_path / "config.json", tmp_path / "plan.json"
    config.write_text('{"model_type": "llama"}')
    for flags, message in (
        (f"--json {config}", "was not written by this flag: name another file"),
        (f"--timeline {config}", "was not written by this flag: name another file"),
        (f"--json {tmp_path / 'nowhere' / 'plan.json'}", "there is no folder"),
        (f"--json {same} --timeline {same}", "they are two files"),
    ):
        status, out, err = run(capsys, f"--num-microbatches 8 {PP4} {flags}")
        assert (status, out) == (2, "") and message in err
    assert config.read_text() == '{"model_type": "llama"}' and not same.exists()
    flags = f"--num-microbatches 8 {PP4} --json {same} --timeline {tmp_path / 'step.json'}"
    assert [run(capsys, flags)[0] for _ in range(2)] == [0, 0]  # their own files are written anew


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (MODEL.replace("--num-layers 16", ""), "num_layers"),
        (MODEL.replace("--num-layers 16", "--num-layers 0"), "num_layers"),
        (MODEL.replace("--hidden-size 1024", ""), "hidden_size"),
        (MODEL.replace("--vocab-size 128000", ""), "--vocab-size"),
        (MODEL.replace("heads 8", "heads 7"), "num_attention_heads"),
        (f"{MODEL} --num-experts 8 --moe-router-topk 9", "moe_router_topk (9) is more than num_experts (8)"),
        (f"{MODEL} --num-experts 8 --expert-model-parallel-size 3", "num_experts (8) is not divisible by"),
        (f"{MODEL} --group-query-attention --num-query-groups 3", "num_query_groups"),
        (f"{MODEL} --pipeline-model-parallel-size 20", "18 elements; 20 stages"),
        (f"{PP4} --num-virtual-stages-per-pipeline-rank 5", "18 elements; 20 stages"),
        (f"{PP4} --num-virtual-stages-per-pipeline-rank 2 --num-microbatches 2", "at least as many micro-batches"),
        (f"{PP4} --num-microbatches 0", "num_microbatches"),
        (f"{PP4} --global-batch-size 9 --world-size 8", "--global-batch-size 9"),
        (f"{PP4} --world-size 6", "--world-size 6"),
        (f"{PP4} --balanced-pipeline-device H300", "device H300"),
        (f"{PP4} --balanced-pipeline-costs profile", "profile --output"),
        (f"{PP4} --balanced-pipeline-costs absent.json", "absent.json cannot be read"),
        (f"{PP4} --balanced-pipeline-head-weight heavy", "head-weight heavy"),
        (f"{PP4} --timeline step.pdf", "--timeline step.pdf"),
        (f"{PP4} --hf-config absent.json", "absent.json"),
    ],
)
def test_bad_input_is_one_clear_line(capsys, flags: str, message: str) -> None:
    given = "" if "--num-microbatches" in flags or "--world-size" in flags else "--num-microbatches 8"
    status, out, err = run(capsys, f"{given} {flags}")
    assert (status, out) == (2, "")
    lines = [line for line in err.splitlines() if not line.startswith("megatron-balance: without effect")]
    assert len(lines) == 1 and lines[0].startswith("megatron-balance: error: ") and message in lines[0]


# --- what is pasted


def test_megatron_line_is_the_last_of_the_text(capsys) -> None:
    values = planned(capsys, f"--num-microbatches 8 {PP4}")
    _, out, _ = run(capsys, f"--num-microbatches 8 {PP4}")
    assert out.splitlines()[-1] == f"--pipeline-model-parallel-layout '{values['layout']}'"


def test_bridge_lines_are_python(capsys) -> None:
    values = planned(capsys, f"--num-microbatches 8 {PP4}")
    _, out, _ = run(capsys, f"--format bridge --num-microbatches 8 {PP4}")
    line = f"cfg.model.pipeline_model_parallel_layout = {values['layout']!r}"
    assert line in out.splitlines()
    ast.parse(bridge_line(values["layout"], 1))
    assert "virtual_pipeline_model_parallel_size = 3" in bridge_line("Et|tL", 3)


@pytest.mark.parametrize("layers", [(4, 4, 4, 4), (0, 8, 8, 0), (5, 5, 4, 2)])
def test_deepspeed_parts_cover_the_specs(layers: tuple[int, ...]) -> None:
    parts = deepspeed_parts(layers)
    assert parts[0] == 0 and parts[-1] == 16 + 2 and len(parts) == 5
    assert all(start < stop for start, stop in itertools.pairwise(parts))
    held = [stop - start for start, stop in itertools.pairwise(parts)]
    assert held == [layers[0] + 1, *layers[1:-1], layers[-1] + 1]
    source = deepspeed_class(parts)
    compile(source, "balanced.py", "exec")
    assigned = [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Assign)]
    assert ast.literal_eval(assigned[0]) == list(parts)


def test_deepspeed_prints_the_plan_or_why_not(capsys) -> None:
    values = planned(capsys, f"--num-microbatches 8 {PP4}")
    _, out, _ = run(capsys, f"--format deepspeed --num-microbatches 8 {PP4}")
    assert f"PARTS = {list(deepspeed_parts(parse_layout(values['layout']).layers))}" in out
    assert "16 layers, head (final norm, output layer, loss): 18" in out
    status, _, err = run(
        capsys, f"--format deepspeed --num-microbatches 8 {PP4} --num-virtual-stages-per-pipeline-rank 2"
    )
    assert status == 2 and "one stage a rank" in err


def test_layers_are_those_of_the_layout_or_why_not(capsys) -> None:
    values = planned(capsys, f"--num-microbatches 8 {PP4} --num-virtual-stages-per-pipeline-rank 2")
    _, out, _ = run(capsys, f"--format layers --num-microbatches 8 {PP4} --num-virtual-stages-per-pipeline-rank 2")
    counts = " ".join(str(stage.count("t")) for stage in values["layout"].split("|"))
    assert out.splitlines()[-1] == f"--num-virtual-stages-per-pipeline-rank 2 --pipeline-layers {counts}"
    assert layers_flags([4, 2], 1, 1, 1) == "--pipeline-layers 4 2"
    for layers, stage in (([4, 2, 1], 1), ([4, 2, 0], 2)):
        with pytest.raises(BalanceError, match="last stage"):
            layers_flags(layers, 1, 1, stage)


# --- timeline


def test_trace_has_every_operation_once_and_none_overlap(capsys, tmp_path) -> None:
    path = tmp_path / "step.json"
    flags = f"--timeline {path} --num-microbatches 8 {PP4} --num-virtual-stages-per-pipeline-rank 2"
    values = planned(capsys, flags)
    events = json.loads(path.read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert [name.split(":")[0] for name in names.values()] == ["uniform", "plan"]
    operations = [event for event in events if event["ph"] == "X" and names[event["pid"]].startswith("plan")]
    seen = {(event["cat"], event["args"]["stage"], event["args"]["microbatch"]) for event in operations}
    assert len(operations) == len(seen) == 2 * 8 * 8
    assert {event["tid"] for event in operations} == {1, 2, 3, 4}
    for rank in range(1, 5):
        own = sorted((event["ts"], event["dur"]) for event in operations if event["tid"] == rank)
        assert all(ts + dur <= after + 0.01 for (ts, dur), (after, _) in itertools.pairwise(own))
    end_s = max(event["ts"] + event["dur"] for event in operations) / 1e6
    assert end_s == pytest.approx(values["iteration_s"], rel=1e-6)


def test_picture_is_a_png(capsys, tmp_path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "step.png"
    planned(capsys, f"--timeline {path} --num-microbatches 8 {PP4}")
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_picture_without_matplotlib_says_what_to_install(capsys, monkeypatch, tmp_path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, out, err = run(capsys, f"--timeline {tmp_path / 'step.png'} --num-microbatches 8 {PP4}")
    assert (status, out) == (2, "") and "pip install 'megatron_balance[timeline]'" in err


# --- kinds of models


HYBRID = MODEL.replace("--num-layers 16", "--hybrid-layer-pattern M*-M*-M*-M*-M*-M-")


def test_hybrid_models_get_borders_in_their_pattern(capsys) -> None:
    values = planned(capsys, f"--num-microbatches 8 {HYBRID} --pipeline-model-parallel-size 4")
    assert values["layout"].replace("|", "") == "M*-M*-M*-M*-M*-M-" and values["layout"].count("|") == 3
    assert [len(stage) for stage in values["layout"].split("|")] == [stage["layers"] for stage in values["stages"]]
    _, out, _ = run(capsys, f"--num-microbatches 8 {HYBRID} --pipeline-model-parallel-size 4")
    assert out.splitlines()[-1] == f"--hybrid-layer-pattern '{values['layout']}'"


def test_prediction_may_stand_away_from_the_head_only_where_allowed(capsys) -> None:
    flags = f"--num-microbatches 8 --mtp-num-layers 1 {PP4} --balanced-pipeline-head-weight 6"
    for flag in ("--mtp-placement last", "--balanced-pipeline-mtp-placement last"):
        assert planned(capsys, f"{flag} {flags}")["layout"].endswith("mL")
    anywhere = planned(capsys, flags)
    assert not anywhere["layout"].endswith("mL") and parse_layout(anywhere["layout"]).mtp_stage < 3


# --- independence


def test_needs_neither_torch_nor_megatron_nor_compiled_code_to_refuse(tmp_path) -> None:
    code = (
        "import sys\n"
        "for name in ('torch', 'megatron', 'transformer_engine', 'matplotlib'): sys.modules[name] = None\n"
        "from megatron_balance.cli import main\n"
        f"status = main(['plan', '--num-microbatches', '8', '--num-layers', '0', *{shlex.split(MODEL)!r}[2:]])\n"
        "assert status == 2, status\n"
        "assert 'numba' not in sys.modules and 'scipy' not in sys.modules\n"
        f"sys.exit(main(['plan', '--json', '--num-microbatches', '8', *{shlex.split(PP4)!r}]))\n"
    )
    root = Path(__file__).parents[1]
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=root, timeout=300, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert set(json.loads(ended.stdout)) == KEYS


@pytest.mark.parametrize("flag", ["--json", "--compare Etttttttt||tttttttt|L"])
def test_full_disk_behind_standard_output_is_said_in_one_line(flag: str) -> None:
    command = [sys.executable, "-m", "megatron_balance.cli", "plan", *shlex.split(f"{flag} --num-microbatches 8 {PP4}")]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1].startswith(
        "megatron-balance: error: standard output cannot be written (No space"
    )


def test_many_layers_are_refused_and_not_waited_for(capsys) -> None:
    status, out, err = run(capsys, f"--num-microbatches 8 {PP4} --num-layers 30000")
    assert (status, out) == (2, "") and "at most 1000" in err


def test_flags_that_exclude_each_other_are_no_split_of_yours(capsys) -> None:
    own = "--pipeline-model-parallel-layout Etttt|tttt|tttt|ttttL --account-for-loss-in-pipeline-split"
    yours = planned(capsys, f"--num-microbatches 8 {PP4} {own}")["alternatives"][-1]
    assert yours["name"] == "your flags" and not yours["legal"] and "leave the others out" in yours["reason"]


def test_hybrid_model_has_no_counts_beside_virtual_stages_and_no_way_out_of_an_even_step(capsys) -> None:
    model = "--hidden-size 1024 --num-attention-heads 8 --seq-length 1024 --vocab-size 128000 --mamba-num-heads 16"
    pattern = "M-M-M-M*-|M-M-M-M-M*-M-|M-M-M-M*-M-M-|M-M-M*-M-M-M-M-M-"
    job = f"--pipeline-model-parallel-size 2 --hybrid-layer-pattern '{pattern}' --num-microbatches 8 {model}"
    status, out, err = run(capsys, job)
    assert status == 0, err
    assert "first/last counts: not legal, Megatron cuts a hybrid model into virtual stages only where" in out
    assert "over the best of Megatron's flags, uniform" in out
    assert "stays -" not in out


def test_our_flags_of_training_count_or_are_named(capsys) -> None:
    job = f"--num-microbatches 8 {PP4} --mtp-num-layers 1"
    assert planned(capsys, job)["layout"].endswith("|L")  # m before the last stage
    assert planned(capsys, f"{job} --balanced-pipeline-mtp-placement last")["layout"].endswith("mL")
    _, _, err = run(capsys, f"{job} --balanced-pipeline --balanced-pipeline-plan p.json")
    assert "without effect on a plan: --balanced-pipeline-plan" in err


def test_fewer_layers_than_the_config_has_are_its_first(tmp_path: Path) -> None:
    config = {
        "model_type": "gemma2", "vocab_size": 256000, "hidden_size": 3584, "num_hidden_layers": 42, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 256, "intermediate_size": 14336, "sliding_window": 4096,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    whole, part = (
        read_job(shlex.split(f"--seq-length 8192 {flags}"), str(tmp_path / "config.json"), 8).model.layers
        for flags in ("", "--num-layers 5")
    )
    assert part == whole[:5] and len(set(part)) == 2


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--num-microbatches 99999999999", "99999999999 micro-batches: at most 1048576 are planned"),
        ("--num-microbatches 8 --use-megatron-fsdp", "--use-megatron-fsdp with --pipeline-model-parallel-size 4"),
    ],
)
def test_what_no_job_can_have_is_refused(capsys, flags: str, told: str) -> None:
    status, out, err = run(capsys, f"{flags} {PP4}")
    assert (status, out) == (2, "") and told in err.splitlines()[-1]
