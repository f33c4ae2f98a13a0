"""``python -m bench compile``: the layer in and out of ``torch.compile``, alone and in a network.

Each model is built twice on the same weights, with the reference layer and with ours; each runs
eagerly and compiled, ours on a GPU also as a replayed CUDA graph, block and network under
reduce-overhead too. Cold compilation starts from an empty cache folder, warm compilation forgets
the compiled code and finds that folder filled.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from bench import generated_code
from bench.compile_cache import cache_folder
from bench.cuda_memory import peak_mib
from bench.cuda_providers import LAYOUTS
from bench.cuda_timing import Call, ColdTimer, Timer, interleaved_medians
from bench.graph_trace import device_work, replay_gap_us
from bench.shapes import Size
from bench.timing import WallClock
from wtconv_ops import WTConv2d
from wtconv_ops.demo.network import Block, randomise
from wtconv_ops.demo.reference_layer import ReferenceWTConv2d

LAYERS: dict[str, Callable[..., nn.Module]] = {"reference": ReferenceWTConv2d, "ours": WTConv2d}
#: float32, or bfloat16 under autocast with float32 parameters.
PRECISIONS = ("float32", "bfloat16")
MODES = ("inference", "training")
BLOCK, NETWORK = "block", "WTConvNeXt-T"
SUBJECTS = ("layer", BLOCK, NETWORK)
EAGER, OURS, GRAPH = "ours eager", "ours compiled", "ours CUDA graph"  # variants
REPLAYED = "ours reduce-overhead"  # a variant of block and network on a GPU
# Variants of the network: the one it was made from.
PEER, PEER_REPLAYED = "ConvNeXt-T compiled", "ConvNeXt-T reduce-overhead"
VARIANTS = ("reference eager", "reference compiled", EAGER, OURS, PEER)
VARIANTS += (REPLAYED, PEER_REPLAYED, GRAPH)
#: Relative error of the output against the eager reference that a variant may have.
LIMITS = {"float32": 1e-4, "bfloat16": 5e-2}


@dataclass(frozen=True)
class Subject:
    """A model and the input it is timed on."""

    name: str
    size: Size
    build: Callable[[Callable[..., nn.Module]], nn.Module]


@dataclass(frozen=True)
class CompileSettings:
    """What to time."""

    subjects: tuple[Subject, ...]
    device: str
    precisions: tuple[str, ...] = PRECISIONS
    layouts: tuple[str, ...] = tuple(LAYOUTS)
    modes: tuple[str, ...] = MODES
    rounds: int = 11
    variants: tuple[str, ...] = VARIANTS  # those that a model, device and mode have


@dataclass(frozen=True)
class CompileRow:
    """One variant of a model in one mode; the columns of the CSV file. None: does not apply."""

    subject: str
    shape: str
    precision: str
    layout: str
    mode: str
    variant: str
    ms: float
    kernels: int | None  # launched on the GPU; on the CPU those that compiled code calls
    copies: int  # aten::copy_, and compiled kernels that only copy; of another dtype among them
    graphs: int | None
    graph_breaks: int | None
    recompiles: int | None  # graphs more for another, odd size; of the network not asked
    peak_mib: float | None  # of a call, its image included
    gap_us: float | None  # longest time between two kernels of a graph that reduce-overhead replays
    cold_compile_s: float | None
    warm_compile_s: float | None
    error: float | None  # of the peer there is none


class WrongNumbersError(Exception):
    """A variant is too far from the eager reference."""


def subjects(names: Sequence[str], batch: int, quick: bool = False) -> tuple[Subject, ...]:
    """The layer and the block of the first stage of WTConvNeXt-T, and the network.

    Args:
        names: Those of `SUBJECTS` that are wanted; the network needs timm.
        batch: Images of a batch.
        quick: A layer and a block of a few channels, to test the benchmark.
    """
    channels, side, levels = (4, 14, 2) if quick else (96, 56, 5)

    def layer(of: Callable[..., nn.Module]) -> nn.Module:
        return of(channels, channels, kernel_size=5, wt_levels=levels)

    size = Size(batch, channels, side, side)
    every = (
        Subject("layer", size, layer),
        Subject(BLOCK, size, lambda of: Block(layer(of), channels)),
        Subject(NETWORK, Size(batch, 3, 224, 224), _network),
    )
    return tuple(subject for subject in every if subject.name in names)


def has_timm() -> bool:
    """Whether the network can be built."""
    return find_spec("timm") is not None


def _network(layer: Callable[..., nn.Module]) -> nn.Module:
    from wtconv_ops.timm import WTConvNeXt

    return WTConvNeXt(wtconv_class=layer)


def _peer() -> nn.Module:
    import timm

    model: nn.Module = timm.create_model("convnext_tiny")
    return model


def _activities(cuda: bool) -> list[ProfilerActivity]:
    return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]


def _caches_of(variant: str, folder: str) -> Path:
    return Path(folder) / variant.replace(" ", "_")


def run(settings: CompileSettings, progress: Callable[[str], None]) -> Iterator[list[CompileRow]]:
    """Check every variant against the eager reference, then time it.

    Yields:
        The rows of one model in one mode; none where it has none of the variants.

    Raises:
        WrongNumbersError: a variant's output is too far from the reference's.
    """
    device = torch.device(settings.device)
    clock: Timer = ColdTimer(device) if device.type == "cuda" else WallClock()
    for subject in settings.subjects:
        for precision in settings.precisions:
            for layout in settings.layouts:
                progress(f"{subject.name} {precision} {layout}")
                case = _Case(subject, precision, layout, device, settings.variants)
                for mode in settings.modes:
                    yield case.measure(mode, clock, settings.rounds)


class _Case:
    """A subject in one precision and layout, built with both layers on the same weights."""

    def __init__(
        self,
        subject: Subject,
        precision: str,
        layout: str,
        device: torch.device,
        variants: Sequence[str] = VARIANTS,
    ) -> None:
        self.subject, self.precision, self.layout, self.device = subject, precision, layout, device
        self.wanted = variants
        self.models = {name: subject.build(layer) for name, layer in LAYERS.items()}
        randomise(self.models["reference"], seed=1)
        self.models["ours"].load_state_dict(self.models["reference"].state_dict())
        for model in self.models.values():
            model.to(device)
        size = subject.size
        self.image = self._image(size.height, size.width)
        self.odd = self._image(size.height + 1, size.width + 3)

    def _image(self, height: int, width: int) -> Tensor:
        generator = torch.Generator().manual_seed(2)
        size = (self.subject.size.batch, self.subject.size.channels, height, width)
        image = torch.randn(size, generator=generator).to(self.device)
        return image.to(memory_format=LAYOUTS[self.layout])

    def _precision(self) -> AbstractContextManager[Any]:
        if self.precision == "float32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    def _call(self, model: nn.Module, mode: str, image: Tensor) -> Call:
        """One pass, or one training step with the gradients of everything."""
        leaf = image.detach().requires_grad_()
        leaves = [leaf, *(p for p in model.parameters() if p.requires_grad)]

        def inference() -> Tensor:
            with torch.no_grad(), self._precision():
                output: Tensor = model(image)
            return output

        def training() -> tuple[Tensor, ...]:
            with self._precision():
                loss = model(leaf).float().square().mean()
            return torch.autograd.grad(loss, leaves)

        return inference if mode == "inference" else training

    def _output(self, model: nn.Module, mode: str) -> Tensor:
        leaf = self.image.detach().requires_grad_()
        with torch.set_grad_enabled(mode == "training"), self._precision():
            output: Tensor = model(leaf if mode == "training" else self.image)
        return output.detach().float()

    def measure(self, mode: str, clock: Timer, rounds: int) -> list[CompileRow]:
        """A row for each variant; the samples of the variants take turns.

        Eager and compiled calls are timed with the host's time, the replay of a CUDA graph without:
        nothing is left of it. Kernels, copies and memory of the graph are those of the eager call
        that it captured. The profiler comes last: it can slow every launch after it.
        """
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            models, found = self._variants(mode, folder)
            calls = {name: self._call(model, mode, self.image) for name, model in models.items()}
            for name, call in calls.items():  # every compilation forgets the code of those before
                with cache_folder(_caches_of(name, folder)):
                    call()
        if self.device.type == "cuda":
            for name, model, facts in self._replayed(mode):
                calls[name], found[name] = self._call(model, mode, self.image), facts
                for _ in range(4):  # compiles, records, replays
                    calls[name]()
        samplers = {(name,): clock.prepare(call, "eager") for name, call in calls.items()}
        if self.device.type == "cuda" and GRAPH in self.wanted:
            call = self._call(self.models["ours"], mode, self.image)
            samplers[GRAPH,] = clock.prepare(call, "graph")
            calls[GRAPH], found[GRAPH] = call, found[EAGER]
        medians = interleaved_medians(samplers, rounds)
        del samplers  # a captured graph gives its memory back
        return [
            self._row(mode, name, medians[name,], self._counts(name, call, found[name]))
            for name, call in calls.items()
        ]

    def _variants(
        self, mode: str, folder: str
    ) -> tuple[dict[str, nn.Module], dict[str, dict[str, Any]]]:
        """The models by variant, and what each compilation took; caches stay in ``folder``."""
        exact = self._output(self.models["reference"], mode)
        models: dict[str, nn.Module] = {}
        found: dict[str, dict[str, Any]] = {}
        for name, model in self.models.items():
            eager, compiled = f"{name} eager", f"{name} compiled"
            if eager in self.wanted:
                models[eager] = model
            if eager in self.wanted or (eager == EAGER and GRAPH in self.wanted):
                found[eager] = {"error": self._error(model, mode, exact)}
            if compiled in self.wanted:
                models[compiled], facts = self._compile(model, mode, _caches_of(compiled, folder))
                found[compiled] = {**facts, "error": self._error(models[compiled], mode, exact)}
        if self.subject.name == NETWORK and PEER in self.wanted:
            peer = _peer().to(self.device)
            models[PEER], found[PEER] = self._compile(peer, mode, _caches_of(PEER, folder))
        return models, found

    def _replayed(self, mode: str) -> Iterator[tuple[str, nn.Module, dict[str, Any]]]:
        """The models under reduce-overhead by variant, with the error of ours."""
        models: dict[str, nn.Module] = {}
        if self.subject.name in (BLOCK, NETWORK) and REPLAYED in self.wanted:
            models[REPLAYED] = self.models["ours"]
        if self.subject.name == NETWORK and PEER_REPLAYED in self.wanted:
            models[PEER_REPLAYED] = _peer().to(self.device)
        options: Any = {"mode": "reduce-overhead", "dynamic": False}
        for name, model in models.items():
            compiled = cast(nn.Module, torch.compile(model, **options))
            facts: dict[str, Any] = {}
            if name == REPLAYED:
                exact = self._output(self.models["reference"], mode)
                facts["error"] = self._error(compiled, mode, exact)
            torch.compiler.cudagraph_mark_step_begin()  # no backward follows that forward
            yield name, compiled, facts

    def _error(self, model: nn.Module, mode: str, exact: Tensor) -> float:
        error = float((self._output(model, mode) - exact).norm() / exact.norm())
        if not error <= LIMITS[self.precision]:  # also for NaN
            raise WrongNumbersError(
                f"{self.subject.name} {self.precision} {self.layout}: relative error {error:.2e} "
                f"against the eager reference, it may have {LIMITS[self.precision]:.0e}"
            )
        return error

    def _compile(
        self, model: nn.Module, mode: str, folder: Path
    ) -> tuple[nn.Module, dict[str, Any]]:
        """The compiled model, and what its compilation took; its caches stay in ``folder``."""
        from torch._dynamo.utils import counters
        from torch._inductor.utils import fresh_cache, run_and_get_code

        def compile_once(dynamic: bool | None = False) -> tuple[nn.Module, float]:
            torch.compiler.reset()
            counters.clear()
            compiled = cast(nn.Module, torch.compile(model, dynamic=dynamic))
            start = time.perf_counter()
            self._call(compiled, mode, self.image)()
            self._wait()
            return compiled, time.perf_counter() - start

        def recompiles() -> int | None:
            if self.subject.name == NETWORK:
                return None  # Inductor may fail on the symbolic sizes of timm's convolutions
            compiled, _ = compile_once(dynamic=None)
            before = counters["stats"]["unique_graphs"]
            try:
                self._call(compiled, mode, self.odd)()
            except Exception:
                if model is self.models["ours"]:
                    raise
                return None  # and on those of the reference
            return counters["stats"]["unique_graphs"] - before

        with fresh_cache():
            more = recompiles()
        with cache_folder(folder):
            (_, cold), codes = run_and_get_code(compile_once)
            compiled, warm = compile_once()
            names = [name for code in codes for name in generated_code.calls(code)]
            found = {
                "kernels": len(names),
                "copies": len(generated_code.copies(names)),
                "graphs": counters["stats"]["unique_graphs"],
                "graph_breaks": sum(counters["graph_break"].values()),
                "recompiles": more,
                "cold_compile_s": cold,
                "warm_compile_s": warm,
            }
        return compiled, found

    def _counts(self, variant: str, call: Call, facts: dict[str, Any]) -> dict[str, Any]:
        """``facts`` with the kernels, copies and peak memory of one call; of a replay its gaps."""
        cuda = self.device.type == "cuda"
        call()
        with profile(activities=_activities(cuda)) as profiled:
            call()
            self._wait()
        events = profiled.events() or []
        copied = sum(event.name == "aten::copy_" for event in events)
        replayed = variant in (REPLAYED, PEER_REPLAYED)  # holds its memory between calls
        return {
            **facts,
            "kernels": len(device_work(events)) if cuda else facts.get("kernels"),
            "copies": copied + facts.get("copies", 0),
            "peak_mib": None if replayed else peak_mib(call, self.image.nbytes, self.device),
            "gap_us": replay_gap_us(call, self.device) if replayed else None,
        }

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _row(self, mode: str, variant: str, ms: float, facts: dict[str, Any]) -> CompileRow:
        applies = ("graphs", "graph_breaks", "recompiles", "cold_compile_s", "warm_compile_s")
        return CompileRow(
            subject=self.subject.name,
            shape=str(self.subject.size),
            precision=self.precision,
            layout=self.layout,
            mode=mode,
            variant=variant,
            ms=ms,
            **{name: facts.get(name) for name in applies},
            **{name: facts.get(name) for name in ("kernels", "peak_mib", "gap_us", "error")},
            copies=facts["copies"],
        )
