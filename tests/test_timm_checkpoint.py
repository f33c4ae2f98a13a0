"""Checkpoints of WTConvNeXt: names that are known load strictly, all others are refused."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from layer_cases import make_input
from test_checkpoint_names import FUSED_CUDA, FUSED_METAL, fused_names
from timm_models import SMALL, models, small_model, timm
from torch import nn


@pytest.mark.parametrize("wrapper", ["", "module.", "_orig_mod.", "_orig_mod.module."])
@pytest.mark.parametrize("names", [{}, FUSED_CUDA, FUSED_METAL], ids=["own", "cuda", "metal"])
def test_checkpoints_with_known_names_load(wrapper: str, names: dict[str, str]) -> None:
    image = make_input(2, 3, 64, 64)
    model, other = small_model(seed=1), small_model(seed=2)
    saved = {wrapper + n: v for n, v in fused_names(model.state_dict(), names).items()}
    models.load_checkpoint(other, saved, bias_after_scale=False)
    assert torch.equal(other(image), model(image))


@pytest.mark.parametrize("container", [None, "state_dict", "state_dict_ema", "model"])
def test_checkpoint_files_load_by_either_road(container: str | None, tmp_path: Path) -> None:
    image = make_input(2, 3, 64, 64)
    model = small_model(seed=1)
    state = {f"module.{n}": v for n, v in fused_names(model.state_dict(), FUSED_CUDA).items()}
    path = tmp_path / "checkpoint.pth"
    torch.save(state if container is None else {container: state, "epoch": 3}, path)
    ours, theirs, wrapped = small_model(seed=2), small_model(seed=2), small_model(seed=2)
    models.load_checkpoint(ours, path, bias_after_scale=False)
    models.load_checkpoint(torch.compile(wrapped), str(path), bias_after_scale=False)
    with pytest.warns(UserWarning, match="bias_after_scale"):
        timm.models.load_checkpoint(theirs, str(path), filter_fn=models.checkpoint_filter_fn)
    for loaded in (ours, theirs, wrapped):
        assert torch.equal(loaded(image), model(image))


def test_pretrained_weights_fit_other_classes_and_input_channels(tmp_path: Path) -> None:
    model = small_model(seed=1)
    path = tmp_path / "checkpoint.pth"
    torch.save(model.state_dict(), path)
    overlay = {"file": str(path), "num_classes": 10}
    same = timm.create_model("wtconvnext_tiny", True, pretrained_cfg_overlay=overlay, **SMALL)
    assert torch.equal(same(make_input(1, 3, 64, 64)), model(make_input(1, 3, 64, 64)))
    options = {**SMALL, "num_classes": 4, "in_chans": 1}
    adapted = timm.create_model("wtconvnext_tiny", True, pretrained_cfg_overlay=overlay, **options)
    gray = make_input(1, 1, 64, 64)
    torch.testing.assert_close(
        adapted.forward_features(gray), model.forward_features(gray.expand(1, 3, 64, 64))
    )
    features = timm.create_model(
        "wtconvnext_tiny", True, pretrained_cfg_overlay=overlay, features_only=True, **SMALL
    )
    image = make_input(1, 3, 64, 64)
    torch.testing.assert_close(features(image)[-1], model.forward_features(image))


def test_other_checkpoints_are_refused_with_the_names(tmp_path: Path) -> None:
    model = small_model()
    state = model.state_dict()
    before = copy.deepcopy(state)
    del state["stages.1.blocks.1.conv_dw.base_conv.weight"], state["stem.1.bias"]
    state["stages.0.blocks.0.dwconv.weight"] = state["extra"] = torch.zeros(3)
    listed = (
        r"left over: extra, stages\.0\.blocks\.0\.dwconv\.weight; "
        r"missing: stages\.1\.blocks\.1\.conv_dw\.base_conv\.weight, stem\.1\.bias$"
    )
    with pytest.raises(RuntimeError, match=listed):
        models.load_checkpoint(model, state)
    path = tmp_path / "checkpoint.pth"
    torch.save(state, path)
    with pytest.raises(RuntimeError, match=listed):  # also where timm itself would not be strict
        timm.create_model(
            "wtconvnext_tiny", True, pretrained_cfg_overlay={"file": str(path)}, **SMALL
        )
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_checkpoints_with_other_shapes_classes_or_filters_are_refused() -> None:
    model = small_model()
    with pytest.raises(RuntimeError, match=r"size mismatch for head\.fc\.weight"):
        models.load_checkpoint(model, small_model(num_classes=4).state_dict())
    headless = small_model(num_classes=0)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*head\.fc\.weight"):
        models.load_checkpoint(headless, model.state_dict())
    with pytest.raises(RuntimeError, match=r"Missing key.*head\.fc\.weight"):
        models.load_checkpoint(model, headless.state_dict())
    state = model.state_dict()
    state["stages.0.blocks.0.conv_dw.wt_filter"] = 2 * state["stages.0.blocks.0.conv_dw.wt_filter"]
    with pytest.raises(RuntimeError, match=r"wt_filter must be within .* of the Haar filters"):
        models.load_checkpoint(model, state)


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"load_checkpoint: no file at .*absent\.pth"):
        models.load_checkpoint(small_model(), tmp_path / "absent.pth")
    with pytest.raises(TypeError, match="checkpoint must be a path or a state dict, got Linear"):
        models.load_checkpoint(small_model(), nn.Linear(2, 2))
