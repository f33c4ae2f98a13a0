"""What to compile and how: finds torch, the compilers and the GPUs, and writes build.ninja.

Everything here is a function of the source tree and the environment; csrc/build_hook.py runs it.
Paths in build.ninja are relative to the repository root, torch is reached through the link
`build/torch-<version>`, and system headers stay out of the dependency files, so objects stay valid
when another build environment has the same torch, and no path of the machine reaches the library.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

LIBRARY = "wtconv_ops/libwtconv_ops.so"
BUILD_DIR = "build"
MIN_TORCH = (2, 11)
BUILD_TORCH = "torch==2.13.0"
RELEASE_ARCHS = "8.0 8.6 8.9 9.0 10.0 12.0+PTX"
X86_FLAGS = {
    "baseline": [],
    "avx2": ["-mavx2", "-mfma"],
    "avx512": [
        *("-mavx512f", "-mavx512vl", "-mavx512bw", "-mavx512dq"),
        *("-mfma", "-mprefer-vector-width=512"),
    ],
}
SOURCE_SUFFIXES = {".cpp", ".h", ".inc", ".cu", ".cuh"}
COMMON_DEFINES = ["-DTORCH_TARGET_VERSION=0x020b000000000000"]
CXX_FLAGS = [
    *("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fvisibility-inlines-hidden"),
    *("-ffp-contract=fast", "-Wall", "-Wextra"),
]


class BuildError(RuntimeError):
    """A build that cannot go on; the text is one line that says what to do."""


@dataclass(frozen=True)
class Torch:
    """An installed torch: the folder of the package and its version."""

    root: Path
    version: str


@dataclass(frozen=True)
class Cuda:
    """A CUDA toolkit and the architectures to build for, such as ("9.0", "12.0+PTX")."""

    nvcc: Path
    include: Path
    libraries: Path
    archs: tuple[str, ...]


def package_version(root: Path) -> str:
    """The version in pyproject.toml."""
    match = re.search(r'^version = "([^"]+)"', (root / "pyproject.toml").read_text(), re.MULTILINE)
    if match is None:
        raise BuildError('pyproject.toml has no line version = "..."')
    return match[1]


def source_hash(root: Path) -> str:
    """First 12 hex digits of the sha256 over the version and every C++ and CUDA source file."""
    digest = hashlib.sha256(package_version(root).encode())
    for path in sorted((root / "csrc").rglob("*")):
        if path.suffix in SOURCE_SUFFIXES:
            digest.update(path.relative_to(root).as_posix().encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def torch_at(folder: Path) -> Torch | None:
    """The torch >= 2.11 with headers whose package folder is `folder`, read without an import."""
    try:
        text = (folder / "version.py").read_text()
    except OSError:
        return None
    match = re.search(r"__version__ = '((\d+)\.(\d+)[^']*)'", text)
    if match is None or (int(match[2]), int(match[3])) < MIN_TORCH:
        return None
    needed = ("include/torch/csrc/stable/library.h", "lib/libtorch.so", "lib/libtorch_cpu.so")
    return Torch(folder, match[1]) if all((folder / name).exists() for name in needed) else None


def find_torch() -> Torch | None:
    """An importable torch, else one of the environment that pip's build isolation hides."""
    candidates = []
    spec = importlib.util.find_spec("torch")
    if spec is not None and spec.origin:
        candidates.append(Path(spec.origin).parent)
    for prefix in (sys.prefix, sys.base_prefix):
        bases = {"base": prefix, "platbase": prefix}
        candidates.append(Path(sysconfig.get_path("purelib", vars=bases), "torch"))
    if os.environ.get("VIRTUAL_ENV"):
        candidates += Path(os.environ["VIRTUAL_ENV"]).glob("lib/python3*/site-packages/torch")
    found = (torch_at(folder) for folder in candidates)
    return next((torch for torch in found if torch is not None), None)


def parse_archs(text: str) -> tuple[str, ...]:
    """Splits a list like "9.0;10.0+PTX" or "8.6 9.0a"; order kept, repeats dropped."""
    archs = tuple(dict.fromkeys(text.replace(";", " ").replace(",", " ").split()))
    for arch in archs:
        if not re.fullmatch(r"\d+\.\d[af]?(\+PTX)?", arch):
            raise BuildError(
                f"TORCH_CUDA_ARCH_LIST: {arch!r} is no architecture; write numbers, "
                'for example TORCH_CUDA_ARCH_LIST="9.0 12.0+PTX"'
            )
    return archs


def gencode_flags(archs: tuple[str, ...]) -> list[str]:
    """Flags of nvcc: machine code for every architecture, PTX too where it ends in +PTX."""
    flags = []
    for arch in archs:
        number = arch.removesuffix("+PTX").replace(".", "")
        flags.append(f"-gencode=arch=compute_{number},code=sm_{number}")
        if arch.endswith("+PTX"):
            flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return flags


def visible_gpu_archs() -> tuple[str, ...]:
    """Compute capabilities of the visible GPUs, () where there is none."""
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        if visible.strip() in {"", "-1", "NoDevFiles"}:
            return ()
        query.append(f"--id={visible}")
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(
        sorted(set(re.findall(r"^\s*(\d+\.\d)\s*$", answer.stdout, re.MULTILINE)), key=float)
    )


def find_nvcc() -> Path | None:
    """The nvcc of CUDA_HOME where that is set, else of PATH, else of /usr/local/cuda."""
    if os.environ.get("CUDA_HOME"):
        candidates = [f"{os.environ['CUDA_HOME']}/bin/nvcc"]
    else:
        candidates = ["nvcc", "/usr/local/cuda/bin/nvcc"]
    paths = (shutil.which(name) for name in candidates)
    return next((Path(path) for path in paths if path), None)


def toolkit_folders(nvcc: Path) -> tuple[Path, Path]:
    """Headers and libcudart_static.a of the toolkit that `nvcc`, maybe a wrapper, belongs to."""
    command = [str(nvcc), "--dryrun", "-E", "-x", "cu", os.devnull]
    output = subprocess.run(command, capture_output=True, text=True, check=False).stderr
    match = re.search(r"^#\$ TOP=(.+)$", output, re.MULTILINE)
    top = Path(match[1].strip()) if match else nvcc.resolve().parent.parent
    machine = {"aarch64": "sbsa"}.get(platform.machine(), platform.machine())
    for folder in (top / "lib64", top / f"targets/{machine}-linux/lib", top / "lib"):
        if (folder / "libcudart_static.a").exists():
            return (top / "include").resolve(), folder.resolve()
    raise BuildError(f"libcudart_static.a not found under {top}; install the CUDA runtime library")


def check_archs(nvcc: Path, archs: tuple[str, ...]) -> None:
    """Refuses architectures that this nvcc cannot compile for."""
    command = [str(nvcc), "--list-gpu-arch"]
    known = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()
    for arch in archs:
        number = re.sub(r"[af]?(\+PTX)?$", "", arch).replace(".", "")
        if known and f"compute_{number}" not in known:
            raise BuildError(
                f"{nvcc} cannot compile for {arch}; choose from {' '.join(known)} with "
                "TORCH_CUDA_ARCH_LIST, or point CUDA_HOME at another CUDA toolkit"
            )


def choose_cuda(root: Path) -> Cuda | None:
    """Whether to build CUDA kernels and for what, from WTCONV_CUDA and TORCH_CUDA_ARCH_LIST."""
    mode = os.environ.get("WTCONV_CUDA") or "auto"
    if mode not in {"auto", "0", "1"}:
        raise BuildError(f"WTCONV_CUDA must be auto, 0 or 1, got {mode!r}")
    if mode == "0":
        return None
    nvcc = find_nvcc()
    has_sources = any((root / "csrc" / "cuda").rglob("*.cu"))
    if mode == "1" and nvcc is None:
        raise BuildError(
            "WTCONV_CUDA=1 but nvcc was not found; install a CUDA toolkit and set CUDA_HOME to its "
            "folder, or build with WTCONV_CUDA=0"
        )
    if mode == "1" and not has_sources:
        raise BuildError("WTCONV_CUDA=1 but csrc/cuda has no *.cu files; build with WTCONV_CUDA=0")
    if nvcc is None or not has_sources:
        return None
    archs = parse_archs(os.environ.get("TORCH_CUDA_ARCH_LIST", "")) or visible_gpu_archs()
    if not archs and mode == "1":
        archs = parse_archs(RELEASE_ARCHS)
    if not archs:
        return None
    check_archs(nvcc, archs)
    return Cuda(nvcc, *toolkit_folders(nvcc), archs)


def find_compiler() -> list[str]:
    """The C++ compiler command: CXX where that is set, else c++, g++ or clang++."""
    if os.environ.get("CXX"):
        command = shlex.split(os.environ["CXX"])
        if shutil.which(command[0]) is None:
            raise BuildError(
                f"C++ compiler {command[0]} (from CXX) not found; "
                "install g++ or set CXX to a C++17 compiler"
            )
        return command
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name]
    raise BuildError("no C++ compiler found; install g++ or set CXX to a C++17 compiler")


def find_ninja() -> str:
    """The ninja command of the Python package of that name, else of PATH."""
    spec = importlib.util.find_spec("ninja")
    if spec is not None:
        import ninja

        bundled = Path(ninja.BIN_DIR, "ninja")
        if bundled.exists():
            return str(bundled)
    found = shutil.which("ninja")
    if found is None:
        raise BuildError("ninja not found; install it: pip install ninja")
    return found


def job_count() -> int:
    """MAX_JOBS, else the cores this process may use, one for every 2 GiB of memory at most."""
    text = os.environ.get("MAX_JOBS")
    if text:
        if not text.isdecimal() or int(text) < 1:
            raise BuildError(f"MAX_JOBS must be a whole number >= 1, got {text!r}")
        return int(text)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(len(os.sched_getaffinity(0)), memory // 2**31))


def isa_of(source: Path) -> str:
    """Instruction set in the name of a file of csrc/cpu/isa: baseline, avx2 or avx512."""
    isa = source.stem.rpartition("_")[2]
    if isa not in X86_FLAGS:
        raise BuildError(f"{source}: the name must end in _{', _'.join(X86_FLAGS)} before .cpp")
    return isa


def cpp_sources(root: Path, x86: bool, cuda: Cuda | None) -> list[tuple[Path, list[str]]]:
    """C++ files with the flags each has beside the common ones; paths relative to `root`."""
    csrc = root / "csrc"
    cuda_flags = ["-DWTCONV_CUDA=1"] if cuda else []
    edges = [(path, cuda_flags) for path in sorted(csrc.glob("*.cpp"))]
    for folder in ("common", "cpu", *([] if cuda else ["cpu_only"])):
        edges += [(path, []) for path in sorted(csrc.glob(f"{folder}/*.cpp"))]
    if cuda:
        toolkit = [f"-isystem {shlex.quote(str(cuda.include))}"]
        edges += [(path, toolkit) for path in sorted(csrc.glob("cuda/**/*.cpp"))]
    for path in sorted(csrc.glob("cpu/isa/*.cpp")):
        isa = isa_of(path)
        if x86 or isa == "baseline":
            edges.append((path, X86_FLAGS[isa]))
    return [(path.relative_to(root), flags) for path, flags in edges]


def quoted_define(name: str, value: str) -> str:
    """A -D option for a C++ string literal, quoted for the shell."""
    return shlex.quote(f'-D{name}="{value}"')


def ninja_text(root: Path, torch: Torch, compiler: list[str], cuda: Cuda | None) -> str:
    """build.ninja: one edge per source file and the link of the library."""
    x86 = platform.machine() == "x86_64"
    torch_dir = f"{BUILD_DIR}/torch-{torch.version}"
    include = f"{torch_dir}/include"
    headers = [f"-isystem {include}", f"-isystem {include}/torch/csrc/api/include"]
    defines = [*COMMON_DEFINES, *(["-DWTCONV_X86=1"] if x86 else [])]
    prefix_map = f"-ffile-prefix-map={include}/="
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=False)
    gcc_only = [] if "clang" in version.stdout else ["-fno-gnu-unique"]
    cxx_flags = [*CXX_FLAGS, *gcc_only, prefix_map, *defines, "-Icsrc", *headers]
    libraries = f"-L{torch_dir}/lib -Wl,--no-as-needed -ltorch -ltorch_cpu -Wl,--as-needed"
    info = [
        quoted_define("WTCONV_VERSION", package_version(root)),
        quoted_define("WTCONV_SOURCE_HASH", source_hash(root)),
        quoted_define("WTCONV_CUDA_ARCHS", " ".join(cuda.archs) if cuda else ""),
    ]
    lines = [
        f"builddir = {BUILD_DIR}",
        f"cxx = {shlex.join(compiler)}",
        f"cxx_flags = {' '.join(cxx_flags)}",
        "rule cxx",
        "  command = $cxx -MMD -MF $out.d $cxx_flags $flags -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "  description = C++ $in",
    ]
    edges = []
    for path, flags in cpp_sources(root, x86, cuda):
        extra = info if path.name == "build_info.cpp" else []
        edges.append((path, "cxx", " ".join([*flags, *extra])))
    if cuda is not None:
        lines += nvcc_rule(cuda, [*defines, "-DWTCONV_CUDA=1", "-Icsrc", *headers], prefix_map)
        sources = sorted((root / "csrc" / "cuda").rglob("*.cu"))
        edges += [(path.relative_to(root), "nvcc", "") for path in sources]
        libraries += f" -L{cuda.libraries} -lcudart_static -lrt -ldl -lpthread"
    objects = []
    for path, rule, options in edges:
        objects.append(f"{BUILD_DIR}/obj/{path.as_posix()}.o")
        lines += [f"build {objects[-1]}: {rule} {path.as_posix()}", f"  flags = {options}"]
    lines += [
        "rule link",
        "  command = $cxx -shared -o $out $in $libraries -Wl,--exclude-libs,ALL -Wl,-z,defs",
        "  description = link $out",
        f"build {LIBRARY}: link {' '.join(objects)}",
        f"  libraries = {libraries}",
        f"default {LIBRARY}",
    ]
    return "\n".join(lines) + "\n"


def nvcc_rule(cuda: Cuda, flags: list[str], prefix_map: str) -> list[str]:
    """The ninja rule that compiles a .cu file; CXX, where set, is nvcc's host compiler too."""
    host = ["-fPIC", "-fvisibility=hidden", "-fno-gnu-unique", "-Wall", "-Wextra", prefix_map]
    words = shlex.split(os.environ.get("CXX", ""))
    ccbin = [f"-ccbin {shlex.quote(words[0])}"] if len(words) == 1 else []
    options = [
        *("-std=c++17", "-O3", "--expt-relaxed-constexpr", "-cudart=static", *ccbin),
        *(f"-Xcompiler={flag}" for flag in host),
        *gencode_flags(cuda.archs),
        *flags,
    ]
    return [
        f"nvcc = {shlex.quote(str(cuda.nvcc))}",
        f"nvcc_flags = {' '.join(options)}",
        "rule nvcc",
        "  command = $nvcc -MMD -MF $out.d $nvcc_flags $flags -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "  description = CUDA $in",
    ]
