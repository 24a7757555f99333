"""A report as plain text, for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_balance.figures import percent, signed_percent
from megatron_balance.pack_command.report import CHOPPED, OURS, UNDIVIDED, Bar, Outcome, Report
from megatron_balance.packing.cost import FIXED
from megatron_balance.packing.pieces import DROP, SPLIT, TRUNCATE
from megatron_balance.packing.splits import ALL
from megatron_balance.pipeline.show import aligned, labelled

_BAR_WIDTH = 24
_LONG = {SPLIT: "split into bins and a rest", TRUNCATE: "truncated to a bin", DROP: "left out"}


def render_report(report: Report, width: int = 100) -> str:
    """The data, the job, their batches, the comparison and what follows from it; ``width`` in columns."""
    sections = [
        [_title(report), *(labelled(*line, width) for line in _facts(report))],
        list(_lengths(report)),
        list(_comparison(report, width)),
        [labelled(*line, width) for line in _verdict(report)],
    ]
    return "\n\n".join("\n".join(section) for section in sections)


def _title(report: Report) -> str:
    totals = [one.totals for one in report.data_sets]
    documents, tokens = sum(one.documents for one in totals), sum(one.tokens for one in totals)
    bins = report.request.grid.num_bins
    return (
        f"Packing: {documents:,} document{'s' * (documents != 1)} of {short(tokens)} tokens, {bins:,} bin{'s' * (bins > 1)}"
        f" of {report.request.rule.seq_length:,} tokens a step"
    )


# --- what there is


def _facts(report: Report) -> Iterator[tuple[str, str]]:
    request, rule = report.request, report.request.rule
    yield "job", _job(report)
    yield "shapes", "padded to --seq-length" if request.bin_cost.shapes == FIXED else "of true length"
    if rule.alignment > 1:
        yield "alignment", f"each document takes a multiple of {rule.alignment} tokens (context parallelism)"
    yield "costs", _costs(report)
    if request.assumed:
        yield "assumed", "; ".join(request.assumed)
    if request.part != ALL:
        yield "split", f"the first {percent(request.part[1])} of each data set's documents, those of training"
    yield from _documents(report)
    fill = f"{percent(report.fill, 2)} of the bins' tokens in the mean of {report.batches_cut:,} steps"
    yield "fill", f"{fill}, {percent(report.least_fill, 2)} in the emptiest"
    yield "step", f"{short(report.tokens_per_batch)} tokens of {report.documents_per_batch:,.0f} documents"
    if len(report.data_sets) == 1:
        yield "epoch", f"{report.data_sets[0].batches_per_epoch:,.1f} steps"
    for one in report.data_sets if len(report.data_sets) > 1 else ():
        yield "blend", f"{percent(one.weight)} {one.name}: {one.batches_per_epoch:,.1f} steps an epoch"


def _job(report: Report) -> str:
    grid, sizes = report.request.grid, report.request.grid.topology
    parts = [
        f"data-parallel size {sizes.data_size}",
        f"{sizes.pipeline_size} pipeline rank{'s' * (sizes.pipeline_size > 1)}",
        f"{sizes.num_microbatches} micro-batch{'es' * (sizes.num_microbatches > 1)} of {sizes.micro_batch_size} a step",
    ]
    if sizes.virtual_size > 1:
        parts.insert(2, f"{sizes.virtual_size} virtual stages each")
    if grid.lockstep_size > 1:
        parts.append(f"{grid.lockstep_size} data-parallel ranks in step, as they share experts")
    return ", ".join(parts)


def _costs(report: Report) -> str:
    request, cost = report.request, report.request.bin_cost.sequence
    if not request.in_seconds:
        return request.cost_source
    own, whole = request.rule.seq_length, request.bin_cost
    attention_s = float(cost.attention_s([own]).sum())
    share = attention_s / (attention_s + float(whole.sequence.linear_s([own]).sum()))
    return f"{request.cost_source}: of a document of {own:,} tokens attention is {percent(share)}"


def _documents(report: Report) -> Iterator[tuple[str, str]]:
    totals, rule = [one.totals for one in report.data_sets], report.request.rule
    documents, tokens = sum(one.documents for one in totals), sum(one.tokens for one in totals)
    longest, empty = max(one.longest_tokens for one in totals), sum(one.without_labels for one in totals)
    mean = f"{tokens / documents:,.0f} tokens in the mean, at most {longest:,}"
    yield "documents", mean + (f"; {empty:,} of fewer than 2 tokens have no label" if empty else "")
    if long := sum(one.longer_than_bin for one in totals):
        lost = sum(one.labels - one.kept_labels for one in totals)
        share = f", with them {percent(lost / sum(one.labels for one in totals))} of all tokens" if lost else ""
        fate = _LONG[rule.long_documents]
        yield "long ones", f"{long:,} ({percent(long / documents)}) have more than a bin holds: {fate}{share}"


def _lengths(report: Report) -> Iterator[str]:
    bars = report.histogram
    documents, tokens = sum(bar.documents for bar in bars), max(1, sum(bar.tokens for bar in bars))
    most = max(max(bar.documents / documents, bar.tokens / tokens) for bar in bars)
    yield "Lengths"
    lines = [("tokens", "documents", "", "tokens in them", "")]
    for bar in bars:
        shares = bar.documents / documents, bar.tokens / tokens
        drawn = [_bar(share / most) for share in shares]
        lines.append((_range(bar), percent(shares[0]), drawn[0], percent(shares[1]), drawn[1]))
    yield from aligned(lines, left=(2, 4))


def _range(bar: Bar) -> str:
    return f"{bar.first:,}-{bar.last:,}"


def _bar(share: float) -> str:
    """A bar of eighths of a column."""
    eighths = round(8 * _BAR_WIDTH * share) or int(share > 0)
    return "\u2588" * (eighths // 8) + ("", *"\u258f\u258e\u258d\u258c\u258b\u258a\u2589")[eighths % 8]


# --- what it gives


def _comparison(report: Report, width: int) -> Iterator[str]:
    steps, seconds = report.ours.steps, report.request.in_seconds
    yield f"A step, simulated ({steps} step{'s' * (steps != 1)} each, the same stream of documents)"
    heading = (
        "batches",
        "fill",
        "cut",
        "DP",
        "micro-batch",
        "over ideal",
        "tokens/s" if seconds else "time",
        "this plan",
    )
    lines = [heading, *(_row(report, outcome) for outcome in report.outcomes)]
    lines.append(("no placement is below", "", "", "", "", f"{report.bound_over_ideal:.3f}", "", ""))
    yield from aligned(lines, left=(0,))
    yield labelled(
        "columns",
        "cut: documents in more than one bin; DP, micro-batch: the costliest over the mean one; over ideal: the step over one in"
        " which no rank waits, for the same bins; "
        + ("tokens/s: labels a second, all ranks" if seconds else "time: of a token, this plan = 1")
        + "; this plan: how many more tokens it learns from in a second",
        width,
    )


def _row(report: Report, outcome: Outcome) -> tuple[str, ...]:
    time = outcome.s_per_token / report.ours.s_per_token
    return (
        outcome.name,
        percent(outcome.fill),
        percent(outcome.cut_documents),
        f"{outcome.data_parallel_max_over_mean:.3f}",
        f"{outcome.micro_batch_max_over_mean:.2f}",
        f"{outcome.step_over_ideal:.3f}",
        short(1 / outcome.s_per_token) if report.request.in_seconds else f"{time:.3f}",
        "" if outcome.key == OURS else signed_percent(report.gain_over(outcome.key)),
    )


def _verdict(report: Report) -> Iterator[tuple[str, str]]:
    chopped, ours = report.outcome(CHOPPED), report.ours
    over = {key: signed_percent(report.gain_over(key)) for key in (UNDIVIDED, CHOPPED)}
    beside = f"{over[CHOPPED]} over the same with attention by document"
    if report.worth_it:
        text = f"packing is worth it: {over[UNDIVIDED]} tokens a second over stock's chopped documents, {beside}"
    else:
        text = f"packing is not worth it for speed: {over[UNDIVIDED]} tokens a second over stock's chopped documents, {beside}"
    yield "verdict", text
    yield "why", _why(report)
    if chopped.s_per_token < ours.s_per_token:
        yield "chopping", "pads nothing, and saves the looks from one part of a cut document to the other"
    if chopped.cut_documents > ours.cut_documents:
        stock, whole = percent(chopped.cut_documents), percent(ours.cut_documents)
        yield "cut", f"stock cuts {stock} of the documents, this plan {whole}"
    yield "limited by", report.limit
    saved = percent(report.above_bound)
    yield "bound", f"no placement of the same documents in the same bins saves more than {saved} of the step"
    if report.fallbacks:
        yield "fallback", f"{report.fallbacks} of {ours.steps} steps keep first-fit-decreasing's bins in a good order"


def _why(report: Report) -> str:
    stock, ours = report.outcome(UNDIVIDED), report.ours
    saved = 1 - ours.work_s_per_token / stock.work_s_per_token
    if saved >= 0:
        work = f"it saves {percent(saved)} of stock's work, as tokens attend to their own document alone"
    else:
        work = f"it adds {percent(-saved)} to stock's work, which is padding"
    waits = [percent(1 - 1 / one.step_over_ideal) for one in (ours, stock)]
    return f"{work}; its ranks wait {waits[0]} of the step, stock's {waits[1]}"


def short(number: float) -> str:
    """A large number in a few characters."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.4g} {unit}"
    return f"{number:.4g}"
