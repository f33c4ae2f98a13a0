"""The README's commands have the form its readers expect, and its Python blocks run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from PIL import Image
from readme import README, ROOT, blocks

PYTHON_BLOCKS = blocks("python")


def test_python_blocks_are_found() -> None:
    assert len(PYTHON_BLOCKS) == README.read_text().count("```python")
    assert len(PYTHON_BLOCKS) >= 5


@pytest.mark.parametrize(
    ("heading", "source"),
    PYTHON_BLOCKS,
    ids=[f"{i}-{heading}" for i, (heading, _) in enumerate(PYTHON_BLOCKS)],
)
def test_python_block_runs_in_a_namespace_of_its_own(
    heading: str, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "onnxruntime" in source:
        for module in ("onnxruntime", "onnxscript"):
            pytest.importorskip(module, reason=f"{module} is not installed")
    monkeypatch.chdir(tmp_path)
    exec(compile(source, f"README.md, {heading}", "exec"), {"__name__": "readme"})


@pytest.mark.parametrize(
    ("heading", "needed"),
    [
        ("Install and run", ["python3 -m venv .venv", "torch==2.13.0", "-m wtconv_ops demo"]),
        ("Test", ["-m pytest tests"]),
    ],
)
def test_each_command_is_one_line_under_its_heading(heading: str, needed: list[str]) -> None:
    commands = [text for above, text in blocks("sh") if above == heading]
    assert len(commands) == 1
    assert "\n" not in commands[0]
    for part in needed:
        assert part in commands[0]


def test_picture_is_there_and_small() -> None:
    (name,) = re.findall(r"!\[[^\]]*\]\(([^)]+\.png)\)", README.read_text())
    picture = ROOT / name
    assert picture.stat().st_size <= 400_000
    with Image.open(picture) as image:
        assert image.width >= 800


def test_links_to_files_resolve() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README.read_text()):
        if not target.startswith("http"):
            assert (ROOT / target).is_file(), target
