"""``python -m bench model``: the tables of `bench.io_model`."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from bench import io_model
from bench.io_model import MACHINES, Stage, total

LEVELS = range(1, 6)


def print_model(console: Console, kernel_size: int = 5, element_bytes: int = 4) -> None:
    """Print traffic by stage, its totals, and the roofline of each form on each machine."""
    band_ratio = max(1, 4 // element_bytes)
    by_levels = {L: io_model.forms(L, band_ratio) for L in LEVELS}
    forms = {name: {L: by_levels[L][name] for L in LEVELS} for name in by_levels[LEVELS[0]]}
    console.print(_stages(forms))
    console.print(_totals(forms, kernel_size, element_bytes))
    console.print(_roofline(forms, kernel_size, element_bytes))


def _stages(forms: dict[str, dict[int, list[Stage]]]) -> Table:
    deepest = max(LEVELS)
    table = Table(title=f"traffic by stage, units of N, L = {deepest}; level 0 is the full size")
    table.add_column("form")
    table.add_column("stage")
    for level in range(deepest + 1):
        table.add_column(f"level {level}", justify="right")
    for form, by_levels in forms.items():
        stages = by_levels[deepest]
        for row, name in enumerate(dict.fromkeys(stage.name for stage in stages)):
            cells = {stage.level: stage.traffic for stage in stages if stage.name == name}
            values = [f"{float(cells[i]):.3f}" if i in cells else "" for i in range(deepest + 1)]
            table.add_row(form if row == 0 else "", name, *values)
        table.add_section()
    return table


def _totals(
    forms: dict[str, dict[int, list[Stage]]], kernel_size: int, element_bytes: int
) -> Table:
    table = Table(title=f"totals per forward pass, k = {kernel_size}, {element_bytes} bytes")
    table.add_column("quantity")
    for levels in LEVELS:
        table.add_column(f"L = {levels}", justify="right")
    for form, by_levels in forms.items():
        sums = {levels: total(stages) for levels, stages in by_levels.items()}
        table.add_row(f"{form}: traffic, N", *(f"{float(sums[L]):.2f}" for L in LEVELS))
        intensities = (io_model.intensity(kernel_size, L, sums[L], element_bytes) for L in LEVELS)
        table.add_row(f"{form}: FLOP/byte", *(f"{value:.2f}" for value in intensities))
    reference, fused = (list(forms.values())[i] for i in (0, 1))
    ratios = (float(total(reference[L]) / total(fused[L])) for L in LEVELS)
    table.add_section()
    table.add_row("reference / paper's fused form", *(f"{value:.2f}" for value in ratios))
    counts = (float(io_model.macs(kernel_size, L)) for L in LEVELS)
    table.add_row("multiply-adds, N", *(f"{value:.1f}" for value in counts))
    return table


def _roofline(
    forms: dict[str, dict[int, list[Stage]]], kernel_size: int, element_bytes: int
) -> Table:
    size = 8 * 64 * 256 * 256
    table = Table(
        title="roofline bound on fp32 arithmetic, ms for [8, 64, 256, 256], L = 1 / 3 / 5"
    )
    table.add_column("machine")
    table.add_column("ridge, FLOP/byte", justify="right")
    for form in forms:
        table.add_column(form, justify="right")
    for machine in MACHINES:
        cells = []
        for by_levels in forms.values():
            times = (
                machine.shortest_ms(
                    2.0 * float(io_model.macs(kernel_size, levels)) * size,
                    float(total(by_levels[levels])) * size * element_bytes,
                )
                for levels in (1, 3, 5)
            )
            cells.append(" / ".join(f"{time:.3f}" for time in times))
        table.add_row(machine.name, f"{machine.ridge:.1f}", *cells)
    return table
