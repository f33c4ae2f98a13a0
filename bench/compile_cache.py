"""A folder for the caches of ``torch.compile``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def cache_folder(folder: Path) -> Iterator[None]:
    """Have Inductor and Triton keep their caches in ``folder`` within the block.

    What they hold in memory is forgotten on the way in and out: an empty folder makes a compilation
    cold, the folder of an earlier one makes it warm. Source: ``torch._inductor.utils.fresh_cache``,
    which deletes its folder.
    """
    from torch._inductor.utils import clear_caches

    names = {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": folder / "triton"}
    before = {name: os.environ.get(name) for name in names}
    clear_caches()
    os.environ.update({name: str(path) for name, path in names.items()})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        clear_caches()
