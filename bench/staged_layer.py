"""WTConv in the paper's staged form: the base path, one kernel for each level, one synthesis."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from wtconv_ops.demo.reference_layer import ReferenceWTConv2d


class StagedWTConv2d(ReferenceWTConv2d):
    """Y = synthesis(base path, s_1 * (W_1 conv analysis(X)), ..., s_L * ...), level by level.

    The base path is the depthwise convolution of torch (cuDNN on a GPU) with the scale folded into
    weight and bias; `torch.ops.wtconv.analysis_conv` writes the coefficients of each level and the
    low-pass band of the next, `torch.ops.wtconv.synthesis` reads them all. The kernels run where no
    gradient is asked for; elsewhere both operators are plain PyTorch, so only the forward pass says
    something about the staged form.

    Parameters and arguments are those of `ReferenceWTConv2d`.

    Source: Aflalo et al., 2026, the fused form level by level.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to x [B, C, H, W]; returns [B, C, H, W]."""
        conv, scale = self.base_conv, self.base_scale.weight.flatten()
        weight = conv.weight * scale.reshape(-1, 1, 1, 1)
        bias = None if conv.bias is None else conv.bias * scale
        base = F.conv2d(x, weight, bias, padding="same", groups=x.shape[1])
        lowpass = x
        coefficients: list[Tensor] = []
        for level, factor in zip(self.wavelet_convs, self.wavelet_scale, strict=True):
            bands, lowpass = torch.ops.wtconv.analysis_conv(lowpass, level.weight, factor.weight)
            coefficients.append(bands)
        output: Tensor = torch.ops.wtconv.synthesis(base, coefficients)
        return output
