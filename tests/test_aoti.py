"""AOTInductor packages: run by another process, and by a C++ program without Python."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aoti_control
import pytest
import torch
import torch._inductor
from readme import ROOT, blocks
from saved_model import export, make_images, make_model, run_command, run_in_new_process
from torch import Tensor
from torch.testing import assert_close

import wtconv_ops
from wtconv_ops import _library

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ops")]
LIBRARY = str(_library.default_path())
# With the scripts of this Python's environment, such as the cmake of its wheel.
SEARCH_PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"

Package = Callable[[str], Path]


def compile_package(program: Any, file: Path) -> Path:
    torch._inductor.aoti_compile_and_package(program, package_path=str(file))
    return file


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    """Path of the package of the model for a device, compiled once."""
    folder = tmp_path_factory.mktemp("packages")

    def compiled(device: str) -> Path:
        file = folder / f"{device}.pt2"
        return file if file.exists() else compile_package(export(make_model(device)), file)

    return compiled


@pytest.fixture
def torch_loads_packages(device: str) -> None:
    """Skips where torch crashes on any package for a GPU, one of sin() included."""
    reason = aoti_control.problem(device) if device == "cuda" else None
    if reason is not None:
        pytest.skip(reason)


LOADS = pytest.mark.usefixtures("torch_loads_packages")


def expected(device: str) -> list[Tensor]:
    model = make_model(device)
    return [model(image).detach() for image in make_images(device)]


@pytest.mark.smoke
@LOADS
def test_package_runs_in_a_new_process(device: str, package: Package, tmp_path: Path) -> None:
    results, said = run_in_new_process(package(device), tmp_path, make_images(device), LIBRARY)
    assert results is not None, said
    assert_close(results, expected(device))


def test_the_control_tells_a_torch_that_runs_packages_from_one_that_crashes(tmp_path: Path) -> None:
    assert aoti_control.problem("cpu") is None
    crash, refusal = tmp_path / "crash.py", tmp_path / "refusal.py"
    crash.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    refusal.write_text("raise RuntimeError('no loader')\n")
    said = [aoti_control.problem("cuda", str(script)) for script in (crash, refusal)]
    itself = f"torch {torch.__version__} itself cannot load and run a package of sin() on cuda"
    assert said == [
        f"{itself} of this machine: exit code -11",
        f"{itself} of this machine: exit code 1, RuntimeError: no loader",
    ]


def test_package_without_the_library_names_the_operator(package: Package, tmp_path: Path) -> None:
    results, said = run_in_new_process(package("cpu"), tmp_path, make_images())
    assert results is None
    assert "Could not find schema for wtconv::fused_forward" in said


@LOADS
def test_package_of_a_channels_last_example_takes_channels_last(
    device: str, tmp_path: Path
) -> None:
    model, layout = make_model(device), torch.channels_last
    file = compile_package(export(model, layout=layout), tmp_path / "channels_last.pt2")
    run = torch._inductor.aoti_load_package(str(file))
    for image in make_images(device, layout=layout):
        assert_close(run(image), model(image))
        assert run(image).is_contiguous(memory_format=layout)


@LOADS
def test_package_of_a_decomposed_program_needs_no_library(device: str, tmp_path: Path) -> None:
    model, images = make_model(device, wt_levels=1), make_images(device)
    program = export(model).run_decompositions(wtconv_ops.decompositions())
    file = compile_package(program, tmp_path / "decomposed.pt2")
    results, said = run_in_new_process(file, tmp_path, images)
    assert results is not None, said
    assert_close(results, [model(image).detach() for image in images])


class Synthesis(torch.nn.Module):
    """Two levels of coefficients onto an image."""

    def forward(self, base: Tensor) -> Any:
        half = base[:, :, ::2, ::2].repeat(1, 4, 1, 1)
        quarter = base[:, :, ::4, ::4].repeat(1, 4, 1, 1)
        return torch.ops.wtconv.synthesis(base.sin(), [half.cos(), quarter])


def test_package_with_synthesis_as_a_loop_needs_no_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, images = Synthesis(), make_images()[-1:]
    program = torch.export.export(model, (images[0],))
    for option, failure in (("pointwise", ""), ("extern", "schema for wtconv::synthesis")):
        monkeypatch.setenv("WTCONV_INDUCTOR_SYNTHESIS", option)
        file = compile_package(program, tmp_path / f"{option}.pt2")
        results, said = run_in_new_process(file, tmp_path, images)
        assert (results is None) == bool(failure), said
        assert failure in said
        if results is not None:
            assert_close(results, [model(image) for image in images])


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The C++ program, built by the line of the README."""
    compilers = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    for names, kind in ((["cmake"], "CMake"), (compilers, "C++ compiler")):
        if not any(shutil.which(shlex.split(name)[0], path=SEARCH_PATH) for name in names):
            pytest.skip(f"no {kind}: none of {', '.join(names)} is on PATH")
    folder = tmp_path_factory.mktemp("aoti_runner")
    build, _ = readme_lines()
    build = build.replace("build/aoti_runner", shlex.quote(str(folder)))
    build = build.replace(".venv/bin/python", shlex.quote(sys.executable))
    environment = dict(os.environ, PATH=SEARCH_PATH)
    if shutil.which("ninja", path=SEARCH_PATH):
        environment.setdefault("CMAKE_GENERATOR", "Ninja")
    done = subprocess.run(
        ["bash", "-euc", build],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "aoti_runner"


def readme_lines() -> tuple[str, str]:
    """The lines that build the program and that run it."""
    (block,) = [text for heading, text in blocks("sh") if heading == "C++, without Python"]
    build, run = block.splitlines()
    return build, run


def run_cpp(
    runner: Path, package: Path, folder: Path, images: list[Tensor], *libraries: str
) -> tuple[tuple[Tensor, ...] | None, str]:
    return run_command([str(runner), str(package)], folder, images, *libraries)


@pytest.mark.smoke
@LOADS
def test_cpp_program_runs_the_package(
    device: str, package: Package, runner: Path, tmp_path: Path
) -> None:
    results, said = run_cpp(runner, package(device), tmp_path, make_images(device), LIBRARY)
    assert results is not None, said
    assert said == ""
    assert_close(list(results), expected(device))


def test_cpp_program_refuses_another_layout_where_packages_check(
    package: Package, runner: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AOTI_RUNTIME_CHECK_INPUTS", "1")
    for layout, fits in ((torch.contiguous_format, True), (torch.channels_last, False)):
        images = make_images(layout=layout)[-1:]
        results, said = run_cpp(runner, package("cpu"), tmp_path, images, LIBRARY)
        assert (results is not None) == fits, said
        assert ("stride" in said) == (not fits), said


def test_cpp_program_has_no_python_in_it(runner: Path) -> None:
    done = subprocess.run(["ldd", str(runner)], capture_output=True, text=True, check=True)
    names = re.findall(r"^\s*(\S+) =>", done.stdout, re.MULTILINE)
    assert "libtorch_cpu.so" in names
    assert not [name for name in names if "python" in name]


@pytest.mark.parametrize(
    ("libraries", "sentence"),
    [
        ([], "the package calls operators of wtconv_ops, and their library is not loaded; dlopen"),
        (["absent.so"], "absent.so: cannot open shared object file"),
    ],
    ids=["no library", "wrong path"],
)
def test_cpp_program_says_what_it_misses(
    package: Package, runner: Path, tmp_path: Path, libraries: list[str], sentence: str
) -> None:
    results, said = run_cpp(runner, package("cpu"), tmp_path, make_images(), *libraries)
    assert results is None
    assert said.startswith(f"aoti_runner: {sentence}")
    assert len(said.splitlines()) == 1


def test_readme_shows_lines_of_the_cpp_program() -> None:
    source = (ROOT / "tests" / "aoti_runner" / "main.cpp").read_text()
    ((_, block),) = blocks("cpp")
    lines = block.splitlines()
    assert len(lines) >= 4
    assert set(lines) <= {line.strip() for line in source.splitlines()}


def test_readme_runs_the_program_that_it_builds(
    package: Package, runner: Path, tmp_path: Path
) -> None:
    _, line = readme_lines()
    for name, target in (
        ("build/aoti_runner/aoti_runner", runner),
        ("layer.pt2", package("cpu")),
        (f"wtconv_ops/{_library.FILE_NAME}", Path(LIBRARY)),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).symlink_to(target)
    torch.save(make_images(), tmp_path / "images.pt")
    subprocess.run(["bash", "-euc", line], cwd=tmp_path, check=True)
    results = torch.load(tmp_path / "results.pt", weights_only=True)
    assert_close(list(results), expected("cpu"))
