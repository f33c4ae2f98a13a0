"""Host time: checked numbers, one row for each call, and a Function that adds nothing."""

from __future__ import annotations

import csv
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from bench import environment, host
from bench.__main__ import main
from bench.cuda_check import NumbersDifferError
from bench.cuda_run import DTYPES
from bench.environment import checkout_commit
from wtconv_ops import WTConv2d


def test_empty_function_takes_the_leaves_of_the_layer_and_gives_each_a_gradient() -> None:
    layer = WTConv2d(4, 4, 3, wt_levels=2)
    image, grad_output = torch.randn(2, 1, 4, 7, 7)
    gradients: Any = host.empty_call(layer, image, grad_output)()
    assert [g.shape for g in gradients] == [image.shape, *(p.shape for p in layer.parameters())]


def test_empty_operator_takes_the_arguments_of_the_layer_and_gives_an_output(ops: Any) -> None:
    layer = WTConv2d(4, 4, 3, wt_levels=2)
    image = torch.randn(2, 4, 7, 7)
    output: Any = host.empty_op_call(layer, image)()
    assert output.shape == image.shape
    assert not output.requires_grad


def test_command_times_every_call_and_writes_it(
    ops: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "host.csv"
    line = f"host --device cpu --levels 1 2 --rounds 2 --threads 1 --csv {path} --dtype"
    assert main([*line.split(), *DTYPES]) == 0
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    keys = {(row["dtype"], row["levels"], row["call"]) for row in rows}
    calls = (host.FORWARD, host.EMPTY_OP, host.TRAINING, host.EMPTY)
    assert keys == {(d, levels, c) for d in DTYPES for levels in "12" for c in calls}
    for row in rows:
        assert 0 < float(row["fastest_ms"]) <= float(row["median_ms"])
    printed = capsys.readouterr().out
    assert "1x32x7x7, k = 5" in printed
    assert all(dtype in printed for dtype in DTYPES)


def test_differences_are_those_of_the_medians(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        host.HostRow(
            device="cpu", machine="m", torch="2", threads=1, shape="s", kernel_size=5, levels=3,
            dtype="float32", call=call, median_ms=ms, fastest_ms=ms, rounds=1,
        )
        for call, ms in (
            (host.FORWARD, 0.5), (host.EMPTY_OP, 0.375), (host.TRAINING, 0.75), (host.EMPTY, 0.25),
        )
    ]  # fmt: skip
    host.print_host(rows, Console(width=160))
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "float32" in line)
    assert [cell.strip() for cell in line.split("│")[4:10]] == [
        "0.5000", "0.3750", "0.1250", "0.7500", "0.2500", "0.5000",
    ]  # fmt: skip


def test_wrong_numbers_are_not_timed(
    ops: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(*args: object) -> float:
        raise NumbersDifferError("wtconv_ops: output has relative error 1")

    monkeypatch.setattr(host, "check", wrong)
    assert main(["host", "--device", "cpu", "--rounds", "1"]) == 1
    assert capsys.readouterr().err == "bench: wtconv_ops: output has relative error 1\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["host", "--device", "cuda"]) == 2
    assert capsys.readouterr().err == (
        "bench: host --device cuda needs an NVIDIA GPU, torch sees none\n"
    )


def git(folder: Path, *arguments: str) -> str:
    names = ["-c", "user.name=n", "-c", "user.email=e@example.com"]
    done = subprocess.run(
        ["git", "-C", str(folder), *names, *arguments], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.mark.skipif(shutil.which("git") is None, reason="there is no git")
def test_commit_is_that_of_the_checkout_itself(tmp_path: Path) -> None:
    assert checkout_commit(tmp_path) is None
    git(tmp_path, "init", "-q")
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "file").write_text("a")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "one")
    commit = git(tmp_path, "rev-parse", "--short=7", "HEAD")
    assert checkout_commit(tmp_path) == commit
    assert checkout_commit(inner) is None
    (inner / "file").write_text("b")
    assert checkout_commit(tmp_path) == f"{commit}-dirty"


def test_output_of_a_command_that_fails_is_none() -> None:
    assert environment.output_of(["/nonexistent/program"]) is None
    assert environment.output_of(["false"]) is None
    assert environment.output_of(["echo", " a "]) == "a"
