"""Builds wtconv_ops/libwtconv_ops.so with ninja: hatchling's build hook, and a developer command.

`pip install .` comes here through pyproject.toml; `python csrc/build_hook.py` builds in place, and
again only what changed. The environment variables are WTCONV_CUDA, TORCH_CUDA_ARCH_LIST, CUDA_HOME,
CXX and MAX_JOBS (README, "Install and run").
"""

from __future__ import annotations

import importlib.util
import platform
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ModuleNotFoundError:  # the developer command needs ninja only
    BuildHookInterface = object


def _load_config() -> ModuleType:
    """The module build_config beside this file, which hatchling runs outside any package."""
    path = Path(__file__).with_name("build_config.py")
    spec = importlib.util.spec_from_file_location("wtconv_build_config", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


config = _load_config()


def build(root: Path) -> None:
    """Compiles csrc into the package folder of `root`, only what changed.

    Args:
        root: the repository or the unpacked source distribution.

    Raises:
        BuildError: one line that says what is missing or failed and what to do.
    """
    if platform.system() != "Linux":
        raise config.BuildError(f"the library builds on Linux only, not on {platform.system()}")
    torch = config.find_torch()
    if torch is None:
        raise config.BuildError(
            "no torch >= 2.11 with headers found; "
            f"install one first: pip install {config.BUILD_TORCH}"
        )
    compiler = config.find_compiler()
    ninja = config.find_ninja()
    jobs = config.job_count()
    cuda = config.choose_cuda(root)
    folder = root / config.BUILD_DIR
    folder.mkdir(exist_ok=True)
    link = folder / f"torch-{torch.version}"
    link.unlink(missing_ok=True)
    link.symlink_to(torch.root.resolve())
    (folder / "build.ninja").write_text(config.ninja_text(root, torch, compiler, cuda))
    archs = f"CUDA {' '.join(cuda.archs)}" if cuda else "no CUDA"
    print(f"wtconv_ops: torch {torch.version}, {compiler[0]}, {archs}, {jobs} jobs", flush=True)
    command = [ninja, "-C", str(root), "-f", f"{config.BUILD_DIR}/build.ninja", "-j", str(jobs)]
    status = subprocess.run(command, check=False).returncode
    if status != 0:
        raise config.BuildError(
            f"the build failed (ninja exit status {status}); the compiler's message stands above"
        )


class LibraryBuildHook(BuildHookInterface):
    """Builds the library before hatchling packs the wheel."""

    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        """Asks for a torch only where none with headers is found: pip would download it."""
        return [] if config.find_torch() else [config.BUILD_TORCH]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compiles, adds the library to the wheel and tags it: any Python 3, this platform."""
        del version
        _exit_with_line(Path(self.root))
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-linux_{platform.machine()}"
        build_data["artifacts"].append(f"/{config.LIBRARY}")


def _exit_with_line(root: Path) -> None:
    """Runs `build`; on failure leaves with its one line, without a traceback."""
    try:
        build(root)
    except config.BuildError as error:
        raise SystemExit(f"wtconv_ops: {error}") from None


if __name__ == "__main__":
    _exit_with_line(Path(__file__).resolve().parent.parent)
