"""A library file that is truncated, foreign or of another version: a warning, never a crash."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_library import run_python

import wtconv_ops
from wtconv_ops import _library

VERSION = b'"version": "' + wtconv_ops.__version__[:1].encode()

PLAIN_PATH = """
    import warnings
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        import wtconv_ops
    import torch
    from wtconv_ops import doctor
    assert len(caught) == 1, caught
    print(caught[0].message)
    assert not wtconv_ops.can_run("cpu", torch.float32, 5, 3)
    layer = wtconv_ops.WTConv2d(3, 3, wt_levels=2)
    x = torch.randn(1, 3, 7, 5)
    layer(x).sum().backward()
    parameters = layer.base_conv.weight, layer.base_conv.bias, layer.base_scale.weight
    weights = [conv.weight for conv in layer.wavelet_convs]
    scales = [scale.weight for scale in layer.wavelet_scale]
    expected = wtconv_ops.reference.wtconv2d(x, *parameters, weights, scales)
    torch.testing.assert_close(layer(x), expected, rtol=0.0, atol=0.0)
    assert "plain PyTorch" in doctor.report()
"""


@pytest.fixture(scope="module")
def library() -> bytes:
    """The bytes of the library that was built."""
    path = _library.default_path()
    if not path.is_file():
        pytest.skip(f"no {_library.FILE_NAME} in the package")
    return path.read_bytes()


@pytest.mark.parametrize("eighths", [1, 4, 7])
def test_truncated_library_is_refused_before_it_is_mapped(tmp_path, library, eighths):
    size = eighths * len(library) // 8
    assert "the file is truncated" in run_python(PLAIN_PATH, tmp_path, library=library[:size])


def test_library_without_its_last_byte_is_truncated(tmp_path, library):
    for cut, truncated in ((0, False), (1, True)):
        path = tmp_path / "library.so"
        path.write_bytes(library[: len(library) - cut])
        assert _library._is_truncated(path) is truncated


@pytest.mark.parametrize(
    "content", [b"", b"\x7fELF", b"\x7fELF\x02\x01" + bytes(10), bytes(100)], ids=len
)
def test_file_without_an_elf_header_is_left_to_the_loader(tmp_path, content):
    path = tmp_path / "library.so"
    path.write_bytes(content)
    assert not _library._is_truncated(path)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (VERSION, b'"version": "x', "it is of version x"),
        (b'{"version"', b'["version"', "wtconv_build_info returns no JSON"),
        (b"wtconv_build_info\0", b"wtconv_build_text\0", "it has no wtconv_build_info"),
    ],
    ids=["another version", "no JSON", "no build info"],
)
def test_library_that_does_not_fit_the_package_gives_the_plain_path(
    tmp_path, library, old, new, said
):
    assert old in library
    changed = library.replace(old, new)
    assert len(changed) == len(library)
    assert said in run_python(PLAIN_PATH, tmp_path, library=changed)


def test_library_without_the_operators_gives_the_plain_path(tmp_path):
    other = Path(torch.__file__).parent / "lib" / "libtorch_global_deps.so"
    if not other.is_file():
        pytest.skip(f"this torch has no {other.name}")
    said = run_python(PLAIN_PATH, tmp_path, library=other.read_bytes())
    assert "does not define the operators" in said
