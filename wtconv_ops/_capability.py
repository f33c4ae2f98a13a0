"""One predicate that says whether the kernels can run: :func:`can_run`."""

from __future__ import annotations

import torch

from . import _library
from ._checks import DTYPE_NAMES, DTYPES, MAX_KERNEL_SIZE, MAX_LEVELS

_Problem = tuple[type[Exception], str]


def can_run(
    device: torch.device | str,
    dtype: torch.dtype,
    kernel_size: int,
    levels: int,
    *,
    raise_error: bool = False,
) -> bool:
    """Whether ``torch.ops.wtconv.fused_forward`` has a kernel for these arguments here.

    The layer, the doctor and the error texts all ask this one predicate; where it is False the
    layer runs plain PyTorch operations.

    Args:
        device: Device of the input, such as ``"cpu"`` or ``torch.device("cuda", 0)``.
        dtype: dtype of the input: float32, float64, float16 or bfloat16.
        kernel_size: k of the depthwise kernels, 1 to 31.
        levels: Number of wavelet levels, 1 to 32.
        raise_error: Raise the reason instead of returning False.

    Returns:
        True if the kernels can run.

    Raises:
        TypeError: With ``raise_error``: ``dtype`` is not supported.
        ValueError: With ``raise_error``: ``kernel_size`` or ``levels`` is out of range.
        RuntimeError: With ``raise_error``: no library, or no kernels for ``device``.

    Equivalent to:
        >>> wtconv_ops.can_run("cpu", torch.float32, kernel_size=5, levels=3)
        True
    """
    problem = _arguments_problem(dtype, kernel_size, levels)
    if problem is None:
        problem = _device_problem(torch.device(device))
    if problem is None:
        return True
    if raise_error:
        kind, sentence = problem
        raise kind(f"wtconv_ops: {sentence}")
    return False


def _arguments_problem(dtype: torch.dtype, kernel_size: int, levels: int) -> _Problem | None:
    """Reason why the kernels do not take a dtype, kernel size or number of levels."""
    info = _library.build_info()
    names = info.get("dtypes", list(DTYPE_NAMES.values()))
    if dtype not in DTYPES or DTYPE_NAMES[dtype] not in names:
        got = DTYPE_NAMES.get(dtype, str(dtype))
        return TypeError, f"dtype must be one of {', '.join(names)}, got {got}"
    max_kernel_size = info.get("max_kernel_size", MAX_KERNEL_SIZE)
    if not 1 <= kernel_size <= max_kernel_size:
        return ValueError, f"kernel_size must be 1 to {max_kernel_size}, got {kernel_size}"
    max_levels = info.get("max_levels", MAX_LEVELS)
    if not 1 <= levels <= max_levels:
        return ValueError, f"levels must be 1 to {max_levels}, got {levels}"
    return None


def _device_problem(device: torch.device) -> _Problem | None:
    """Reason why there are no kernels for a device."""
    if _library.library() is None:
        return RuntimeError, str(_library.problem())
    if device.type in ("cpu", "meta"):
        return None
    if device.type != "cuda":
        return RuntimeError, f"there are no kernels for {device.type} devices, only cpu and cuda"
    info = _library.build_info()
    if not info.get("cuda", False):
        return RuntimeError, (
            "the operator library was built without CUDA; "
            "rebuild it with WTCONV_CUDA=1 or move the tensors to the CPU"
        )
    if torch.version.hip is not None:
        return RuntimeError, "there are no kernels for ROCm, only for NVIDIA GPUs"
    if not torch.cuda.is_available():
        return RuntimeError, "torch sees no CUDA device"
    capability = torch.cuda.get_device_capability(device)
    archs = [str(arch) for arch in info.get("cuda_archs", [])]
    if archs and not any(_serves(arch, capability) for arch in archs):
        return RuntimeError, (
            f"the operator library was built for compute capabilities {', '.join(archs)}, the "
            f"device has {capability[0]}.{capability[1]}; rebuild it with "
            f"TORCH_CUDA_ARCH_LIST={capability[0]}.{capability[1]}"
        )
    return None


def _serves(arch: str, capability: tuple[int, int]) -> bool:
    """Whether code for ``arch`` ("9.0", "90", "sm_90a", "12.0+PTX") runs on ``capability``."""
    intermediate = "PTX" in arch.upper() or arch.startswith("compute")
    digits = "".join(char for char in arch if char.isdigit())
    if len(digits) < 2:
        return False
    major, minor = int(digits[:-1]), int(digits[-1])
    specific = arch.lower().removesuffix("+ptx")[-1:] in ("a", "f")
    if specific:
        return (major, minor) == capability
    if intermediate:
        return (major, minor) <= capability
    return major == capability[0] and minor <= capability[1]
