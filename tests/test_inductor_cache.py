"""Compile caches: hits in a second process, never with artifacts of another version."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = [pytest.mark.smoke, pytest.mark.slow, pytest.mark.usefixtures("ops")]

# Compiles the layer, in inference and in training. The version in the first argument has not the
# internal operators of this one, so that a graph compiled by this one cannot run there.
SCRIPT = """
    import sys, torch, wtconv_ops
    import torch._inductor.compile_fx  # reads every operator
    from torch._dynamo.utils import counters
    from wtconv_ops import _inductor

    if sys.argv[1] != "this":
        wtconv_ops.__version__ = sys.argv[1]
        for name in _inductor.GRAPH_OPS:
            setattr(torch.ops.wtconv, name, None)
        _inductor._plan_forward = _inductor._plan_backward = lambda op, *args: (op, args)

    torch.manual_seed(0)
    layer = wtconv_ops.WTConv2d(4, 4, 3, wt_levels=2)
    compiled = torch.compile(layer, fullgraph=True)
    x = torch.randn(2, 4, 7, 6, requires_grad=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), layer(x))
    ours, = torch.autograd.grad(compiled(x).square().sum(), x)
    theirs, = torch.autograd.grad(layer(x).square().sum(), x)
    torch.testing.assert_close(ours, theirs)
    for group, name in (("inductor", "fxgraph_cache"), ("aot_autograd", "autograd_cache")):
        for kind in ("hit", "miss", "bypass"):
            print(name, kind, counters[group][f"{name}_{kind}"])
"""


def counts(folder: Path, version: str) -> dict[str, int]:
    """Uses of the caches in a new process."""
    script = folder / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    root = str(Path(__file__).resolve().parent.parent)
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"),
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])),
    }
    environment.pop("TORCHINDUCTOR_FORCE_DISABLE_CACHES", None)
    done = subprocess.run(
        [sys.executable, str(script), version],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if "_cache " in line]
    return {f"{name} {kind}": int(number) for name, kind, number in rows}


def test_caches_hit_for_the_same_version_only(tmp_path: Path) -> None:
    """Three processes on one cache folder, the last one after an upgrade."""
    first = counts(tmp_path, "this")
    assert first["autograd_cache miss"] == 2
    assert first["autograd_cache hit"] == first["fxgraph_cache hit"] == 0
    second = counts(tmp_path, "this")
    assert second["autograd_cache hit"] == 2  # inference, training
    assert second["autograd_cache miss"] == second["fxgraph_cache miss"] == 0
    upgraded = counts(tmp_path, "0.2.0.test")
    assert upgraded["autograd_cache miss"] == 2
    assert upgraded["autograd_cache hit"] == upgraded["fxgraph_cache hit"] == 0
    for run in (first, second, upgraded):
        assert run["autograd_cache bypass"] == run["fxgraph_cache bypass"] == 0
