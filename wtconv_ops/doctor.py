"""``python -m wtconv_ops doctor``: environment, library, GPUs and which kernels run, never raising.

Every line is one probe; a probe that fails prints its error in its own line, and the others go on.
"""

from __future__ import annotations

import importlib.util
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

KERNEL_SIZE = 5
LEVELS = 3
MIN_DRIVER = 580
CPU_FLAGS = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl", "asimd")


class Row(NamedTuple):
    """One line of the report."""

    section: str
    item: str
    value: str


def rows() -> list[Row]:
    """All lines of the report, in the order environment, library, GPU, kernels.

    Returns:
        Rows of section, item and value; one or more per item, never an exception.
    """
    probes: list[tuple[str, str, Callable[[], str | list[str]]]] = [
        ("environment", "wtconv_ops", _package),
        ("environment", "python", _python),
        ("environment", "platform", platform.platform),
        ("environment", "torch", _torch),
        ("environment", "cpu", _cpu),
        ("library", "file", _library_file),
        ("library", "source", _library_source),
        ("library", "torch", _library_torch),
        ("library", "cpu kernels", _library_cpu),
        ("library", "cuda kernels", _library_cuda),
        ("gpu", "driver", _driver),
        ("gpu", "devices", _devices),
        ("kernels", f"k={KERNEL_SIZE} L={LEVELS}", _kernels),
    ]
    found = []
    for section, item, probe in probes:
        try:
            answer = probe()
        except Exception as error:  # a doctor reports what it cannot find out
            answer = f"unknown ({type(error).__name__}: {_first_line(error)})"
        for value in [answer] if isinstance(answer, str) else answer:
            found.append(Row(section, item, value))
    return found


def report() -> str:
    """The report as plain text, one line per row, columns aligned.

    Returns:
        Text that ends without a newline.
    """
    lines = []
    shown = ""
    for section, item, value in rows():
        lines.append(f"{section if section != shown else '':<12} {item:<13} {value}")
        shown = section
    return "\n".join(lines)


def main() -> int:
    """Prints the report: a rich table for a person at a terminal, else plain text.

    Returns:
        Exit status 0; what is wrong stands in the report.
    """
    if sys.stdout.isatty() and importlib.util.find_spec("rich") is not None:
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table

        table = Table("section", "item", "value", title="wtconv_ops doctor")
        shown = ""
        for section, item, value in rows():
            table.add_row("" if section == shown else section, item, escape(value))
            shown = section
        Console().print(table)
    else:
        print(report())
    return 0


def _first_line(error: BaseException) -> str:
    """First line of an error's text."""
    return next(iter(str(error).strip().splitlines()), "no text")


def _package() -> str:
    from . import __version__

    return f"{__version__} in {Path(__file__).parent}"


def _python() -> str:
    return f"{platform.python_version()} ({sys.executable})"


def _torch() -> str:
    import torch

    if torch.version.hip is not None:
        return f"{torch.__version__}, ROCm {torch.version.hip}: only NVIDIA GPUs have kernels"
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    return f"{torch.__version__}, {build}, {torch.get_num_threads()} threads"


def _cpu() -> str:
    text = Path("/proc/cpuinfo").read_text()
    flags = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    words = set(flags[1].split()) if flags else set()
    known = [flag for flag in CPU_FLAGS if flag in words]
    return f"{platform.machine()}: {' '.join(known) or 'no vector extension that we use'}"


def _library_file() -> str:
    from . import _library

    loaded = _library.library()
    if loaded is None:
        return f"none: {_library.problem()}"
    return str(loaded.path or "loaded by another party before wtconv_ops was imported")


def _info(name: str) -> str:
    """A value that the library was built with, lists joined by blanks."""
    from . import _library

    value = _library.build_info().get(name)
    if isinstance(value, list):
        return " ".join(str(entry) for entry in value) or "none"
    return "unknown" if value is None else str(value)


def _no_library() -> bool:
    from . import _library

    return _library.library() is None


def _library_source() -> str:
    if _no_library():
        return "none"
    built = f"version {_info('version')}, source {_info('source_hash')}"
    config = _build_config()
    if config is None:
        return built
    tree = config.source_hash(Path(__file__).resolve().parent.parent)
    if tree == _info("source_hash"):
        return f"{built}, same as the source tree"
    return f"{built}, but the source tree has {tree}: run python csrc/build_hook.py"


def _build_config() -> ModuleType | None:
    """The build configuration of the source tree around the package; None outside a tree."""
    path = Path(__file__).resolve().parent.parent / "csrc" / "build_config.py"
    if not path.is_file():
        return None
    spec = importlib.util.spec_from_file_location("wtconv_build_config", path)
    if spec is None or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(spec.name, module)  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


def _library_torch() -> str:
    return "none" if _no_library() else f"any torch >= {_info('torch_target')} (stable ABI)"


def _library_cpu() -> str:
    from . import _library

    if _no_library():
        return "none"
    built = f"{_info('cpu_isa')} (built: {_info('cpu_isas')}), {_info('dtypes')}"
    problem = _library.isa_problem()
    return built if problem is None else f"{built}; {problem}"


def _library_cuda() -> str:
    if _no_library():
        return "none"
    if _info("cuda") != "True":
        return "none: built without CUDA; WTCONV_CUDA=1 builds them"
    return f"built for {_info('cuda_archs')}"


def _driver() -> str:
    version = _driver_version()
    if version is None:
        return "no NVIDIA driver"
    if int(version.split(".")[0]) >= MIN_DRIVER:
        return version
    return f"{version}: CUDA 13 builds need {MIN_DRIVER} or newer"


def _driver_version() -> str | None:
    """Version of the NVIDIA driver, such as "580.65.06"; None where there is none."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
        match = re.search(r"Kernel Module\D*(\d+\.[\d.]+)", text)
    except OSError:
        match = None
    if match is not None:
        return match[1]
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return next((word for word in answer.stdout.split() if word[0].isdigit()), None)


def _devices() -> str | list[str]:
    import torch

    names = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        memory = properties.total_memory // 2**20
        capability = f"{properties.major}.{properties.minor}"
        names.append(f"cuda:{index} {properties.name}, {capability}, {memory} MiB")
    return names or "none visible to torch"


def _kernels() -> list[str]:
    """For every device, which dtypes run the kernels, and why the others do not."""
    import torch

    from ._checks import DTYPE_NAMES

    devices = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    if not devices[1:]:
        devices.append("cuda")
    lines = []
    for device in devices:
        verdicts: dict[str, list[str]] = {}
        for dtype, name in DTYPE_NAMES.items():
            verdicts.setdefault(_verdict(device, dtype), []).append(name)
        lines += [f"{device} {' '.join(names)}: {verdict}" for verdict, names in verdicts.items()]
    return lines


def _verdict(device: str, dtype: object) -> str:
    """The word kernel, or plain PyTorch and why, as `can_run` says."""
    import torch

    from ._capability import can_run

    assert isinstance(dtype, torch.dtype)
    try:
        can_run(device, dtype, KERNEL_SIZE, LEVELS, raise_error=True)
    except Exception as error:  # the reason is the row
        return f"plain PyTorch ({_first_line(error).removeprefix('wtconv_ops: ')})"
    return "kernel"
