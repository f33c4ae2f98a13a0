"""WTConvNeXt in timm: importing this module registers the models with timm's registry.

    >>> import timm
    >>> import wtconv_ops.timm
    >>> model = timm.create_model("wtconvnext_tiny", num_classes=10)

Nothing else in the package imports it. It needs timm, the extra ``timm`` of this package.
"""

from __future__ import annotations

try:
    import timm as _timm  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"wtconv_ops.timm needs timm, which cannot be imported ({error}): "
        'pip install "wtconv_ops[timm]"'
    ) from error

from .checkpoint import checkpoint_filter_fn, load_checkpoint
from .wtconvnext import WTConvNeXt, wtconvnext_base, wtconvnext_small, wtconvnext_tiny

__all__ = [
    "WTConvNeXt",
    "checkpoint_filter_fn",
    "load_checkpoint",
    "wtconvnext_base",
    "wtconvnext_small",
    "wtconvnext_tiny",
]
