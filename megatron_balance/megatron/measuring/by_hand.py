"""`megatron-balance profile`: measure a job's costs and write them to a file."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megatron_balance.costs.table import CostTable, ElementRow, LayerRow, save_costs
from megatron_balance.errors import BalanceError
from megatron_balance.megatron.measuring.launch import MeasurementFailed, measure


def profile(output: str, device: str, job: list[str]) -> None:
    """Measure, print a table, write the costs file.

    Args:
        output: name of the costs file.
        device: ``auto``, ``cpu`` or ``cuda``.
        job: the training script, or none for our own, and its command line.

    Raises:
        BalanceError: the measurement failed, or the file cannot be written.
    """
    file = Path(output).resolve()
    if not file.parent.is_dir() or (file.exists() and not file.is_file()):
        reason = f"no folder {file.parent}" if not file.parent.is_dir() else "it is not a regular file"
        raise BalanceError(f"the costs file {output} cannot be written ({reason}): name another place")
    with_script = bool(job) and not job[0].startswith("-")
    script, flags = (job[0], job[1:]) if with_script else (None, job)
    console = Console()
    try:
        with console.status("measuring"):
            table = measure(script, flags, device)
    except MeasurementFailed as failure:
        raise BalanceError(f"the costs could not be measured: {failure}") from failure
    save_costs(output, table)
    console.print(_shown(table))
    console.print(f"written to {output}", highlight=False, markup=False, soft_wrap=True)


def _shown(costs: CostTable) -> Table:
    unit = next(iter(costs.layers.values()))
    table = Table(title=escape(f"One micro-batch on one rank, {costs.source}"), title_justify="left")
    for column in ("", "forward", "backward", "in layers", "spread", "parameters"):
        table.add_column(column, justify="right" if column else "left")
    layers = ((f"{kind} layer", layer) for kind, layer in costs.layers.items())
    for name, element in (("embedding", costs.embedding), *layers, ("head", costs.head)):
        table.add_row(name, *_row(element, unit))
    if costs.update_s_per_parameter is not None:
        table.caption = (
            f"gradient norm and optimizer: {costs.update_s_per_parameter * 1e9:.3g} ns a parameter, once a step"
        )
    return table


def _row(element: ElementRow, unit: LayerRow) -> tuple[str, ...]:
    spreads = [spread for spread in (element.forward_spread, element.backward_spread) if spread is not None]
    return (
        f"{element.forward_s * 1e3:.4g} ms",
        f"{element.backward_s * 1e3:.4g} ms",
        f"{element.forward_s / unit.forward_s:.2f}, {element.backward_s / unit.backward_s:.2f}",
        f"{max(spreads):.0%}" if spreads else "",
        f"{element.parameters:,}",
    )
