"""Whether torch itself can run a package for a device: one of sin(), with nothing of wtconv_ops.

python aoti_control.py DEVICE FILE
"""

from __future__ import annotations

import functools
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch._inductor
from torch import Tensor, nn


@functools.cache
def problem(device: str, script: str = __file__) -> str | None:
    """Why torch can run no package for ``device``; None if it can.

    A new process makes the package, loads it and compares its result, because a loader that fails
    may take the process with it.

    Args:
        device: ``"cpu"`` or ``"cuda"``.
        script: What the process runs.
    """
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, script, device, str(Path(folder) / "sin.pt2")],
            capture_output=True,
            text=True,
            check=False,
            cwd=folder,
        )
    if done.returncode == 0:
        return None
    said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    last = f", {said[-1]}" if done.returncode > 0 and said else ""
    return (
        f"torch {torch.__version__} itself cannot load and run a package of sin() on {device} of "
        f"this machine: exit code {done.returncode}{last}"
    )


class Sin(nn.Module):
    """sin(x)."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sin()


def main(device: str, file: str) -> None:
    """The new process."""
    x = torch.linspace(-1, 1, 12, device=device)
    program = torch.export.export(Sin(), (x,))
    torch._inductor.aoti_compile_and_package(program, package_path=file)
    torch.testing.assert_close(torch._inductor.aoti_load_package(file)(x), x.sin())


if __name__ == "__main__":
    main(*sys.argv[1:])
