"""The plan: what it says, that its file is read back exactly, and that a damaged one is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from megatron_balance.costs.chain import ChainCosts, ElementCost
from megatron_balance.errors import BalanceError
from megatron_balance.pipeline.layout import parse_layout
from megatron_balance.pipeline.plan import Plan, fingerprint, load_plan, make_plan, save_plan
from megatron_balance.pipeline.show import render_plan
from megatron_balance.topology import Topology

MODEL = {"hidden_size": 4096, "swiglu": True, "scale": 0.5, "name": "tiny", "window": None}


def chain(num_layers: int = 32, head: tuple[float, float] = (2.0, 1.8)) -> ChainCosts:
    layer, embedding = ElementCost(1e-3, 2e-3), ElementCost(0.0, 1e-4)
    costs = ChainCosts(embedding, (layer,) * num_layers, layer, "by hand")
    return replace(costs, head=costs.from_layers(*head))


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(chain(), Topology(4, 16, 2), MODEL, mtp_num_layers=1)


def test_plan_says_what_was_decided_and_why(plan: Plan) -> None:
    assert sum(plan.layers) == 32 and len(plan.stages) == 8
    assert [stage.first_layer for stage in plan.stages] == [sum(plan.layers[:place]) for place in range(8)]
    assert parse_layout(plan.layout).layers == plan.layers
    assert plan.layout.endswith("mL")
    assert plan.head_in_layers == pytest.approx((2.0, 1.8))
    assert plan.embedding_in_layers == pytest.approx((0.0, 0.05))
    total_s = chain().total.total_s
    assert plan.even_step_s == pytest.approx((16 + 3 / 2) * total_s / 4)
    assert plan.bound_s <= plan.step_s < plan.uniform_step_s
    assert plan.max_stage_over_mean == pytest.approx(max(s.total_s for s in plan.stages) * 8 / total_s)
    assert plan.bubble == pytest.approx(1 - 16 * total_s / (4 * plan.step_s))
    assert sum(plan.busy_share) == pytest.approx(4 * (1 - plan.bubble))
    assert plan.costs_source == "by hand"


def test_uniform_is_absent_where_megatron_refuses_it() -> None:
    plan = make_plan(chain(30), Topology(4, 16), {})
    assert plan.uniform_step_s is None
    assert "uniform     not legal: 30 layers on 4 stages" in render_plan(plan)


def test_one_rank_has_everything() -> None:
    plan = make_plan(chain(7), Topology(1, 4), {})
    assert plan.layers == (7,) and plan.layout == "EtttttttL"
    assert plan.step_s == pytest.approx(4 * chain(7).total.total_s)
    assert plan.bubble == pytest.approx(0.0, abs=1e-9)
    assert "one rank" in plan.limited_by


@pytest.mark.parametrize(
    ("costs", "topology", "reason"),
    [
        (chain(12, head=(9.0, 9.0)), Topology(4, 16), r"the head.*alone it takes 9.00 layers, an even stage 5"),
        (chain(32), Topology(8, 32), r"whole layers: an even stage would take 4.2\d layers, the largest takes 5"),
        (chain(30, head=(2.0, 2.0)), Topology(4, 32), r"the pipeline bubble alone, 8.\d %"),
    ],
)
def test_the_limit_is_named(costs: ChainCosts, topology: Topology, reason: str) -> None:
    assert re.match(reason, make_plan(costs, topology, {}).limited_by)


def test_more_stages_than_elements_is_refused() -> None:
    with pytest.raises(BalanceError, match="14 elements; 16 stages would leave 2 empty"):
        make_plan(chain(12), Topology(16, 16), {})


# --- the text


@pytest.mark.parametrize("topology", [Topology(8, 32), Topology(8, 32, 2), Topology(2, 4), Topology(16, 32)])
def test_text_is_short_and_plain(topology: Topology) -> None:
    text = render_plan(make_plan(chain(), topology, {}, p2p_s=1e-4, sharpens_bound=False))
    assert len(text.splitlines()) <= 25
    assert max(map(len, text.splitlines())) <= 100
    assert text.isascii() and "\x1b" not in text


def test_text_holds_the_figures(plan: Plan) -> None:
    text = render_plan(plan)
    assert "32 layers on 4 pipeline ranks, 2 virtual stages each, 16 micro-batches a step" in text
    assert "head        2.00 layers forward, 1.80 backward" in text
    assert f"the largest stage takes {plan.max_stage_over_mean:.2f} times the mean stage" in text
    assert f"this plan is {plan.uniform_step_s / plan.step_s:.3f} times faster" in text
    assert "transfer" not in text
    assert "transfer    345 us from stage to stage" in render_plan(replace(plan, p2p_s=345e-6))


# --- the file


def test_plan_survives_its_file(plan: Plan, tmp_path) -> None:
    save_plan(tmp_path / "plan.json", plan)
    assert load_plan(tmp_path / "plan.json") == plan
    assert Plan.from_json(plan.to_json()) == plan
    stored = json.loads(plan.to_json())
    assert stored["layout"] == plan.layout
    assert stored["fingerprint"] == plan.fingerprint == fingerprint(MODEL)


def test_fingerprint_is_of_the_values_not_their_order() -> None:
    assert fingerprint(MODEL) == fingerprint(dict(reversed(MODEL.items())))
    assert fingerprint(MODEL) != fingerprint({**MODEL, "hidden_size": 4097})


def test_plan_of_the_same_job_fits(plan: Plan) -> None:
    plan.check_fits(dict(MODEL), Topology(4, 16, 2))


def test_plan_of_another_job_names_what_differs(plan: Plan) -> None:
    other_model = {**{key: value for key, value in MODEL.items() if key != "window"}, "hidden_size": 64}
    with pytest.raises(BalanceError) as raised:
        plan.check_fits(other_model, Topology(4, 32, 2), "the plan file p.json")
    message = str(raised.value)
    assert message.startswith("the plan file p.json is of another model or topology: ")
    assert "hidden_size is 64, planned for 4096" in message
    assert "num_microbatches is 32, planned for 16" in message
    assert "tensor_size" not in message and "swiglu" not in message
    assert message.endswith("delete it to plan afresh, or pass another")


def test_keys_that_only_one_side_has_differ(plan: Plan) -> None:
    with pytest.raises(BalanceError, match="experts is 8, planned for None"):
        plan.check_fits({**MODEL, "experts": 8}, Topology(4, 16, 2))


def change(key: str, value: Any) -> Callable[[dict], None]:
    """An edit of a plan's JSON at a path like ``stages.0.layers``; ``...`` as value deletes the key."""

    def edit(values: dict) -> None:
        *path, last = (int(part) if part.isdigit() else part for part in key.split("."))
        for part in path:
            values = values[part]
        if value is ...:
            del values[last]
        else:
            values[last] = value

    return edit


@pytest.mark.parametrize(
    ("edit", "complaint"),
    [
        (change("format", "something else"), r"is not a plan: its format is 'something else'"),
        (change("format", ...), r"is not a plan"),
        (change("format_version", 4), r"has format_version 4, not 3"),
        (change("stages", ...), r"lacks stages"),
        (change("extra", 1), r"holds the unknown extra"),
        (change("stages.3.forward_s", "fast"), r"stages\[3\]\.forward_s is 'fast', not a number"),
        (change("stages.3.forward_s", -1.0), r"stages\[3\]\.forward_s is -1\.0"),
        (change("stages.3.layers", 3.5), r"stages\[3\]\.layers is 3\.5, not a whole number"),
        (change("stages.3.layers", True), r"stages\[3\]\.layers is True"),
        (change("stages.3.layers", 30), r"stages\[4\]\.first_layer"),
        (change("stages.3", None), r"stages\[3\] is None, not a mapping"),
        (change("stages", []), r"the seconds of all stages is 0"),
        (change("stages.7", ...), r"the number of stages is 7, not 8"),
        (change("stages.7.layers", 0), r"layout is 'E.*"),
        (change("topology.virtual_size", 0), r"topology is impossible .*virtual_size must be at least 1"),
        (change("topology.pipeline_size", "4"), r"topology\.pipeline_size is '4'"),
        (change("topology.pipeline_size", ...), r"lacks topology\.pipeline_size"),
        (change("head_in_layers", [1.0]), r"head_in_layers is \[1\.0\], not a pair"),
        (change("step_s", 0), r"step_s is 0\.0, not a number above 0"),
        (change("uniform_step_s", "none"), r"uniform_step_s is 'none'"),
        (change("fingerprinted.hidden_size", 64), r"fingerprint is '.*"),
        (change("fingerprinted.hidden_size", [1]), r"fingerprinted\.hidden_size is \[1\]"),
        (change("layout", "Et|tL"), r"layout is 'Et\|tL', not 'E"),
    ],
)
def test_damaged_file_names_itself_the_key_and_the_remedy(plan: Plan, tmp_path, edit, complaint: str) -> None:
    values = json.loads(plan.to_json())
    edit(values)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(values))
    with pytest.raises(BalanceError, match=complaint) as raised:
        load_plan(path)
    assert str(raised.value).startswith(f"the plan file {path} ")
    assert str(raised.value).endswith("delete it to plan afresh, or pass another")


@pytest.mark.parametrize(
    "text", ["", "{", "[1, 2]", "null", '{"format": NaN}', "\x00\x01", "[" * 100_000, "layers: 3\n", "\ufffd"]
)
def test_foreign_file_is_refused(tmp_path, text: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(BalanceError, match=rf"{path} is not .*delete it"):
        load_plan(path)


def test_every_truncation_is_refused(plan: Plan) -> None:
    text = plan.to_json().rstrip()
    for length in range(0, len(text), 97):
        with pytest.raises(BalanceError, match="is not whole JSON"):
            Plan.from_json(text[:length])


def test_binary_file_is_refused(tmp_path) -> None:
    (tmp_path / "plan.json").write_bytes(b"\x80\x81PK\xff")
    with pytest.raises(BalanceError, match="is not whole JSON"):
        load_plan(tmp_path / "plan.json")


def test_absent_file_and_folder_are_refused(plan: Plan, tmp_path) -> None:
    with pytest.raises(BalanceError, match=r"absent\.json cannot be read \(No such file"):
        load_plan(tmp_path / "absent.json")
    with pytest.raises(BalanceError, match=r"cannot be written \(No such file"):
        save_plan(tmp_path / "absent" / "plan.json", plan)
