"""Traffic as Nsight Compute prints it: read exactly, in units of N, beside the I/O model."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from rich.console import Console

from bench import io_model, ncu, traffic
from bench.__main__ import main
from bench.csv_file import csv_sink
from bench.ncu import KernelTraffic, NcuError
from bench.shapes import Size
from bench.traffic import TrafficSettings
from bench.traffic_target import DIRECTIONS, Case, build_call

COLUMNS = (
    "ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream",
    "Block Size", "Grid Size", "Device", "CC", "Section Name", "Metric Name", "Metric Unit",
    "Metric Value",
)  # fmt: skip


def line(launch: int, kernel: str, metric: str, value: str, unit: str = "byte") -> str:
    cells = (
        str(launch), "4242", "python3.11", "127.0.0.1", kernel, "1", "7", "(128, 1, 1)",
        "(512, 1, 1)", "0", "9.0", "Command line profiler metrics", metric, unit, value,
    )  # fmt: skip
    return ",".join(f'"{cell}"' for cell in cells)


HEADER = ",".join(f'"{name}"' for name in COLUMNS)
SAMPLE = "\n".join(
    [
        "==PROF== Connected to process 4242 (/usr/bin/python3.11)",
        '==PROF== Profiling "lowpass_kernel" - 0: 0%....50%....100% - 1 pass',
        '==PROF== Profiling "forward_kernel" - 1: 0%....50%....100% - 1 pass',
        "==PROF== Disconnected from process 4242",
        HEADER,
        line(0, "lowpass_kernel", ncu.READ, "134,217,728"),
        line(0, "lowpass_kernel", ncu.WRITTEN, "8,388,608"),
        line(1, "forward_kernel", ncu.READ, "142606336"),
        line(1, "forward_kernel", "dram__throughput.avg.pct_of_peak", "81.5", "%"),
        line(1, "forward_kernel", ncu.WRITTEN, "134217728.00"),
        "",
    ]
)
KERNELS = [
    KernelTraffic("lowpass_kernel", 134217728, 8388608),
    KernelTraffic("forward_kernel", 142606336, 134217728),
]


def test_table_is_read_between_other_lines() -> None:
    assert ncu.parse(SAMPLE) == KERNELS


def test_launches_of_one_kernel_stay_apart_and_in_order() -> None:
    text = "\n".join(
        [HEADER] + [line(i, "k", m, str(10 * i + j)) for i in (9, 10) for j, m in enumerate(BOTH)]
    )
    assert ncu.parse(text) == [KernelTraffic("k", 90, 91), KernelTraffic("k", 100, 101)]


BOTH = (ncu.READ, ncu.WRITTEN)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("==PROF== Disconnected\n", "ncu printed no table; did the program launch a kernel"),
        (HEADER, f"ncu printed no {ncu.READ}; does this GPU"),
        (f"{HEADER}\n{line(0, 'k', ncu.READ, '1')}", f"ncu printed no {ncu.WRITTEN} for k"),
        (f"{HEADER}\n{line(0, 'k', ncu.READ, '1', 'Mbyte')}", "must be in bytes, got 1 Mbyte"),
        (f"{HEADER}\n{line(0, 'k', ncu.READ, 'n/a')}", "must be a number, got 'n/a'"),
    ],
)
def test_what_has_no_traffic_is_refused_with_a_sentence(text: str, sentence: str) -> None:
    with pytest.raises(NcuError, match=sentence):
        ncu.parse(text)


@pytest.mark.parametrize(
    ("printed", "name"),
    [
        ("forward_kernel", "forward_kernel"),
        ("void wtconv::cuda::forward_kernel<float, 5>(TileLaunch)", "forward_kernel"),
        ("void wtconv::(anonymous namespace)::lowpass_kernel<float>(L)", "lowpass_kernel"),
        ("void at::native::<unnamed>::copy<float>(int)", "copy"),
        ("finish_kernel(FinishLaunch)", "finish_kernel"),
    ],
)
def test_kernels_are_called_by_their_short_name(printed: str, name: str) -> None:
    assert ncu.short_name(printed) == name


def test_failure_is_the_error_of_ncu_or_the_last_line() -> None:
    denied = "==PROF== Connected\n==ERROR== ERR_NVGPUCTRPERM - no permission\n==PROF== Done"
    assert ncu.failure(denied, "") == "ERR_NVGPUCTRPERM - no permission"
    assert ncu.failure("", "Traceback\nRuntimeError: no GPU\n\n") == "RuntimeError: no GPU"
    assert ncu.failure("", "") == "no output"


def test_command_line_profiles_the_target_alone() -> None:
    command = ncu.command_line("ncu", ["python", "-m", "target"])
    assert command[0] == "ncu"
    assert command[-3:] == ["python", "-m", "target"]
    settings = dict(zip(command[1:-4:2], command[2:-4:2], strict=True))
    assert settings["--profile-from-start"] == "off"
    assert settings["--cache-control"] == "all"
    assert settings["--print-units"] == "base"
    assert settings["--metrics"] == "dram__bytes_read.sum,dram__bytes_write.sum"


def script(tmp_path: Path, body: str) -> str:
    """A program in place of ncu."""
    path = tmp_path / "ncu"
    path.write_text(f"#!{sys.executable}\n{body}\n")
    path.chmod(0o755)
    return str(path)


def test_profile_runs_ncu_and_reads_what_it_prints(tmp_path: Path) -> None:
    assert ncu.profile(script(tmp_path, f"print({SAMPLE!r})"), ["target"]) == KERNELS


@pytest.mark.parametrize(
    ("body", "timeout_s", "sentence"),
    [
        ("print('==ERROR== ERR_NVGPUCTRPERM')", 60, "ncu failed: ERR_NVGPUCTRPERM"),
        ("raise SystemExit('no such option')", 60, "ncu failed: no such option"),
        ("while True: pass", 0.2, "cannot run ncu: .* timed out"),
    ],
)
def test_profile_says_why_ncu_failed(
    tmp_path: Path, body: str, timeout_s: float, sentence: str
) -> None:
    with pytest.raises(NcuError, match=sentence):
        ncu.profile(script(tmp_path, body), ["target"], timeout_s)


CASE = Case(Size(8, 64, 256, 256), 5, 5, "float32", "nchw", "forward")


def test_case_reads_its_own_arguments() -> None:
    assert Case.parse(CASE.arguments()) == CASE


def test_traffic_is_counted_in_elements_of_the_input() -> None:
    rows = traffic.rows_of(CASE, KERNELS)
    assert [(row.launch, row.kernel) for row in rows] == [
        (0, "lowpass_kernel"),
        (1, "forward_kernel"),
    ]
    assert [(row.read_n, row.written_n) for row in rows] == [(1.0, 1 / 16), (1 + 1 / 16, 1.0)]
    half = Case(CASE.size, 5, 5, "bfloat16", "nchw", "forward")
    assert traffic.rows_of(half, KERNELS)[0].read_n == 2.0


@pytest.mark.parametrize(
    ("dtype", "layout", "ours"),
    [("float32", "nchw", 3.125), ("float16", "nchw", 3.25), ("bfloat16", "channels_last", 3.5)],
)
def test_models_beside_the_forward_pass_are_those_of_the_io_model(
    dtype: str, layout: str, ours: float
) -> None:
    stages = traffic.models("forward", CASE.size, 5, dtype, layout)
    sums = [float(io_model.total(form)) for form in stages.values()]
    assert sums == pytest.approx([21.32, 8.33, ours], abs=0.005)


def test_model_beside_the_backward_pass_is_ours_at_the_size_of_the_input() -> None:
    (small,) = traffic.models("backward", Size(8, 96, 56, 56), 1, "float32", "nchw").values()
    (large,) = traffic.models("backward", CASE.size, 5, "float32", "nchw").values()
    assert io_model.total(small) == 4
    assert large == io_model.backward_stages(io_model.Plane(256, 4), 5)


def test_run_profiles_every_case_and_writes_tables_and_csv(tmp_path: Path) -> None:
    targets: list[list[str]] = []

    def profile(target: Sequence[str]) -> list[KernelTraffic]:
        targets.append(list(target))
        return KERNELS

    settings = TrafficSettings(
        (CASE.size,), (1, 5), ("float32", "bfloat16"), ("nchw", "channels_last")
    )
    said: list[str] = []
    inputs = list(traffic.run(settings, profile, said.append))
    assert [len({(r.shape, r.levels, r.dtype, r.layout) for r in rows}) for rows in inputs] == [
        1
    ] * 8
    rows = [row for rows in inputs for row in rows]
    assert len(targets) == len(said) == 2 * 2 * 2 * len(DIRECTIONS)
    assert len({tuple(target) for target in targets}) == len(targets)
    assert all(target[1:3] == ["-m", "bench.traffic_target"] for target in targets)
    assert len(rows) == 2 * len(targets)

    printed = io.StringIO()
    traffic.print_traffic(rows, Console(file=printed, width=160))
    text = printed.getvalue()
    assert "8x64x256x256 L5 bfloat16 channels_last" in text
    assert "model: paper's fused form" in text
    sums = [line for line in text.splitlines() if "all kernels" in line]
    assert len(sums) == len(targets)
    assert [cell.strip() for cell in sums[0].split("│")[3:6]] == ["2.062", "1.062", "3.125"]

    path = tmp_path / "traffic.csv"
    with csv_sink(path, "card") as write:
        for measured in inputs:
            write(measured)
            assert len(path.read_text().splitlines()) > 2  # before the run has ended
    lines = path.read_text().splitlines()
    assert lines[0] == "# card"
    read = list(csv.DictReader(lines[1:]))
    assert len(read) == len(rows)
    assert float(read[0]["read_n"]) == 1.0
    assert read[1]["kernel"] == "forward_kernel"


def test_only_the_directions_that_are_asked_for_are_profiled() -> None:
    settings = TrafficSettings((CASE.size,), (1,), ("float32",), ("nchw",), ("backward",))
    (rows,) = traffic.run(settings, lambda target: KERNELS, lambda case: None)
    assert {row.direction for row in rows} == {"backward"}
    printed = io.StringIO()
    traffic.print_traffic(rows, Console(file=printed, width=160))
    first_cells = {
        line.split("│")[1].strip() for line in printed.getvalue().splitlines() if "│" in line
    }
    assert first_cells == {"backward"}


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_target_runs_the_pass_it_is_named_after_again_and_again(direction: str) -> None:
    case = Case(Size(2, 4, 9, 7), 3, 2, "float16", "channels_last", direction)
    call = build_call(case, torch.device("cpu"))
    for _ in range(2):
        result = call()
    if direction == "forward":
        assert isinstance(result, torch.Tensor)
        assert result.shape == (2, 4, 9, 7)
        assert result.is_contiguous(memory_format=torch.channels_last)
    else:
        assert isinstance(result, tuple)
        assert len(result) == 1 + 3 + 2 * case.levels
        assert all(torch.isfinite(gradient).all() for gradient in result)


def test_without_ncu_it_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert main(["traffic"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == (
        "bench: traffic needs Nsight Compute: ncu is not on PATH; it comes with the CUDA toolkit\n"
    )
