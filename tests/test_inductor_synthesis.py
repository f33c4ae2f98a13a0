"""Synthesis as a pointwise loop of Inductor, behind WTCONV_INDUCTOR_SYNTHESIS=pointwise."""

from __future__ import annotations

import pytest
import torch
from samples import DTYPES
from torch import Tensor
from torch._inductor.utils import fresh_cache, run_and_get_code
from torch.testing import assert_close

from wtconv_ops import _inductor

pytestmark = [pytest.mark.smoke, pytest.mark.usefixtures("ops", "fresh_compiler")]
OPTION = "WTCONV_INDUCTOR_SYNTHESIS"


def chain(base: Tensor, *coefficients: Tensor) -> Tensor:
    synthesis: Tensor = torch.ops.wtconv.synthesis(base.sin(), list(coefficients))
    return synthesis.relu() + base


def tensors(height: int, width: int, levels: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    shapes = [(2, 3, height, width)]
    for _ in range(levels):
        height, width = (height + 1) // 2, (width + 1) // 2
        shapes.append((2, 12, height, width))
    return [torch.randn(*shape, generator=generator).to(dtype) for shape in shapes]


def code_and_result(arguments: list[Tensor]) -> tuple[str, Tensor]:
    compiled = torch.compile(chain, fullgraph=True, dynamic=False)
    with fresh_cache(), torch.no_grad():
        result, (code,) = run_and_get_code(compiled, *arguments)
    return code, result


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_loop_fuses_with_its_neighbours(
    device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(OPTION, "pointwise")
    arguments = [tensor.to(device) for tensor in tensors(13, 10, 3, dtype)]
    code, result = code_and_result(arguments)
    assert "torch.ops.wtconv" not in code[code.index("def call(") :]
    expected = chain(*[tensor.double() for tensor in arguments]).to(dtype)
    tolerance = 2 * torch.finfo(dtype).eps if dtype != torch.float32 else 1e-6
    assert_close(result, expected, rtol=tolerance, atol=8 * tolerance)


def test_dynamic_sizes_of_all_parities_share_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OPTION, "pointwise")
    compiled = torch.compile(chain, fullgraph=True, dynamic=True)
    with fresh_cache(), torch.no_grad():
        compiled(*tensors(22, 13, 2, torch.float32))  # no two sizes are equal
        with torch._dynamo.config.patch(error_on_recompile=True):
            for size in ((21, 13), (22, 14), (15, 40)):
                arguments = tensors(*size, 2, torch.float32)
                assert_close(compiled(*arguments), chain(*arguments))


def test_the_kernel_runs_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(OPTION, raising=False)
    arguments = tensors(9, 6, 2, torch.float32)
    code, result = code_and_result(arguments)
    assert "= torch.ops.wtconv.synthesis.default(" in code
    assert_close(result, chain(*arguments))


def test_option_is_part_of_the_cache_key(monkeypatch: pytest.MonkeyPatch) -> None:
    names = []
    for value in ("extern", "pointwise"):
        monkeypatch.setenv(OPTION, value)
        names.append(_inductor.uuid())
    assert names[0] != names[1]
    monkeypatch.setenv(OPTION, "fast")
    with pytest.raises(ValueError, match="must be extern or pointwise, got 'fast'"):
        _inductor.uuid()
