"""What a run ran on: driver, commit of a checkout, header line."""

from __future__ import annotations

import subprocess
from pathlib import Path

import torch


def gpu_line(device: torch.device | str) -> str:
    """Card, driver and torch, in one line."""
    return (
        f"{torch.cuda.get_device_name(device)}, driver {driver_version()}; "
        f"torch {torch.__version__}"
    )


def driver_version() -> str:
    """Version of the NVIDIA driver, such as "580.65.06"; "unknown" where nothing says it."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return (output_of(query) or "").split()[0]
    except IndexError:
        pass
    try:
        return Path("/proc/driver/nvidia/version").read_text().split("Module")[1].split()[0]
    except (OSError, IndexError):
        return "unknown"


def checkout_commit(folder: Path) -> str | None:
    """Commit of the git repository whose top is ``folder``, such as "4a84da2" or "4a84da2-dirty".

    None where ``folder`` is not one, or git does not say.
    """
    git = ["git", "-C", str(folder)]
    top = output_of([*git, "rev-parse", "--show-toplevel"])
    if not top or Path(top).resolve() != folder.resolve():
        return None
    return output_of([*git, "describe", "--always", "--dirty", "--abbrev=7", "--exclude=*"])


def output_of(command: list[str]) -> str | None:
    """What ``command`` prints, stripped; None where it cannot run or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
