"""Wavelet convolution (WTConv) as one fused PyTorch operator for CPU and CUDA.

Importing the package loads the operator library and registers the operators with PyTorch. Where
the library is missing, one warning says so and everything runs as plain PyTorch operations.
"""

from . import functional, reference
from ._backend import register as _register_backend
from ._capability import can_run
from ._convert import ConversionReport, convert
from ._decompositions import decompositions
from ._register import register as _register
from .functional import wtconv2d
from .haar import dwt2d, idwt2d
from .nn import WTConv2d

__all__ = [
    "ConversionReport",
    "WTConv2d",
    "__version__",
    "can_run",
    "convert",
    "decompositions",
    "dwt2d",
    "functional",
    "idwt2d",
    "reference",
    "wtconv2d",
]

__version__ = "0.1.0"

_register()
_register_backend()
