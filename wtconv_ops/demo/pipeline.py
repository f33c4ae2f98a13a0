"""The steps of the demonstration, in order: run, compile, export, package, time, draw."""

from __future__ import annotations

import copy
import logging
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch._dynamo
import torch._inductor
from torch import Tensor, nn

from wtconv_ops import WTConv2d, _library, dwt2d
from wtconv_ops.demo import aoti_child
from wtconv_ops.demo.budget import judge
from wtconv_ops.demo.choice import Choice, choose_network
from wtconv_ops.demo.figure import draw_figure
from wtconv_ops.demo.network import NetworkConfig, randomise
from wtconv_ops.demo.photograph import another_size, load_photograph, scaled
from wtconv_ops.demo.progress import watched_steps
from wtconv_ops.demo.receptive_field import ReceptiveField, receptive_field
from wtconv_ops.demo.reference_layer import ReferenceWTConv2d
from wtconv_ops.demo.report import Report, Row, one_line
from wtconv_ops.demo.timing import interleaved_times, median_times, processor_name

PICTURE_NAME = "wtconv_demo.png"

_Network = Callable[[Tensor], Tensor]

_log = logging.getLogger("wtconv_ops")


@dataclass(frozen=True)
class Options:
    """What the command line can change; ``config`` and ``rounds`` also make tests short.

    Attributes:
        config: A small network of this configuration; None: WTConvNeXt-T where timm is there.
    """

    image: Path | None = None
    out: Path = Path()
    seed: int = 0
    rounds: int = 7
    config: NetworkConfig | None = None


@dataclass(frozen=True)
class _Networks:
    """The same weights three times, and the photograph in two sizes with its exact features."""

    ours: nn.Module
    reference: nn.Module
    images: tuple[Tensor, Tensor]  # the photograph as the networks get it, another odd size
    expected: tuple[Tensor, Tensor]  # fp32 features of the reference, one for each image
    exact: tuple[Tensor, Tensor]  # fp64 features of the reference


def run_demo(options: Options) -> tuple[Report, Path]:
    """Run every step; returns the report and the path of the picture.

    Raises:
        UnreadableImageError: the image cannot be used.
    """
    photograph = load_photograph(options.image)
    choice = choose_network(options.config)
    options.out.mkdir(parents=True, exist_ok=True)
    with watched_steps(total=7) as begin, torch.no_grad():
        begin("fp64 reference")
        networks = _build(photograph, choice, options.seed)
        begin("compiling the reference network")
        reference_compiled, reference_rows = _compiled(networks, networks.reference, "reference")
        begin("compiling the wtconv_ops network")
        ours_compiled, ours_rows = _compiled(networks, networks.ours, "wtconv_ops")
        begin("exporting with dynamic height and width")
        program, exported_row = _exported(networks)
        begin("AOTInductor package in a fresh process")
        package_rows = _packaged(networks, program)
        begin("timing")
        rows = _timed(
            [*reference_rows, *ours_rows],
            (networks.reference, reference_compiled, networks.ours, ours_compiled),
            networks.images[0],
            options.rounds,
        )
        begin("receptive fields and picture")
        picture = options.out / PICTURE_NAME
        _draw(photograph, options.seed, picture)
    header = _header(photograph, networks.images[0], choice)
    return Report(header, (*rows, exported_row, *package_rows)), picture


def _build(photograph: Tensor, choice: Choice, seed: int) -> _Networks:
    """Build both networks on one set of random weights and run the reference in fp64."""
    ours = choice.build(WTConv2d).eval()
    randomise(ours, seed)
    reference = choice.build(ReferenceWTConv2d).eval()
    reference.load_state_dict(ours.state_dict())
    double = copy.deepcopy(reference).double()
    image = photograph if choice.shorter_side is None else scaled(photograph, choice.shorter_side)
    images = (image, another_size(image))
    return _Networks(
        ours,
        reference,
        images,
        expected=(reference(images[0]), reference(images[1])),
        exact=(double(images[0].double()), double(images[1].double())),
    )


def _compiled(networks: _Networks, network: nn.Module, name: str) -> tuple[_Network, list[Row]]:
    """Run eager, count graphs, compile as one graph and run that.

    Returns the compiled network and the rows "eager" and "compiled".
    """
    image = networks.images[0]
    eager = _checked(f"{name}, eager", networks, 0, lambda: network(image))
    compiled: _Network = torch.compile(network, fullgraph=True, dynamic=False)
    row = _checked(f"{name}, compiled", networks, 0, lambda: compiled(image))
    try:
        explanation = torch._dynamo.explain(network)(image)
    except Exception as error:
        _log.debug("explain failed", exc_info=True)
        return compiled, [eager, replace(row, failure=row.failure or one_line(error))]
    counted = replace(
        row, graphs=explanation.graph_count, graph_breaks=explanation.graph_break_count
    )
    return compiled, [eager, counted]


def _exported(networks: _Networks) -> tuple[torch.export.ExportedProgram | None, Row]:
    """Export at the photograph's size with dynamic H and W, run at the last size of `_sizes`."""
    sides = {2: torch.export.Dim.DYNAMIC, 3: torch.export.Dim.DYNAMIC}  # any H, any W
    last = _sizes()[-1]
    program: torch.export.ExportedProgram | None = None

    def export_and_run() -> Tensor:
        nonlocal program
        program = torch.export.export(
            networks.ours, (networks.images[0],), dynamic_shapes=(sides,) if last else None
        )
        result: Tensor = program.module()(networks.images[last])
        return result

    row = _checked("wtconv_ops, exported", networks, last, export_and_run)
    return program, row


def _sizes() -> range:
    """Indices of the images that exported programs run on.

    Both where the operator is one node of the graph. Plain PyTorch operations are exported at one
    size: their symbolic shapes, one rounding for each level of each layer, take minutes to solve.
    """
    return range(2) if _library.library() is not None else range(1)


def _packaged(networks: _Networks, program: torch.export.ExportedProgram | None) -> list[Row]:
    """Compile the exported program ahead of time and run it in a new process."""
    images = [networks.images[index] for index in _sizes()]
    name = "AOTInductor package"
    try:
        if program is None:
            raise RuntimeError("the export failed")
        with warnings.catch_warnings():  # torch warns about its own use of pytree here
            warnings.simplefilter("ignore", FutureWarning)
            results = _run_package(program, images)
    except Exception as error:
        _log.debug("AOTInductor failed", exc_info=True)
        return [Row(name, _size(image), failure=one_line(error)) for image in images]
    return [
        _checked(name, networks, index, partial(results.__getitem__, index)) for index in _sizes()
    ]


def _run_package(program: torch.export.ExportedProgram, images: list[Tensor]) -> list[Tensor]:
    """Results of the package of ``program`` on ``images``, computed in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="wtconv_demo_") as name:
        folder = Path(name)
        package = str(folder / "network.pt2")
        torch._inductor.aoti_compile_and_package(program, package_path=package)
        torch.save(images, folder / "inputs.pt")
        arguments = [package, str(folder / "inputs.pt"), str(folder / "outputs.pt")]
        library = _library.library()
        if library is not None:
            arguments.append(str(library.path or _library.default_path()))
        done = subprocess.run(
            [sys.executable, str(aoti_child.__file__), *arguments],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise RuntimeError(f"the fresh process ended with status {done.returncode}: {last}")
        outputs: list[Tensor] = torch.load(folder / "outputs.pt", weights_only=True)
        return outputs


def _timed(
    rows: list[Row], networks: tuple[_Network, ...], image: Tensor, rounds: int
) -> list[Row]:
    """Add the median ms to the rows that ran; ``networks`` and ``rows`` go together."""
    functions = {
        row.name: partial(network, image)
        for row, network in zip(rows, networks, strict=True)
        if row.failure is None
    }
    medians = median_times(interleaved_times(functions, rounds=rounds, sample_ms=20.0))
    return [replace(row, milliseconds=medians.get(row.name)) for row in rows]


def _checked(name: str, networks: _Networks, index: int, run: Callable[[], Tensor]) -> Row:
    """Row of one run on ``images[index]``, judged against the fp64 reference."""
    size = _size(networks.images[index])
    try:
        result = run()
        verdict = judge(result, networks.expected[index], networks.exact[index])
    except Exception as error:
        _log.debug("%s failed", name, exc_info=True)
        return Row(name, size, failure=one_line(error))
    return Row(name, size, verdict=verdict)


def _draw(photograph: Tensor, seed: int, picture: Path) -> None:
    lowpass, details = dwt2d(photograph, levels=3)
    draw_figure(photograph, lowpass, details, measure_receptive_fields(seed), picture)


def measure_receptive_fields(seed: int, size: int = 225) -> dict[str, ReceptiveField]:
    """Effective receptive field of a fresh depthwise 7x7 and of fresh 5x5 WTConv layers."""
    channels = 8
    torch.manual_seed(seed)
    layers: dict[str, nn.Module] = {
        "Depthwise 7×7": nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
    }
    for levels in (1, 3, 5):
        layers[f"WTConv 5×5, L = {levels}"] = WTConv2d(
            channels, channels, kernel_size=5, wt_levels=levels
        )
    with torch.enable_grad():
        return {
            name: receptive_field(layer, channels, size, seed) for name, layer in layers.items()
        }


def _header(photograph: Tensor, image: Tensor, choice: Choice) -> tuple[str, ...]:
    size = "{} x {}".format(*_size(photograph))
    if _size(image) != _size(photograph):
        size += " scaled to {} x {}".format(*_size(image))
    library = _library.library()
    kernels = _library.FILE_NAME
    if library is None:
        kernels = f"plain PyTorch, exported at one size: {_library.problem()}"
    return (
        f"photograph {size}, fp32, inference; the package runs in a fresh process",
        f"network: {choice.name}",
        f"kernels: {kernels}",
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, {processor_name()}",
    )


def _size(image: Tensor) -> tuple[int, int]:
    return int(image.shape[-2]), int(image.shape[-1])
