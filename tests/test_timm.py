"""WTConvNeXt in timm: the original model's sizes, names and results, and what timm does with it."""

from __future__ import annotations

import copy
import hashlib
import importlib
import os
import sys
import warnings
from typing import Any

import pytest
import torch
import torch._dynamo
from budget import assert_within_budget
from layer_cases import make_input
from timm_models import SMALL, VARIANTS, gradients_of, models, small_model, timm
from torch._inductor.utils import fresh_cache, run_and_get_code

from bench.generated_code import calls, copies
from wtconv_ops import WTConv2d
from wtconv_ops.demo import choice
from wtconv_ops.demo.network import randomise
from wtconv_ops.demo.reference_layer import ReferenceWTConv2d

CHECKOUT = os.environ.get("WTCONV_UPSTREAM", "")


# Sizes and names. The numbers and hashes are those of the original model.


@pytest.mark.parametrize(
    ("variant", "depths", "widths", "entries", "numbers", "names"),
    [
        ("tiny", (3, 3, 9, 3), (96, 192, 384, 768), 356, 30_595_624, "e53e7d92c5776a97"),
        ("small", (3, 3, 27, 3), (96, 192, 384, 768), 680, 54_448_936, "2f26aed6cd76c8b5"),
        ("base", (3, 3, 27, 3), (128, 256, 512, 1024), 680, 94_225_128, "a16496d8ff28f056"),
    ],
)
def test_variants_have_the_sizes_and_names_of_the_original(
    variant: str,
    depths: tuple[int, ...],
    widths: tuple[int, ...],
    entries: int,
    numbers: int,
    names: str,
) -> None:
    model = timm.create_model(f"wtconvnext_{variant}", device="meta")
    layers = [[block.conv_dw for block in stage.blocks] for stage in model.stages]
    assert tuple(map(len, layers)) == depths
    for stage, width, levels in zip(layers, widths, (5, 4, 3, 2), strict=True):
        for layer in stage:
            assert type(layer) is WTConv2d
            assert (layer.in_channels, layer.kernel_size, layer.wt_levels) == (width, 5, levels)
    state = model.state_dict()
    assert len(state) == entries
    assert sum(value.numel() for value in state.values()) == numbers
    listing = "\n".join(f"{name} {list(value.shape)}" for name, value in state.items())
    assert hashlib.sha256(listing.encode()).hexdigest()[:16] == names


def test_names_look_like_this() -> None:
    model = timm.create_model("wtconvnext_tiny", device="meta")
    shapes = {name: list(value.shape) for name, value in model.state_dict().items()}
    assert shapes["stem.0.weight"] == [96, 3, 4, 4]
    assert shapes["stages.0.blocks.1.conv_dw.wavelet_scale.3.weight"] == [1, 384, 1, 1]
    assert shapes["stages.1.downsample.1.weight"] == [192, 96, 2, 2]
    assert shapes["stages.2.blocks.3.conv_dw.wavelet_convs.2.weight"] == [1536, 1, 5, 5]
    assert shapes["stages.2.blocks.7.mlp.fc2.weight"] == [384, 1536]
    assert shapes["stages.3.blocks.1.gamma"] == [768]
    assert shapes["stages.3.blocks.2.conv_dw.iwt_filter"] == [3072, 1, 2, 2]
    assert shapes["head.norm.weight"] == [768]


def test_registry_lists_the_variants() -> None:
    assert set(timm.list_models("wtconvnext*")) == {f"wtconvnext_{v}" for v in VARIANTS}
    config = timm.get_pretrained_cfg("wtconvnext_tiny")
    assert (config.input_size, config.crop_pct, config.num_classes) == ((3, 224, 224), 0.875, 1000)
    with pytest.raises(RuntimeError, match="No pretrained weights exist for wtconvnext_tiny"):
        timm.create_model("wtconvnext_tiny", pretrained=True)


@pytest.mark.parametrize("levels", [(1, 2, 3), (5, 4, 3, 2, 1)])
def test_wrong_number_of_levels_is_refused(levels: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"wt_levels must be one number or 4, .* got \("):
        timm.create_model("wtconvnext_tiny", wt_levels=levels)


# Initialisation and weight decay.


def test_initialisation_is_that_of_the_recipe() -> None:
    model = timm.create_model("wtconvnext_tiny", **{**SMALL, "dims": (64, 64, 64, 64)})
    for name, parameter in model.named_parameters():
        if "base_scale" in name:
            assert bool((parameter == 1).all()), name
        elif "wavelet_scale" in name:
            assert bool((parameter == 0.1).all()), name
        elif "conv_dw" in name and name.endswith("bias"):
            assert bool((parameter == 0).all()), name
        elif "conv_dw" in name:
            assert 0.018 < float(parameter.detach().std()) < 0.022, name


def test_scales_are_not_decayed() -> None:
    model = small_model()
    scales = model.no_weight_decay()
    assert len(scales) == sum(1 + level for level in (5, 4, 4, 3, 2))
    assert all(model.get_parameter(name).ndim == 4 for name in scales)
    optimizer = importlib.import_module("timm.optim").create_optimizer_v2(
        model, opt="adamw", weight_decay=0.05
    )
    decayed = {
        id(p) for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]
    }
    for name, parameter in model.named_parameters():
        kept = parameter.ndim > 1 and "_scale." not in name
        assert (id(parameter) in decayed) is kept, name


# What timm does with a model.


def test_features_are_the_outputs_of_the_stages() -> None:
    image = make_input(2, 3, 65, 97)
    model = small_model()
    features = timm.create_model("wtconvnext_tiny", features_only=True, **SMALL)
    features.load_state_dict(
        {
            name.replace("stages.", "stages_").replace("stem.", "stem_"): value
            for name, value in model.state_dict().items()
            if not name.startswith("head.")
        }
    )
    assert features.feature_info.channels() == [8, 16, 24, 32]
    assert features.feature_info.reduction() == [4, 8, 16, 32]
    found = features(image)
    assert [list(f.shape) for f in found] == [
        [2, 8, 16, 24],
        [2, 16, 8, 12],
        [2, 24, 4, 6],
        [2, 32, 2, 3],
    ]
    last, intermediates = model.forward_intermediates(image)
    for feature, intermediate in zip(found, intermediates, strict=True):
        torch.testing.assert_close(feature, intermediate)
    torch.testing.assert_close(last, model.forward_features(image))
    (second,) = model.forward_intermediates(
        image, indices=[1], stop_early=True, intermediates_only=True
    )
    torch.testing.assert_close(second, found[1])


def test_classifier_can_be_replaced_and_left_out() -> None:
    image = make_input(2, 3, 64, 64)
    model = small_model()
    pooled = model.forward_head(model.forward_features(image), pre_logits=True)
    assert pooled.shape == (2, 32)
    model.reset_classifier(7)
    assert model(image).shape == (2, 7)
    model.reset_classifier(0)
    torch.testing.assert_close(model(image), pooled)
    model.reset_classifier(0, "")
    assert model(image).shape == (2, 32, 2, 2)


@pytest.mark.parametrize(
    "options",
    [
        {"in_chans": 1},
        {"head_norm_first": True},
        {"head_hidden_size": 12},
        {"global_pool": "max"},
        {"conv_mlp": True, "use_grn": True},
        {"conv_bias": False, "ls_init_value": None},
        {"stem_type": "overlap_tiered"},
        {"output_stride": 16},
        {"kernel_sizes": (3, 5, 7, 4), "wt_levels": 1},
        {"drop_rate": 0.1, "drop_path_rate": 0.2},
    ],
    ids=lambda options: "-".join(options),
)
def test_options_of_convnext_work(options: dict[str, Any]) -> None:
    model = small_model(**options)
    channels = options.get("in_chans", 3)
    output = model(make_input(2, channels, 64, 64))
    assert output.shape == (2, 10)
    output.sum().backward()
    bias = options.get("conv_bias", True)
    for stage, kernel in zip(model.stages, options.get("kernel_sizes", (5,) * 4), strict=True):
        for block in stage.blocks:
            assert block.conv_dw.kernel_size == kernel
            assert (block.conv_dw.base_conv.bias is not None) is bias
            assert block.conv_dw.base_conv.weight.grad.abs().max() > 0


def test_model_is_built_on_the_device_and_dtype_that_timm_is_asked_for() -> None:
    model = timm.create_model("wtconvnext_tiny", device="meta", dtype=torch.bfloat16, **SMALL)
    assert {(p.device.type, p.dtype) for p in model.parameters()} == {("meta", torch.bfloat16)}


@pytest.mark.parametrize("drop_path_rate", [0.0, 0.5])
def test_checkpointing_changes_no_gradient(drop_path_rate: float) -> None:
    image = make_input(4, 3, 64, 64)
    model = small_model(drop_path_rate=drop_path_rate).train()
    torch.manual_seed(5)
    expected = gradients_of(model, image)
    calls = []
    model.stages[1].blocks[0].conv_dw.register_forward_hook(lambda *_: calls.append(1))
    model.set_grad_checkpointing()
    torch.manual_seed(5)
    found = gradients_of(model, image)
    assert len(calls) == 2
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.slow
@pytest.mark.parametrize(("checkpointing", "backend"), [(False, "inductor"), (True, "aot_eager")])
def test_training_compiles_without_a_graph_break(
    checkpointing: bool, backend: str, fresh_compiler: None
) -> None:
    image = make_input(2, 3, 64, 64)
    model = small_model(depths=(1, 1, 1, 1)).train()
    expected = gradients_of(model, image)
    model.set_grad_checkpointing(checkpointing)
    found = gradients_of(torch.compile(model, fullgraph=True, backend=backend), image)
    counters = torch._dynamo.utils.counters
    assert (counters["stats"]["unique_graphs"], counters["graph_break"]) == (1, {})
    found = {name.removeprefix("_orig_mod."): value for name, value in found.items()}
    assert found.keys() == expected.keys()
    for name, value in found.items():
        tolerance = 2e-5 * float(expected[name].abs().max())
        torch.testing.assert_close(value, expected[name], rtol=0.0, atol=tolerance, msg=name)


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_block_compiles_to_one_graph_without_copies(
    device: str, layout: torch.memory_format, training: bool, fresh_compiler: None
) -> None:
    block = small_model().stages[1].blocks[1].to(device).train(training)
    x = make_input(2, 16, 6, 5).to(device, memory_format=layout).requires_grad_(training)

    def step(run: Any) -> Any:
        with torch.set_grad_enabled(training):
            y = run(x)
        leaves = [x, *(p for p in block.parameters() if p.requires_grad)]
        return [y, *torch.autograd.grad(y.square().mean(), leaves)] if training else [y]

    with fresh_cache():
        found, codes = run_and_get_code(step, torch.compile(block, fullgraph=True, dynamic=False))
    torch.testing.assert_close(found, step(block))
    names = [calls(code) for code in codes]
    ours = [[name for name in graph if name.startswith("_graph")] for graph in names]
    assert ours == [["_graph_forward"], ["_graph_backward"]][: 1 + training]
    assert not any(copies(graph) for graph in names)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


# The plain layer in the same network.


def test_plain_layer_in_the_same_place_gives_the_same() -> None:
    image = make_input(2, 3, 65, 97, dtype=torch.float64)
    ours = small_model().double()
    plain = timm.create_model("wtconvnext_tiny", wtconv_class=ReferenceWTConv2d, **SMALL).double()
    plain.load_state_dict(ours.state_dict(), strict=True)
    expected, found = gradients_of(plain, image), gradients_of(ours, image)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        tolerance = 1e-11 * float(expected[name].abs().max())
        torch.testing.assert_close(value, expected[name], rtol=0.0, atol=tolerance, msg=name)


def test_demo_runs_wtconvnext_tiny_on_a_small_photograph() -> None:
    chosen = choice.choose_network(None)
    assert chosen.name == f"WTConvNeXt-T, timm {timm.__version__}"
    network = chosen.build(ReferenceWTConv2d)
    assert type(network) is models.WTConvNeXt
    assert isinstance(network.stages[2].blocks[8].conv_dw, ReferenceWTConv2d)
    side = chosen.shorter_side
    assert side is not None
    assert network(torch.rand(1, 3, side, side)).shape == (1, 768, side // 32, side // 32)


# The original model, where WTCONV_UPSTREAM names a checkout of its repository.


@pytest.fixture(scope="module")
def original() -> Any:
    """Module of the original model; the registry keeps ours."""
    if not CHECKOUT:
        pytest.skip("WTCONV_UPSTREAM does not name a checkout of the original implementation")
    pytest.importorskip("pywt", reason="the original implementation needs PyWavelets")
    sys.path.insert(0, CHECKOUT)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Overwriting wtconvnext")
            module = importlib.import_module("wtconvnext.wtconvnext")
            for variant in VARIANTS:
                timm.models.register_model(getattr(models, f"wtconvnext_{variant}"))
    finally:
        sys.path.remove(CHECKOUT)
    return module


@pytest.mark.parametrize("variant", VARIANTS)
def test_state_and_decay_are_those_of_the_original(original: Any, variant: str) -> None:
    theirs = getattr(original, f"wtconvnext_{variant}")()
    ours = timm.create_model(f"wtconvnext_{variant}")
    expected = {name: value.shape for name, value in theirs.state_dict().items()}
    assert list(ours.state_dict()) == list(expected)
    assert {name: value.shape for name, value in ours.state_dict().items()} == expected
    assert ours.no_weight_decay() == theirs.no_weight_decay()
    models.load_checkpoint(ours, theirs.state_dict())
    theirs.load_state_dict(ours.state_dict(), strict=True)


def pair(original: Any, **options: Any) -> tuple[Any, Any, Any]:
    """The original model, ours on its weights, and the original in float64 with exact filters."""
    theirs = original.wtconvnext_tiny(num_classes=10, **options)
    randomise(theirs, seed=1)
    ours = timm.create_model("wtconvnext_tiny", num_classes=10, **options)
    models.load_checkpoint(ours, theirs.state_dict())
    exact = copy.deepcopy(theirs).double()
    for name, parameter in exact.named_parameters():
        if name.endswith("wt_filter"):  # stored as ±0.49999997
            parameter.data = 0.5 * parameter.data.sign()
    return theirs, ours, exact


def test_tiny_computes_what_the_original_computes(original: Any) -> None:
    theirs, ours, exact = pair(original)
    image = make_input(2, 3, 65, 97)
    with torch.no_grad():
        same, expected = theirs.forward_features(image), exact.forward_features(image.double())
        assert_within_budget(ours.forward_features(image), same, expected)
        found, expected = ours.double()(image.double()), exact(image.double())
    tolerance = 1e-11 * float(expected.abs().max())
    torch.testing.assert_close(found, expected, rtol=0.0, atol=tolerance)


@pytest.mark.parametrize("options", [{}, {"output_stride": 16}, {"head_norm_first": True}])
def test_gradients_are_those_of_the_original(original: Any, options: dict[str, Any]) -> None:
    _, ours, exact = pair(original, depths=(1, 2, 1, 1), dims=(8, 16, 24, 32), **options)
    image = make_input(2, 3, 65, 97, dtype=torch.float64)
    expected, found = gradients_of(exact, image), gradients_of(ours.double(), image)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        tolerance = 1e-11 * float(expected[name].abs().max())
        torch.testing.assert_close(value, expected[name], rtol=0.0, atol=tolerance, msg=name)
