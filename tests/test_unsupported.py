"""A library without CUDA, a torch that is too old or too new: one sentence with the way out."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from readme import ROOT
from test_library import run_python

import wtconv_ops
from wtconv_ops import _inductor, _library

CALLS_OF_EACH_OPERATOR = """
    import sys, torch
    torch.ops.load_library({library!r})  # wtconv_ops finds the operators defined
    sys.path.insert(0, {tests!r})
    from samples import Sample
    arguments = Sample(5, 6, 1).make()
    x, _, _, _, (weight,), (scale,) = arguments
    ops, mask = torch.ops.wtconv, [True] * 6
    for op, given in (
        (ops.fused_forward, arguments),
        (ops._fused_forward, arguments),
        (ops.fused_backward, (x, *arguments, mask)),
        (ops._graph_forward, (*arguments, False)),
        (ops._graph_backward, (x, *arguments, mask)),
        (ops.analysis_conv, (x, weight, scale)),
        (ops.synthesis, (x, [torch.zeros(2, 8, 3, 3)])),
    ):
        for key in ("CUDA", "MPS", "XPU"):
            try:  # the kernel of the device, which a tensor there would reach
                op.default.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.__dict__[key]),
                                      *given)
            except RuntimeError as error:
                print(str(error).splitlines()[0])
"""
SENTENCE = (
    "wtconv: this build of libwtconv_ops has CPU kernels only; move the tensors to the CPU, use "
    "the layer wtconv_ops.WTConv2d, which runs in plain PyTorch on other devices, or for CUDA "
    "reinstall with WTCONV_CUDA=1"
)


@pytest.fixture(scope="module")
def cpu_only(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The schemas and what a build without CUDA registers for other devices."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(shlex.split(compiler)[0]) is None:
        pytest.skip(f"no C++ compiler: {compiler} is not on PATH")
    folder = tmp_path_factory.mktemp("cpu_only")
    torch_folder = Path(torch.__file__).parent
    library = folder / "cpu_only.so"
    command = [
        *shlex.split(compiler),
        *("-std=c++17", "-O0", "-fPIC", "-shared", "-DTORCH_TARGET_VERSION=0x020b000000000000"),
        *("-isystem", str(torch_folder / "include"), f"-L{torch_folder / 'lib'}", "-o"),
        *(str(library), str(ROOT / "csrc/ops.cpp"), str(ROOT / "csrc/cpu_only/unavailable.cpp")),
        *("-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return library


def test_every_operator_of_a_library_without_cuda_says_what_is_missing(
    cpu_only: Path, tmp_path: Path
) -> None:
    code = CALLS_OF_EACH_OPERATOR.format(tests=str(ROOT / "tests"), library=str(cpu_only))
    said = run_python(code, tmp_path, library=None).splitlines()
    assert said == [SENTENCE] * 21


@pytest.mark.usefixtures("ops")
def test_a_library_without_cuda_names_the_variable_that_builds_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_library, "build_info", lambda: {"cuda": False})
    with pytest.raises(RuntimeError) as error:
        wtconv_ops.can_run("cuda", torch.float32, 5, 1, raise_error=True)
    assert str(error.value) == (
        "wtconv_ops: the operator library was built without CUDA; "
        "rebuild it with WTCONV_CUDA=1 or move the tensors to the CPU"
    )


def test_an_older_torch_is_named_with_the_one_to_install(tmp_path: Path) -> None:
    path = _library.default_path()
    if not path.is_file():
        pytest.skip(f"no {_library.FILE_NAME} in the package")
    code = """
        import warnings
        import torch
        torch.__version__ = torch.torch_version.TorchVersion("2.10.0+cpu")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            import wtconv_ops
        assert len(caught) == 1, caught
        print(caught[0].message)
        wtconv_ops.WTConv2d(3, 3)(torch.ones(1, 3, 7, 5)).sum().backward()
        try:
            wtconv_ops.can_run("cpu", torch.float32, 5, 3, raise_error=True)
        except RuntimeError as error:
            print(error)
    """
    said = run_python(code, tmp_path, library=path.read_bytes()).splitlines()
    reason = "(torch 2.10.0+cpu is older than 2.11; install torch>=2.11)"
    sentence = f"wtconv_ops: the operator library {_library.FILE_NAME} cannot be loaded {reason}"
    assert said == [
        f"{sentence}; WTConv2d runs plain PyTorch operations until then",
        sentence,
    ]


def test_oldest_torch_is_that_of_the_build_and_of_the_package() -> None:
    sys.path.insert(0, str(ROOT / "csrc"))
    try:
        import build_config
    finally:
        sys.path.remove(str(ROOT / "csrc"))
    assert build_config.MIN_TORCH == _library.MIN_TORCH
    oldest = ".".join(map(str, _library.MIN_TORCH))
    assert f'"torch>={oldest}"' in (ROOT / "pyproject.toml").read_text()


def test_a_torch_with_another_inductor_is_named_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_inductor._State, "warned", False)
    monkeypatch.setattr(torch, "__version__", "9.9")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _inductor._warn(AttributeError("moved"))
        _inductor._warn(AttributeError("moved"))
    (warning,) = caught
    assert "torch 9.9 has not the Inductor interface" in str(warning.message)
    assert "use a torch version that the README lists, or a newer wtconv_ops" in str(
        warning.message
    )


def test_a_torch_with_another_flop_counter_gives_one_warning_and_a_layer(tmp_path: Path) -> None:
    path = _library.default_path()
    if not path.is_file():
        pytest.skip(f"no {_library.FILE_NAME} in the package")
    code = """
        import warnings
        import torch
        import torch.utils.flop_counter
        del torch.utils.flop_counter.conv_flop_count
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            import wtconv_ops
        assert len(caught) == 1, caught
        assert caught[0].filename == __file__, caught[0].filename
        print(caught[0].message)
        assert wtconv_ops.can_run("cpu", torch.float32, 5, 3)
        layer = wtconv_ops.WTConv2d(3, 3)
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        x = torch.randn(2, 3, 7, 5)
        torch.testing.assert_close(compiled(x), layer(x))
    """
    (said,) = run_python(code, tmp_path, library=path.read_bytes()).splitlines()
    assert "lacks the FLOP counter that the package knows (ImportError:" in said
    assert said.endswith("use a torch version that the README lists, or a newer wtconv_ops")
