"""``python -m bench model``: the tables of `bench.io_model`."""

from __future__ import annotations

from itertools import product

from rich.console import Console
from rich.table import Table

from bench import io_model
from bench.io_model import MACHINES, Plane, Stage, forward_stages, total, training_stages

LEVELS = range(1, 6)
ELEMENT_BYTES = {"fp32": 4, "fp16, bf16": 2}
SIDES = (64, 256, 512)  # a tile; a plane whose low-pass band two levels down is one; larger ones
LARGE = 256

Forms = dict[str, dict[int, list[Stage]]]  # stages of each form by the number of levels


def print_model(console: Console, kernel_size: int = 5) -> None:
    """Print traffic by stage, its totals, and the roofline of each form on each machine."""
    forms: Forms = {
        "reference": {L: io_model.reference_stages(L) for L in LEVELS},
        "paper's fused form": {L: io_model.fused_stages(L) for L in LEVELS},
    }
    for side in SIDES:
        forms[_ours(side)] = {L: forward_stages(Plane(side, 4), L) for L in LEVELS}
    training = {
        f"{_ours(LARGE)}, {dtype}": {
            L: training_stages(Plane(LARGE, element_bytes), L) for L in LEVELS
        }
        for dtype, element_bytes in ELEMENT_BYTES.items()
    }
    console.print(_stages(forms, "forward, fp32"))
    console.print(_stages(training, "training"))
    console.print(_totals(forms, kernel_size, ELEMENT_BYTES["fp32"]))
    console.print(_ours_by_dtype())
    console.print(_roofline(forms, kernel_size, ELEMENT_BYTES["fp32"]))


def _ours(side: int) -> str:
    return f"csrc/cuda, {side}x{side}"


def _stages(forms: Forms, title: str) -> Table:
    deepest = max(LEVELS)
    table = Table(
        title=f"traffic by stage, {title}, units of N, L = {deepest}; level 0 is the full size"
    )
    table.add_column("form")
    table.add_column("stage")
    columns = range(deepest + 1)
    for level in columns:
        table.add_column(f"level {level}", justify="right")
    for form, by_levels in forms.items():
        stages = by_levels[deepest]
        for row, name in enumerate(dict.fromkeys(stage.name for stage in stages)):
            levels = [[s for s in stages if (s.name, s.level) == (name, i)] for i in columns]
            values = [f"{float(total(cell)):.3f}" if cell else "" for cell in levels]
            table.add_row(form if row == 0 else "", name, *values)
        table.add_section()
    return table


def _totals(forms: Forms, kernel_size: int, element_bytes: int) -> Table:
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


def _ours_by_dtype() -> Table:
    table = Table(title="csrc/cuda: traffic of a forward pass / a training step, units of N")
    table.add_column("plane")
    for levels in LEVELS:
        table.add_column(f"L = {levels}", justify="right")
    layouts = {"NCHW": False, "channels_last": True}
    for (dtype, element_bytes), (layout, channels_last) in product(
        ELEMENT_BYTES.items(), layouts.items()
    ):
        for side in SIDES:
            plane = Plane(side, element_bytes, channels_last)
            sums = [
                [float(total(of(plane, L))) for of in (forward_stages, training_stages)]
                for L in LEVELS
            ]
            name = f"{side}x{side} {layout}, {dtype}"
            table.add_row(name, *(f"{forward:.3f} / {step:.3f}" for forward, step in sums))
        table.add_section()
    return table


def _roofline(forms: Forms, kernel_size: int, element_bytes: int) -> Table:
    size = 8 * 64 * 256 * 256
    table = Table(
        title="roofline bound on fp32 arithmetic, ms for N of [8, 64, 256, 256], L = 1 / 3 / 5"
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
