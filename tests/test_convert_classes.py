"""convert and the class of a layer: what a class does beside a layer's forward is never lost."""

from __future__ import annotations

from abc import ABC
from typing import Any, Generic, TypeVar

import pytest
import torch
from layer_cases import make_input, randomize
from test_convert import gradients_of
from torch import Tensor, nn
from upstream_layers import Parts, reference_layer

from wtconv_ops import WTConv2d, convert
from wtconv_ops.demo.reference_layer import ReferenceWTConv2d

Anything = TypeVar("Anything")


class SameForward(ReferenceWTConv2d):
    """Calls the forward that it extends and nothing else."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class OtherForOneImage(ReferenceWTConv2d):
    """Equal for every batch but one of one image, which no run of convert has."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if x.shape[0] > 1 else y.abs()


class Encoder(ReferenceWTConv2d):
    def encode(self, x: Tensor) -> Tensor:
        return self.base_conv(x)


class Frozen(ReferenceWTConv2d):
    """Never in training mode."""

    def train(self, mode: bool = True) -> Frozen:
        return super().train(False)


class Described(ReferenceWTConv2d):
    @property
    def receptive_field(self) -> int:
        return 2


class Counted:
    """Counts its calls, whatever it is mixed into."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)  # type: ignore[misc, no-any-return]


class Mixed(Counted, ReferenceWTConv2d):
    pass


class Exporting:
    """What a base behind nn.Module adds."""

    def export(self) -> None:
        pass


class WithBaseBehind(ReferenceWTConv2d, Exporting):
    pass


class Standalone(Parts):
    """A layer class with a public method of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return ReferenceWTConv2d.forward(self, x)  # type: ignore[arg-type]

    def lowpass(self, x: Tensor) -> Tensor:
        return x


class Sized(Parts):
    """A layer class that Python's own functions know."""

    def forward(self, x: Tensor) -> Tensor:
        return ReferenceWTConv2d.forward(self, x)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return 1


class WithGain(Parts):
    """Equal only where nobody passes the second argument."""

    def forward(self, x: Tensor, gain: float = 1.0) -> Tensor:
        return gain * ReferenceWTConv2d.forward(self, x)  # type: ignore[arg-type]


class Overriding(Parts):
    """A layer class that takes part in the work of nn.Module."""

    def forward(self, x: Tensor) -> Tensor:
        return ReferenceWTConv2d.forward(self, x)  # type: ignore[arg-type]

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        return super()._apply(fn, recurse)


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (SameForward(3, 3), "its class SameForward extends ReferenceWTConv2d by forward"),
        (OtherForOneImage(3, 3), "its class OtherForOneImage extends ReferenceWTConv2d by forward"),
        (Encoder(3, 3), "its class Encoder extends ReferenceWTConv2d by encode"),
        (Frozen(3, 3), "its class Frozen extends ReferenceWTConv2d by train"),
        (Described(3, 3), "its class Described extends ReferenceWTConv2d by receptive_field"),
        (Mixed(3, 3), "its class Counted has methods of its own: forward"),
        (WithBaseBehind(3, 3), "its class Exporting has methods of its own: export"),
        (Standalone(3), "its class Standalone has methods of its own: lowpass"),
        (Sized(3), "its class Sized has methods of its own: __len__"),
        (WithGain(3), "its forward takes more than one input: gain"),
        (Overriding(3), "its class Overriding has methods of its own: _apply"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else None,
)
def test_a_class_with_behaviour_of_its_own_is_left_alone(layer: nn.Module, reason: str) -> None:
    model = nn.Sequential(randomize(layer))
    for report in (convert(model), convert(model, unproven=True)):
        assert report.swapped == ()
        assert [entry.reason for entry in report.left] == [reason]
    assert model[0] is layer


class Smaller(ReferenceWTConv2d):
    """Fixes arguments of the constructor."""

    note = "7x7"

    def __init__(self, channels: int) -> None:
        super().__init__(channels, channels, 7, wt_levels=2)

    def extra_repr(self) -> str:
        return self.note


class WithHelper(Parts):
    def forward(self, x: Tensor) -> Tensor:
        return self._run(x)

    def _run(self, x: Tensor) -> Tensor:
        return ReferenceWTConv2d.forward(self, x)  # type: ignore[arg-type]


class Typed(WithHelper, Generic[Anything], ABC):
    """Bases that do nothing."""


@pytest.mark.parametrize(
    "layer", [Smaller(3), WithHelper(3), Typed(3)], ids=lambda one: type(one).__name__
)
def test_a_class_without_is_swapped(layer: nn.Module) -> None:
    layer = randomize(layer)
    input = make_input(2, 3, 13, 10)
    expected = layer(input)
    report = convert(layer)
    assert report.swapped[0].proven
    torch.testing.assert_close(report.model(input), expected, rtol=1e-4, atol=1e-4)


def test_the_default_device_is_not_that_of_the_comparison() -> None:
    layer = reference_layer(3)
    with torch.device("meta"):
        report = convert(layer)
    assert report.swapped[0].proven


@pytest.mark.parametrize("shared", ["parameter", "module"])
def test_levels_that_share_parameters_go_on_sharing_them(shared: str) -> None:
    layer = reference_layer(3, wt_levels=3).double()
    if shared == "module":
        layer.wavelet_convs[2] = layer.wavelet_convs[0]
        layer.wavelet_scale[1] = layer.wavelet_scale[0]
    else:
        layer.wavelet_convs[2].weight = layer.wavelet_convs[0].weight
        layer.wavelet_scale[1].weight = layer.wavelet_scale[0].weight
    input = make_input(2, 3, 13, 10, dtype=torch.float64)
    before, expected = list(layer.parameters()), gradients_of(layer, input)
    model = convert(layer).model
    assert isinstance(model, WTConv2d)
    trainable = [parameter for parameter in before if parameter.requires_grad]
    assert {id(p) for p in model.parameters()} == {id(p) for p in trainable}
    found = dict(zip(map(id, model.parameters()), gradients_of(model, input)[2:], strict=True))
    torch.testing.assert_close(gradients_of(model, input)[:2], expected[:2])
    for parameter, gradient in zip(trainable, expected[2:], strict=True):
        torch.testing.assert_close(found[id(parameter)], gradient)
