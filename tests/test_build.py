"""The build: what gets compiled, what the wheel and the library hold, and its one-line errors."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
from source_tree import ROOT, load

LIBRARY = "wtconv_ops/libwtconv_ops.so"
VARIABLES = ("WTCONV_CUDA", "TORCH_CUDA_ARCH_LIST", "CUDA_HOME", "CXX", "MAX_JOBS")
PIP_WHEEL = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
HATCHLING = [sys.executable, "-m", "hatchling", "build"]

pytestmark = pytest.mark.skipif(
    not (ROOT / "csrc").is_dir() or platform.system() != "Linux", reason="needs the source tree"
)


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """csrc/build_config.py, with none of the build's variables set."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return load("build_config")


def environment(**changes: str) -> dict[str, str]:
    """The environment without the build's variables, CPU only, with `changes`."""
    kept = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    return {**kept, "WTCONV_CUDA": "0", **changes}


def run(command: list[str], cwd: Path, **changes: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=cwd, env=environment(**changes), capture_output=True, text=True, check=False
    )


def run_hook(tree: Path, **changes: str) -> subprocess.CompletedProcess[str]:
    return run([sys.executable, "csrc/build_hook.py"], tree, **changes)


@pytest.fixture(scope="session")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the source tree, with the objects that are built already but no library."""
    copy = tmp_path_factory.mktemp("tree") / "wtconv_ops"
    copy.mkdir()
    ignore = shutil.ignore_patterns("__pycache__", "*.so")
    for name in ("csrc", "wtconv_ops", "tests", "bench", "build"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE", ".gitignore"):
        shutil.copy2(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="session")
def wheel(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The CPU-only wheel that pip builds from `tree`."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    done = run([*PIP_WHEEL, "-w", str(folder), str(tree)], folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH with the wheel's content."""
    folder = tmp_path_factory.mktemp("installed")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


@pytest.fixture
def cuda_tree(tmp_path: Path, config: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree with one CUDA file, no GPU, and an nvcc for any GPU unless CUDA_HOME is set."""
    (tmp_path / "csrc" / "cuda").mkdir(parents=True)
    (tmp_path / "csrc" / "cuda" / "kernel.cu").touch()
    nvcc = Path("/toolkit/bin/nvcc")
    monkeypatch.setattr(config, "find_nvcc", lambda: None if os.getenv("CUDA_HOME") else nvcc)
    monkeypatch.setattr(config, "toolkit_folders", lambda nvcc: (nvcc.parent, nvcc.parent))
    monkeypatch.setattr(config, "check_archs", lambda nvcc, archs: None)
    monkeypatch.setattr(config, "visible_gpu_archs", lambda: ())
    return tmp_path


@pytest.mark.parametrize(
    ("text", "archs"),
    [
        ("", ()),
        ("9.0", ("9.0",)),
        ("9.0;10.0+PTX", ("9.0", "10.0+PTX")),
        (" 8.0 8.6  9.0a;9.0a ", ("8.0", "8.6", "9.0a")),
        ("12.0f,12.1", ("12.0f", "12.1")),
    ],
)
def test_arch_list_splits_at_blanks_and_semicolons(
    config: ModuleType, text: str, archs: tuple[str, ...]
) -> None:
    assert config.parse_archs(text) == archs


@pytest.mark.parametrize("text", ["Hopper", "sm_90", "9", "90", "9.0+ptx"])
def test_arch_list_refuses_other_words(config: ModuleType, text: str) -> None:
    with pytest.raises(config.BuildError, match=r"TORCH_CUDA_ARCH_LIST: .* is no architecture"):
        config.parse_archs(text)


def test_only_archs_with_ptx_keep_their_ptx(config: ModuleType) -> None:
    assert config.gencode_flags(("9.0a", "12.0+PTX")) == [
        "-gencode=arch=compute_90a,code=sm_90a",
        "-gencode=arch=compute_120,code=sm_120",
        "-gencode=arch=compute_120,code=compute_120",
    ]


@pytest.mark.parametrize(
    ("variables", "gpus", "archs"),
    [
        ({}, (), None),
        ({}, ("8.6", "9.0"), ("8.6", "9.0")),
        ({"WTCONV_CUDA": "auto", "TORCH_CUDA_ARCH_LIST": "9.0;10.0+PTX"}, (), ("9.0", "10.0+PTX")),
        ({"WTCONV_CUDA": "1"}, (), ("8.0", "8.6", "8.9", "9.0", "10.0", "12.0+PTX")),
        ({"WTCONV_CUDA": "1"}, ("9.0",), ("9.0",)),
        ({"WTCONV_CUDA": "0", "TORCH_CUDA_ARCH_LIST": "9.0"}, ("9.0",), None),
        ({"CUDA_HOME": "/without/nvcc"}, ("9.0",), None),
    ],
)
def test_cuda_is_built_as_the_variables_and_gpus_say(
    config: ModuleType,
    cuda_tree: Path,
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    gpus: tuple[str, ...],
    archs: tuple[str, ...] | None,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(config, "visible_gpu_archs", lambda: gpus)
    cuda = config.choose_cuda(cuda_tree)
    assert (cuda and cuda.archs) == archs


@pytest.mark.parametrize("visible", ["", "-1"])
def test_hidden_gpus_are_not_built_for(
    config: ModuleType, monkeypatch: pytest.MonkeyPatch, visible: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert config.visible_gpu_archs() == ()


def test_max_jobs_sets_the_number_of_jobs(
    config: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert config.job_count() >= 1
    monkeypatch.setenv("MAX_JOBS", "3")
    assert config.job_count() == 3


def ninja_flags(config: ModuleType, cuda: object = None) -> dict[str, str]:
    """Flags of every C++ and CUDA file of the source tree in build.ninja."""
    text = config.ninja_text(ROOT, config.Torch(Path("torch"), "2.13.0"), ["g++"], cuda)
    assert "fast-math" not in text
    return dict(re.findall(r"^build \S+\.o: \w+ (\S+)\n  flags = (.*)$", text, re.MULTILINE))


def test_instruction_sets_stay_in_their_own_files(
    config: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config.platform, "machine", lambda: "x86_64")
    flags = ninja_flags(config)
    for path, options in flags.items():
        assert ("-mavx2" in options) == path.endswith("_avx2.cpp")
        assert ("-mavx512f" in options) == path.endswith("_avx512.cpp")
    assert any(path.endswith("_avx512.cpp") for path in flags)


def test_other_processors_build_the_baseline_only(
    config: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config.platform, "machine", lambda: "aarch64")
    flags = ninja_flags(config)
    assert any(path.endswith("_baseline.cpp") for path in flags)
    assert not any("avx" in path or "-m" in options for path, options in flags.items())


def test_kernels_of_the_cpu_compile_alike_with_and_without_cuda(config: ModuleType) -> None:
    cuda = config.Cuda(Path("nvcc"), Path("include"), Path("lib"), ("9.0",))
    with_cuda, without = ninja_flags(config, cuda), ninja_flags(config)
    kernels = [path for path in without if path.startswith("csrc/cpu/")]
    assert kernels
    assert {path: with_cuda[path] for path in kernels} == {path: without[path] for path in kernels}
    assert not any(path.startswith("csrc/cpu_only/") for path in with_cuda)


@pytest.mark.parametrize(
    ("version", "headers", "found"),
    [("2.10.0", True, False), ("2.11.0+cu130", True, True), ("2.13.0", False, False)],
)
def test_torch_needs_version_and_headers(
    config: ModuleType, tmp_path: Path, version: str, headers: bool, found: bool
) -> None:
    (tmp_path / "version.py").write_text(f"__version__ = '{version}'\n")
    names = ["lib/libtorch.so", "lib/libtorch_cpu.so"]
    names += ["include/torch/csrc/stable/library.h"] if headers else []
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert (config.torch_at(tmp_path) is not None) == found


def test_isolated_build_downloads_torch_only_where_none_is_found(
    config: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook = load("build_hook")
    asked = hook.LibraryBuildHook.__new__(hook.LibraryBuildHook)
    assert asked.dependencies() == []
    monkeypatch.setattr(hook.config, "find_torch", lambda: None)
    assert asked.dependencies() == ["torch==2.13.0"]


@pytest.mark.parametrize(
    ("variables", "line"),
    [
        (
            {"CXX": "/nonexistent/g++"},
            "C++ compiler /nonexistent/g++ (from CXX) not found; install",
        ),
        (
            {"WTCONV_CUDA": "1", "CUDA_HOME": "/nonexistent"},
            "WTCONV_CUDA=1 but nvcc was not found; ",
        ),
        ({"WTCONV_CUDA": "yes"}, "WTCONV_CUDA must be auto, 0 or 1, got 'yes'"),
        ({"MAX_JOBS": "0"}, "MAX_JOBS must be a whole number >= 1, got '0'"),
    ],
)
def test_failure_is_one_line(tree: Path, variables: dict[str, str], line: str) -> None:
    done = run_hook(tree, **variables)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith(f"wtconv_ops: {line}")
    assert done.stderr.count("\n") == 1


def test_missing_torch_is_one_line(tree: Path, tmp_path: Path) -> None:
    run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path)], tmp_path)
    done = run([str(tmp_path / "bin" / "python"), "csrc/build_hook.py"], tree, VIRTUAL_ENV="")
    if done.returncode == 0:
        pytest.skip("the Python that made this environment has a torch of its own")
    assert done.stderr == (
        "wtconv_ops: no torch >= 2.11 with headers found; "
        "install one first: pip install torch==2.13.0\n"
    )


def test_pip_shows_the_line(tree: Path, tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    done = run([*PIP_WHEEL, "-w", str(tmp_path), str(tree)], tmp_path, CXX="/nonexistent/g++")
    assert done.returncode != 0
    assert "wtconv_ops: C++ compiler /nonexistent/g++ (from CXX) not found" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_second_build_compiles_nothing(tree: Path, wheel: Path) -> None:
    del wheel
    done = run_hook(tree, MAX_JOBS="1")
    assert done.returncode == 0, done.stderr
    assert "1 jobs" in done.stdout
    assert "ninja: no work to do." in done.stdout


@pytest.mark.slow
def test_wheel_serves_every_python(wheel: Path, config: ModuleType) -> None:
    version = config.package_version(ROOT)
    assert wheel.name == f"wtconv_ops-{version}-py3-none-linux_{platform.machine()}.whl"
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read(f"wtconv_ops-{version}.dist-info/METADATA").decode()
        tags = archive.read(f"wtconv_ops-{version}.dist-info/WHEEL").decode()
    assert "Root-Is-Purelib: false" in tags
    assert "\nRequires-Dist: torch>=2.11\n" in metadata
    assert "\nRequires-Python: >=3.10\n" in metadata


@pytest.mark.slow
def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    package = {name for name in names if ".dist-info/" not in name}
    modules = (ROOT / "wtconv_ops").rglob("*.py")
    sources = {path.relative_to(ROOT).as_posix() for path in modules}
    assert package == sources | {LIBRARY, "wtconv_ops/py.typed"}
    assert any(name.endswith("licenses/LICENSE") for name in names)


@pytest.mark.slow
def test_sdist_holds_the_sources_and_no_library(tree: Path, wheel: Path, tmp_path: Path) -> None:
    del wheel
    done = run([*HATCHLING, "-t", "sdist", "-d", str(tmp_path)], tree)
    assert done.returncode == 0, done.stderr
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "LICENSE", "csrc/build_hook.py", "csrc/build_config.py"} <= names
    assert not any(name.endswith((".so", ".o")) for name in names)


def binutils(name: str, *arguments: str) -> str:
    """What a tool such as readelf prints."""
    if shutil.which(name) is None:
        pytest.skip(f"needs {name} of binutils")
    return subprocess.run([name, *arguments], capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
def test_library_needs_torch_and_the_c_runtime_only(installed: Path) -> None:
    text = binutils("readelf", "-d", str(installed / LIBRARY))
    needed = set(re.findall(r"\(NEEDED\).*\[(.+)\]", text))
    runtime = r"lib(stdc\+\+|gcc_s|m|c|rt|dl|pthread)\.so\.\d+|ld-linux-.*"
    assert {"libtorch.so", "libtorch_cpu.so"} <= needed
    assert all(re.fullmatch(runtime, name) for name in needed - {"libtorch.so", "libtorch_cpu.so"})
    assert "RPATH" not in text
    assert "RUNPATH" not in text


@pytest.mark.slow
def test_library_uses_the_stable_abi_only(installed: Path) -> None:
    text = binutils("nm", "-D", "--undefined-only", str(installed / LIBRARY))
    symbols = [line.split()[-1] for line in text.splitlines()]
    unversioned = [name for name in symbols if "@" not in name]
    known = re.compile(r"aoti_torch_\w+|torch_\w+|_ITM_\w+TMCloneTable|__gmon_start__")
    assert [name for name in unversioned if not known.fullmatch(name)] == []


@pytest.mark.slow
def test_library_holds_no_path_of_the_build_machine(installed: Path, tree: Path) -> None:
    content = (installed / LIBRARY).read_bytes()
    for path in (ROOT, tree, Path.home(), Path(sys.prefix), Path(sys.executable).parent):
        assert f"{path}/".encode() not in content


@pytest.mark.slow
def test_wheel_imports_silently_and_names_its_source(
    installed: Path, config: ModuleType, tmp_path: Path
) -> None:
    script = (
        "import wtconv_ops, wtconv_ops._library as lib; i = lib.build_info();"
        "print(i['version'], i['source_hash'], i['cuda'])"
    )
    done = run([sys.executable, "-c", script], tmp_path, PYTHONPATH=str(installed))
    assert done.returncode == 0, done.stderr
    version, source = config.package_version(ROOT), config.source_hash(ROOT)
    assert done.stdout == f"{version} {source} False\n"
    assert "wtconv" not in done.stderr


PLAIN = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import torch, wtconv_ops
    layer = wtconv_ops.WTConv2d(3, 3, kernel_size=5, wt_levels=2)
    y = layer(torch.randn(2, 3, 17, 11))
    y.sum().backward()
print(len([w for w in caught if "wtconv_ops" in str(w.message)]), list(y.shape))
print(layer.base_conv.weight.grad is not None)
"""


def test_without_library_one_warning_and_the_layer_runs(tmp_path: Path) -> None:
    ignore = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(ROOT / "wtconv_ops", tmp_path / "wtconv_ops", ignore=ignore)
    done = run([sys.executable, "-c", PLAIN], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "1 [2, 3, 17, 11]\nTrue\n"
    doctor = run([sys.executable, "-m", "wtconv_ops", "doctor"], tmp_path)
    assert doctor.returncode == 0, doctor.stderr
    assert "none: the operator library libwtconv_ops.so is not installed" in doctor.stdout
