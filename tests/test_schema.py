"""The schemas are the public contract: models, exports and users call the operators by them."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline

from wtconv_ops import _checks, _inductor, _library

pytestmark = [pytest.mark.smoke, pytest.mark.usefixtures("ops")]


def schema(name: str) -> str:
    text = str(getattr(torch.ops.wtconv, name).default._schema)
    return text.replace(", ", ",\n  ").replace("(Tensor", "(\n  Tensor", 1)


def test_schema_of_fused_forward():
    assert_expected_inline(
        schema("fused_forward"),
        """\
wtconv::fused_forward(
  Tensor input,
  Tensor base_weight,
  Tensor? base_bias,
  Tensor base_scale,
  Tensor[] wavelet_weights,
  Tensor[] wavelet_scales) -> Tensor""",
    )


def test_schema_of_mixed_fused_forward():
    assert_expected_inline(
        schema("_fused_forward"),
        """\
wtconv::_fused_forward(
  Tensor input,
  Tensor base_weight,
  Tensor? base_bias,
  Tensor base_scale,
  Tensor[] wavelet_weights,
  Tensor[] wavelet_scales) -> Tensor""",
    )


def test_schema_of_fused_backward():
    assert_expected_inline(
        schema("fused_backward"),
        """\
wtconv::fused_backward(
  Tensor grad_output,
  Tensor input,
  Tensor base_weight,
  Tensor? base_bias,
  Tensor base_scale,
  Tensor[] wavelet_weights,
  Tensor[] wavelet_scales,
  bool[] output_mask) -> (Tensor,
  Tensor,
  Tensor,
  Tensor,
  Tensor,
  Tensor)""",
    )


def test_schema_of_graph_operators():
    parameters = (
        "Tensor input, Tensor base_weight, Tensor? base_bias, Tensor base_scale, "
        "Tensor[] wavelet_weights, Tensor[] wavelet_scales"
    )
    six = ", ".join(["Tensor"] * 6)
    assert [
        str(getattr(torch.ops.wtconv, name).default._schema) for name in _inductor.GRAPH_OPS
    ] == [
        f"wtconv::_graph_forward({parameters}, bool channels_last) -> Tensor",
        f"wtconv::_graph_backward(Tensor grad_output, {parameters}, bool[] output_mask) -> ({six})",
    ]


def test_schema_of_building_blocks():
    assert_expected_inline(
        schema("analysis_conv") + "\n" + schema("synthesis"),
        """\
wtconv::analysis_conv(
  Tensor input,
  Tensor weight,
  Tensor scale) -> (Tensor,
  Tensor)
wtconv::synthesis(
  Tensor base,
  Tensor[] coefficients) -> Tensor""",
    )


NAMES = [
    *("fused_forward", "_fused_forward", "fused_backward", *_inductor.GRAPH_OPS),
    *("analysis_conv", "synthesis"),
]


def test_schemas_above_are_those_of_the_whole_registry():
    registry = torch._C._dispatch_get_all_op_names()
    assert sorted(name for name in registry if name.startswith("wtconv::")) == sorted(
        f"wtconv::{name}" for name in NAMES
    )


@pytest.mark.parametrize("name", NAMES)
def test_operators_are_functional(name):
    schema = getattr(torch.ops.wtconv, name).default._schema
    assert not schema.is_mutable
    assert all(argument.alias_info is None for argument in [*schema.arguments, *schema.returns])


def test_library_and_checks_agree_on_limits():
    info = _library.build_info()
    if not info:
        pytest.skip("the library that defines the operators gives no build information")
    assert info["max_kernel_size"] == _checks.MAX_KERNEL_SIZE
    assert info["max_levels"] == _checks.MAX_LEVELS
    assert info["dtypes"] == list(_checks.DTYPE_NAMES.values())
