"""The times of ``python -m bench compile`` as bars, one panel for each model and mode."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.compiled import CompileRow


def draw(rows: Sequence[CompileRow], machine: str, path: Path) -> None:
    """Write the figure of ``rows``, at least one; needs matplotlib.

    Args:
        rows: Every variant in every mode, precision and layout.
        machine: Stands below the panels.
        path: Image file; its suffix is the format.
    """
    from matplotlib.figure import Figure

    panels = list(dict.fromkeys((r.subject, r.mode) for r in rows))
    variants = list(dict.fromkeys(r.variant for r in rows))
    cases = list(dict.fromkeys((r.precision, r.layout) for r in rows))
    figure = Figure(figsize=(4.5 * len(panels), 4.5), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    width = 0.8 / len(variants)
    for axis, (subject, mode) in zip(axes, panels, strict=True):
        for index, variant in enumerate(variants):
            times = {
                (r.precision, r.layout): r.ms
                for r in rows
                if (r.subject, r.mode, r.variant) == (subject, mode, variant)
            }
            places = [place + index * width for place in range(len(cases))]
            axis.bar(places, [times.get(case, 0.0) for case in cases], width, label=variant)
        centre = width * (len(variants) - 1) / 2
        axis.set_xticks(
            [place + centre for place in range(len(cases))], ["\n".join(c) for c in cases]
        )
        axis.set_title(f"{subject}, {mode}")
        axis.set_ylabel("ms")
    axes[0].legend()
    figure.supxlabel(machine, fontsize="small")
    figure.savefig(path)
