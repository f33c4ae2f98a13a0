"""The doctor: reports everything, never raises, and gives the reason that can_run gives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from expecttest import assert_expected_inline
from readme import README

import wtconv_ops
from wtconv_ops import _library, doctor

ITEMS = [
    ("environment", "wtconv_ops"),
    ("environment", "python"),
    ("environment", "platform"),
    ("environment", "torch"),
    ("environment", "cpu"),
    ("library", "file"),
    ("library", "source"),
    ("library", "torch"),
    ("library", "cpu kernels"),
    ("library", "cuda kernels"),
    ("gpu", "driver"),
    ("gpu", "devices"),
    ("kernels", "k=5 L=3"),
]
PROBES = [
    *(
        "_package",
        "_python",
        "_torch",
        "_cpu",
        "_library_file",
        "_library_source",
        "_library_torch",
    ),
    *("_library_cpu", "_library_cuda", "_driver", "_devices", "_kernels"),
]
INFO = {
    "version": "0.1.0",
    "source_hash": "0123456789ab",
    "cuda": False,
    "cuda_archs": [],
    "cpu_isas": ["baseline", "avx2", "avx512"],
    "cpu_isa": "avx2",
    "max_kernel_size": 31,
    "max_levels": 32,
    "dtypes": ["float32", "float64", "float16", "bfloat16"],
    "torch_target": "2.11",
}


def use_library(monkeypatch: pytest.MonkeyPatch, **changes: object) -> None:
    """Makes the process see a library that was built as INFO and `changes` say."""
    library = _library.Library(Path("/site/wtconv_ops/libwtconv_ops.so"), {**INFO, **changes})
    monkeypatch.setattr(_library._STATE, "tried", True)
    monkeypatch.setattr(_library._STATE, "library", library)
    monkeypatch.setattr(_library._STATE, "problem", None)


def lines_of(section: str) -> str:
    return "\n".join(f"{row.item}: {row.value}" for row in doctor.rows() if row.section == section)


def test_report_lists_every_item_once_and_in_order() -> None:
    found = [(row.section, row.item) for row in doctor.rows()]
    assert list(dict.fromkeys(found)) == ITEMS
    assert "unknown" not in doctor.report()


def test_report_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    use_library(monkeypatch)
    tree = SimpleNamespace(source_hash=lambda root: "ba9876543210")
    monkeypatch.setattr(doctor, "_build_config", lambda: tree)
    assert_expected_inline(
        lines_of("library"),
        """\
file: /site/wtconv_ops/libwtconv_ops.so
source: version 0.1.0, source 0123456789ab, but the source tree has ba9876543210: run python csrc/build_hook.py
torch: any torch >= 2.11 (stable ABI)
cpu kernels: avx2 (built: baseline avx2 avx512), float32 float64 float16 bfloat16
cuda kernels: none: built without CUDA; WTCONV_CUDA=1 builds them""",  # noqa: E501
    )


def test_unknown_instruction_set_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    use_library(monkeypatch)
    said = "WTCONV_CPU_ISA must be one of baseline, avx2, avx512, got 'sse', which is ignored"
    for value, named in (("sse", True), ("baseline", False), ("avx512", False), ("", False)):
        monkeypatch.setenv("WTCONV_CPU_ISA", value)
        assert (f"bfloat16; {said}" in lines_of("library")) == named


@pytest.mark.parametrize("archs", [["9.0"], []], ids=str)
def test_readme_quotes_the_row_of_the_cuda_kernels(
    monkeypatch: pytest.MonkeyPatch, archs: list[str]
) -> None:
    use_library(monkeypatch, cuda=bool(archs), cuda_archs=archs)
    (value,) = (row.value for row in doctor.rows() if row.item == "cuda kernels")
    section = README.read_text().partition("## Install and run")[2].partition("\n## ")[0]
    assert "the row `cuda kernels` of `.venv/bin/python -m wtconv_ops doctor`" in section
    assert f"`{value.partition(';')[0]}`" in section


def test_library_of_this_source_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    use_library(monkeypatch)
    tree = SimpleNamespace(source_hash=lambda root: INFO["source_hash"])
    monkeypatch.setattr(doctor, "_build_config", lambda: tree)
    assert "source 0123456789ab, same as the source tree" in lines_of("library")


def test_report_of_the_kernels_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    use_library(monkeypatch)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    kernels = lines_of("kernels")
    assert_expected_inline(
        kernels,
        """\
k=5 L=3: cpu float32 float64 float16 bfloat16: kernel
k=5 L=3: cuda float32 float64 float16 bfloat16: plain PyTorch (the operator library was built without CUDA; rebuild it with WTCONV_CUDA=1 or move the tensors to the CPU)""",  # noqa: E501
    )


def test_report_of_a_missing_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_library._STATE, "tried", True)
    monkeypatch.setattr(_library._STATE, "library", None)
    monkeypatch.setattr(_library._STATE, "problem", "the operator library is not installed")
    assert_expected_inline(
        lines_of("library"),
        """\
file: none: the operator library is not installed
source: none
torch: none
cpu kernels: none
cuda kernels: none""",
    )
    assert "plain PyTorch (the operator library is not installed)" in lines_of("kernels")


def test_each_reason_is_the_one_of_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    use_library(monkeypatch, dtypes=["float32"])
    with pytest.raises(TypeError) as caught:
        wtconv_ops.can_run("cpu", torch.float64, 5, 3, raise_error=True)
    reason = str(caught.value).removeprefix("wtconv_ops: ")
    assert f"cpu float64: plain PyTorch ({reason})" in lines_of("kernels")
    assert "cpu float32: kernel" in lines_of("kernels")


@pytest.mark.parametrize(
    ("version", "line"),
    [
        (None, "driver: no NVIDIA driver"),
        ("580.65.06", "driver: 580.65.06"),
        ("570.124.06", "driver: 570.124.06: CUDA 13 builds need 580 or newer"),
    ],
)
def test_report_names_an_old_driver(
    monkeypatch: pytest.MonkeyPatch, version: str | None, line: str
) -> None:
    monkeypatch.setattr(doctor, "_driver_version", lambda: version)
    assert lines_of("gpu").splitlines()[0] == line


def test_report_names_rocm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert "ROCm 7.0: only NVIDIA GPUs have kernels" in lines_of("environment")


@pytest.mark.parametrize("probe", PROBES)
def test_a_failing_probe_takes_its_own_line_only(
    monkeypatch: pytest.MonkeyPatch, probe: str
) -> None:
    def fail() -> str:
        raise OSError("no such thing\nand more")

    monkeypatch.setattr(doctor, probe, fail)
    values = [row.value for row in doctor.rows()]
    assert values.count("unknown (OSError: no such thing)") == 1
    assert len(values) >= len(ITEMS)


def test_command_prints_the_report_and_returns_zero() -> None:
    command = [sys.executable, "-m", "wtconv_ops", "doctor"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines() if line[0] != " "] == [
        *("environment", "library", "gpu", "kernels")
    ]


def test_a_person_at_a_terminal_sees_a_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("rich")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert doctor.main() == 0
    assert "wtconv_ops doctor" in capsys.readouterr().out
