"""The CUDA kernels on the CPU: builds tests/cuda_on_cpu and calls the launchers of launch.h.

The structs below mirror those of csrc/cuda in their order; the library says their sizes. A second
library has the operators themselves, with their host code, for tensors of the CPU.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from ctypes import POINTER, Structure, c_bool, c_char_p, c_float, c_int, c_int64, c_void_p
from pathlib import Path
from typing import Any

import pytest
import torch
from source_tree import ROOT, load
from torch import Tensor

CUDA, HOST = ROOT / "csrc" / "cuda", ROOT / "tests" / "cuda_on_cpu"
KERNELS = [
    *("patch/planes.cu", "patch/weight_grad.cu", "patch/mma_forward.cu", "patch/forward.cu"),
    *("patch/mma_weight_grad.cu", "patch/lowpass_planes.cu", "patch/group_forward.cu"),
    *("patch/mma_planes.cu", "patch/mma_planes_weight_grad.cu"),
    *("patch/mma_group.cu", "patch/mma_group_weight_grad.cu"),
    *("patch/group_weight_grad.cu", "lowpass.cu", "finish.cu"),
]
# Of the operators alone.
OTHER_KERNELS = ["tile/forward.cu", "tile/weight_grad.cu", "staged.cu", "tile/choose.cpp"]
HOST_CODE = [
    *("ops.cpp", "common/checks.cpp", "common/gradients.cpp"),
    *(f"cuda/{name}.cpp" for name in ("host", "fused_forward", "fused_backward", "staged")),
]
MIN_GXX = 11  # std::bit_cast
DTYPES = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}
LEVELS = 8  # kMaxLaunchLevels + 1


class View(Structure):
    _fields_ = [("data", c_void_p), ("strides", c_int64 * 4)]

    @classmethod
    def of(cls, tensor: Tensor) -> View:
        return cls(tensor.data_ptr(), (c_int64 * 4)(*tensor.stride()))


class RawParameters(Structure):
    _fields_ = [
        ("weight", c_void_p * LEVELS),
        ("scale", c_void_p * LEVELS),
        ("bias", c_void_p),
        ("dtype", c_int),
        ("rotate", c_bool),
    ]


class PatchLaunch(Structure):
    _fields_ = [
        ("params", RawParameters),
        ("input", View),
        ("output", View),
        ("coarse", c_void_p),
        *((name, c_int) for name in ("coarse_rows", "coarse_cols")),
        *((name, c_int) for name in ("batch", "channels", "height", "width")),
        *((name, c_int) for name in ("kernel_size", "levels", "tiles_y", "tiles_x", "tiles")),
        *((name, c_int) for name in ("cells", "group", "splits", "together")),
        *((name, c_int) for name in ("input_bytes", "output_bytes")),
        *((name, c_bool) for name in ("early", "reads_at_once", "tensor_cores")),
    ]


class LowpassPlanesLaunch(Structure):
    _fields_ = [
        ("planes", PatchLaunch),
        *((name, c_int) for name in ("dtype", "input_height", "input_width")),
    ]


class InputGradLaunch(Structure):
    _fields_ = [("params", RawParameters), ("output", View), ("output_bytes", c_int)]


class PatchGradLaunch(Structure):
    _fields_ = [
        ("grad_output", View),
        ("input", View),
        *((name, c_void_p) for name in ("low_grad", "low_input", "exact_low_grad", "partials")),
        *((name, c_int) for name in ("batch", "channels", "height", "width")),
        *((name, c_int) for name in ("kernel_size", "levels", "tiles_y", "tiles_x", "tiles")),
        *((name, c_int) for name in ("cells", "group", "grad_bytes", "input_bytes")),
        *((name, c_int) for name in ("splits", "together", "parts")),
        *((name, c_bool) for name in ("tensor_cores", "base_wanted", "level_wanted")),
        *((name, c_bool) for name in ("bias_wanted", "early", "lets_next_start", "input_wanted")),
        ("input_grad", InputGradLaunch),
    ]


class LevelGradient(Structure):
    _fields_ = [("weight", c_void_p), ("scale", c_void_p)]


class LevelSums(Structure):
    _fields_ = [
        ("partials", c_void_p),
        ("count", c_int64),
        *((name, c_int) for name in ("sums", "first")),
        ("scale", c_float),
    ]


class FinishLaunch(Structure):
    _fields_ = [
        ("params", RawParameters),
        *((name, c_int) for name in ("channels", "kernel_size", "levels")),
        ("sums", LevelSums * LEVELS),
        ("gradients", LevelGradient * LEVELS),
        ("grad_bias", c_void_p),
        *((name, c_bool) for name in ("early", "sums_ready")),
    ]


class LowpassLaunch(Structure):
    _fields_ = [
        ("input", View),
        ("output", c_void_p),
        ("batch", c_int64),
        *((name, c_int) for name in ("channels", "height", "width", "rows", "cols", "levels")),
        ("channels_fast", c_bool),
        ("wide", c_bool),
    ]


MIRRORED = [PatchLaunch, LowpassPlanesLaunch, PatchGradLaunch, FinishLaunch, LowpassLaunch]


def compiler_command() -> list[str]:
    """g++ with the folders of the headers; skips, and says why, where something is missing."""
    if not CUDA.is_dir():
        pytest.skip("needs the source tree")
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    version = subprocess.run([compiler, "-dumpversion"], capture_output=True, text=True, check=True)
    if int(version.stdout.split(".")[0]) < MIN_GXX:
        pytest.skip(f"needs g++ {MIN_GXX}, found {version.stdout.strip()}")
    config = load("build_config")
    nvcc = config.find_nvcc()
    if nvcc is None:
        pytest.skip("needs the headers of a CUDA toolkit: nvcc not found")
    try:
        include, _ = config.toolkit_folders(nvcc)
    except config.BuildError as error:
        pytest.skip(f"needs the headers of a CUDA toolkit: {error}")
    return [compiler, "-std=c++20", "-O1", "-fPIC", f"-I{HOST}", f"-I{CUDA}", "-isystem", include]


def compile_and_link(target: Path, options: list[str], sources: dict[Path, list[str]]) -> None:
    """`target` from sources, each with its own options; two compilers at once.

    A source that was compiled into the same folder is taken as it is.
    """
    command = compiler_command()

    def compile_one(source: Path) -> Path:
        result = target.parent / f"{source.parent.name}_{source.name}.o"
        if result.exists():
            return result
        words = [*command, *sources[source], "-x", "c++", "-c", str(source), "-o", str(result)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, f"{source.name}: {done.stderr[:4000]}"
        return result

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_one, sources))
    partial = target.with_suffix(".partial")
    subprocess.run([command[0], *options, *map(str, objects), "-o", str(partial)], check=True)
    partial.rename(target)


def shared_folder(factory: pytest.TempPathFactory) -> Path:
    """A folder of this run of the tests, the same for all of its processes."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "cuda_on_cpu"
    folder.mkdir(exist_ok=True)
    return folder


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One process at a time builds in the folder."""
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def kernel_sources() -> dict[Path, list[str]]:
    names = [*KERNELS, "patch/choose.cpp"]
    return {path: [] for path in [*(CUDA / name for name in names), HOST / "cuda_on_cpu.cpp"]}


def operator_library(folder: Path) -> Path:
    """A library that defines the operators, with the CUDA code as their kernels for the CPU."""
    library = folder / "libcuda_operators_on_cpu.so"
    torch_folder = Path(torch.__file__).parent
    include, shim = torch_folder / "include", torch_folder / "lib" / "libtorch_cpu.so"
    headers = ["-isystem", str(include), "-isystem", str(include / "torch/csrc/api/include")]
    registered = ["-include", str(HOST / "registration.h"), "-fvisibility=hidden"]
    registered += [*load("build_config").COMMON_DEFINES, *headers]
    sources = kernel_sources() | {HOST / "device.cpp": headers}
    sources |= {CUDA / name: [] for name in OTHER_KERNELS}
    sources |= {CUDA.parent / name: registered for name in HOST_CODE}
    with locked(folder):
        if not library.exists():
            options = ["-shared", "-Wl,-Bsymbolic", "-Wl,--no-as-needed", str(shim)]
            compile_and_link(library, options, sources)
    return library


class Emulator:
    """The launchers on tensors of the CPU; a launch that fails raises what it says."""

    def __init__(self, folder: Path) -> None:
        library = folder / "libcuda_on_cpu.so"
        with locked(folder):
            if not library.exists():
                sources = kernel_sources() | {HOST / "driver.cpp": []}
                compile_and_link(library, ["-shared"], sources)
        self._library = ctypes.CDLL(str(library))
        sizes = (c_int * len(MIRRORED)).in_dll(self._library, "struct_sizes")
        for struct, size in zip(MIRRORED, sizes, strict=True):
            assert ctypes.sizeof(struct) == size, f"{struct.__name__} differs from csrc/cuda"

    def call(self, name: str, *arguments: Any) -> None:
        function = getattr(self._library, name)
        function.restype = c_char_p
        error = function(*arguments)
        if error is not None:
            raise RuntimeError(error.decode())

    def write_late(self, tensor: Tensor) -> None:
        """Takes the values out of `tensor` until the next launch waits for the previous grid."""
        assert tensor.is_contiguous()
        self._late = tensor.clone()
        tensor.fill_(torch.nan)
        pointers = (c_void_p(t.data_ptr()) for t in (tensor, self._late))
        self._library.write_late(*pointers, c_int64(tensor.nbytes))

    def forward(
        self,
        launch: PatchLaunch,
        dtype: torch.dtype,
        multiprocessors: int,
        bulk_copies: bool = True,
    ) -> None:
        c_int.in_dll(self._library, "bulk_copies").value = bulk_copies
        self.call("forward", ctypes.byref(launch), DTYPES[dtype], multiprocessors)

    def gives_input_grad(self, dtype: torch.dtype, kernel_size: int, cells: int) -> bool:
        """Whether the kernel of the weight gradients has a form with the input gradient."""
        return bool(self._library.gives_input_grad(dtype.itemsize, kernel_size, cells))

    def run(
        self, name: str, launch: Structure, dtype: torch.dtype, bulk_copies: bool = True
    ) -> None:
        c_int.in_dll(self._library, "bulk_copies").value = bulk_copies
        self.call(name, ctypes.byref(launch), DTYPES[dtype])

    def faulty(self, kernel: str, fault: int) -> Tensor:
        output = torch.full((64,), torch.nan)
        self.call(kernel, fault, ctypes.cast(output.data_ptr(), POINTER(ctypes.c_float)))
        return output
