"""Recognise WTConv in a graph of PyTorch operations, by what each operation computes.

The graph is read once, in order. Every node gets a meaning from the meanings of its arguments and
from the shapes that the graph carries: padded map, coefficients of a level, filtered coefficients,
their LL and the rest, the merged level, its synthesis, the base path. A node without such a
meaning is the input of a possible layer and nothing more. Reshapes, slices, pads and crops are
judged by the shapes they produce, so spelling (``reshape`` or ``unflatten``) does not matter, and
any number of levels, with or without padding, is the same few rules. The sum of a scaled base path
and a synthesis of level 1 with the same input is a layer.

The meanings hold if all filters are Haar's; their values are not looked at here.

Source: Algorithm 1 of the WTConv paper.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import fx

from ._graph_nodes import (
    ARGUMENTS,
    all_same,
    arguments,
    example,
    is_even,
    is_number,
    operation,
    same,
    shape,
)


class Level(NamedTuple):
    """Parameters of one level, as nodes."""

    weight: fx.Node
    scale: fx.Node


@dataclass(frozen=True)
class Meaning:
    """What a node holds.

    Attributes:
        what: lowpass, padded, coefficients, convolved, filtered, low, high, merged, synthesis,
            base, scaled base or layer.
        source: X, the input of the layer.
        level: Level of the coefficients; a lowpass map of level 0 is X.
        levels: Parameters of this level and all deeper ones that went in.
        packed: Coefficients as [B, 4C, h, w], else as [B, C, 4, h, w].
        lifted: LL as [B, C, 1, h, w], else as [B, C, h, w].
        cropped: Whether a synthesis has the size of the map of its level.
        base: Weight, bias or None, and scale of the base path, as far as known.
        filters: Nodes that were taken for Haar filters.
        dtype: dtype in which the convolutions run; under autocast that of autocast.
        rows: The map [B, C, h, w] that each level analyses, up to the deepest that went in.
    """

    what: str
    source: fx.Node
    level: int = 0
    levels: tuple[Level, ...] = ()
    packed: bool = True
    lifted: bool = False
    cropped: bool = False
    base: tuple[Any, ...] = ()
    filters: frozenset[fx.Node] = frozenset()
    rows: tuple[fx.Node, ...] = ()
    dtype: torch.dtype | None = None


class Reader:
    """Meanings of the nodes of a graph; ``read`` must see them in order."""

    def __init__(self) -> None:
        self.meanings: dict[fx.Node, Meaning] = {}

    def read(self, node: fx.Node) -> Meaning | None:
        """The meaning of a node from those of its arguments; None if it has none."""
        name = operation(node)
        rule = None if name is None else getattr(self, f"_{name}", None)
        if rule is None or shape(node) is None:
            return None
        given = arguments(node, name) if name in ARGUMENTS else {}
        meaning: Meaning | None = rule(node, given)
        if meaning is not None:
            self.meanings[node] = meaning
        return meaning

    def _of(self, node: Any, *what: str) -> Meaning | None:
        meaning = self.meanings.get(node) if isinstance(node, fx.Node) else None
        return meaning if meaning is not None and meaning.what in what else None

    def _map(self, node: Any) -> tuple[Meaning, fx.Node] | None:
        """A map to analyse and the node of its unpadded form; any other node is an X."""
        if shape(node) is None or len(shape(node)) != 4:
            return None
        meaning = self._of(node, "lowpass", "padded")
        if meaning is None:
            return Meaning("lowpass", node), node
        return meaning, meaning.rows[-1] if meaning.what == "padded" else node

    def _pad(self, node: fx.Node, given: Mapping[str, Any]) -> Meaning | None:
        found = self._map(given.get("input"))
        pad = given.get("pad")
        if found is None or found[0].what == "padded" or not isinstance(pad, (tuple, list)):
            return None
        zeros = given.get("mode", "constant") == "constant" and not given.get("value")
        before, after = shape(given["input"]), shape(node)
        if not zeros or len(pad) != 4 or pad[0] != 0 or pad[2] != 0:
            return None
        if not all(same(b, a + a % 2) for a, b in zip(before[2:], after[2:], strict=True)):
            return None
        return replace(found[0], what="padded", rows=(*found[0].rows, found[1]))

    def _conv2d(self, node: fx.Node, given: Mapping[str, Any]) -> Meaning | None:
        input, weight = _operands(given)
        bias = given.get("bias")
        inner, outer = shape(input), shape(weight)
        if inner is None or outer is None or len(inner) != 4 or len(outer) != 4:
            return None
        if _is_analysis(given, inner, outer):
            return self._analysis(node, input, weight)
        if not (same(outer[0], inner[1]) and same(outer[1], 1)) or not _keeps_size(given, outer):
            return None
        coefficients = self._of(input, "coefficients")
        if coefficients is not None and coefficients.packed and bias is None:
            return replace(coefficients, what="convolved", base=(weight,))
        if coefficients is None:
            return Meaning("base", input, base=(weight, bias))
        return None

    def _analysis(self, node: fx.Node, input: fx.Node, weight: fx.Node) -> Meaning | None:
        found = self._map(input)
        if found is None:
            return None
        meaning, row = found
        rows = meaning.rows if meaning.what == "padded" else (*meaning.rows, row)
        if meaning.what != "padded" and not all(map(is_even, shape(input)[2:])):
            return None
        return replace(
            meaning,
            what="coefficients",
            level=meaning.level + 1,
            packed=True,
            filters=meaning.filters | {weight},
            rows=rows,
            dtype=example(node).dtype,
        )

    def _reshape(self, node: fx.Node, _: Mapping[str, Any]) -> Meaning | None:
        """Between [B, 4C, h, w] and [B, C, 4, h, w], or no change."""
        source = node.args[0] if node.args else None
        meaning = self._of(source, "coefficients", "filtered", "merged")
        if meaning is None:
            if node.target == "contiguous":
                return self.meanings.get(source) if isinstance(source, fx.Node) else None
            return None
        before, after = shape(source), shape(node)
        if example(source).dtype != example(node).dtype:  # view(dtype)
            return None
        if all_same(before, after):
            return meaning
        split, packed = (after, before) if meaning.packed else (before, after)
        if len(split) != 5 or len(packed) != 4:
            return None
        batch, channels, four, height, width = split
        if not same(four, 4) or not all_same(packed, (batch, 4 * channels, height, width)):
            return None
        return replace(meaning, packed=not meaning.packed)

    def _mul(self, node: fx.Node, given: Mapping[str, Any]) -> Meaning | None:
        for scale, value in _both_ways(given):
            meaning = self._of(value, "convolved", "base")
            factors = shape(scale)
            if meaning is None or factors is None or len(factors) != 4:
                continue
            if not all_same(factors, (1, shape(value)[1], 1, 1)):
                continue
            if meaning.what == "base":
                return replace(meaning, what="scaled base", base=(*meaning.base, scale))
            level = Level(meaning.base[0], scale)
            return replace(meaning, what="filtered", levels=(level,), base=())
        return None

    def _getitem(self, node: fx.Node, given: Mapping[str, Any]) -> Meaning | None:
        index = given.get("index")
        if not isinstance(index, tuple) or Ellipsis in index:
            return None
        while index and _is_whole(index[-1]):
            index = index[:-1]
        if len(index) == 3 and _is_whole(index[0]) and _is_whole(index[1]):
            return self._third(node, given["input"], index[2])
        if len(index) == 4 and all(map(_is_whole, index[:2])):
            return self._crop(node, given["input"], index[2:])
        return None

    def _third(self, node: fx.Node, input: Any, index: Any) -> Meaning | None:
        """Subbands of [B, C, 4, h, w]; a slice of rows where the input is a synthesis."""
        if self._of(input, "synthesis") is not None:
            return self._crop(node, input, (index, slice(None)))
        meaning = self._of(input, "coefficients", "filtered")
        if meaning is None or meaning.packed:
            return None
        raw = meaning.what == "coefficients"
        if type(index) is int and index == 0:
            return replace(meaning, what="lowpass" if raw else "low")
        if raw or not isinstance(index, slice) or index.step not in (None, 1):
            return None
        if index.start == 1 and index.stop in (None, 4):
            return replace(meaning, what="high")
        if index.start in (None, 0) and index.stop == 1:
            return replace(meaning, what="low", lifted=True)
        return None

    def _crop(self, node: fx.Node, input: Any, index: tuple[Any, ...]) -> Meaning | None:
        meaning = self._of(input, "synthesis")
        if meaning is None or not all(_is_from_start(part) for part in index):
            return None
        return self._sized(node, meaning)

    def _sized(self, node: fx.Node, meaning: Meaning) -> Meaning:
        """A synthesis, cropped if it has the size of its map; rows and columns start at 0."""
        row = meaning.rows[meaning.level - 1]
        return replace(meaning, cropped=all_same(shape(node)[2:], shape(row)[2:]))

    def _slice(self, node: fx.Node, given: Mapping[str, Any]) -> Meaning | None:
        part = slice(given.get("start"), given.get("end"), given.get("step", 1))
        part = slice(part.start, None if part.stop == 2**63 - 1 else part.stop, part.step)
        input, dim = given.get("input"), given.get("dim", 0)
        if isinstance(input, fx.Node) and all_same(shape(node) or (), shape(input) or ()):
            return self.meanings.get(input) if _is_from_start(part) else None
        if dim == 2 and self._of(input, "synthesis") is None:
            return self._third(node, input, part)
        return self._crop(node, input, (part,)) if dim in (2, 3) else None

    def _select(self, node: fx.Node, given: Mapping[str, Any]) -> Meaning | None:
        if given.get("dim") != 2:
            return None
        return self._third(node, given.get("input"), given.get("index"))

    def _unsqueeze(self, node: fx.Node, given: Mapping[str, Any]) -> Meaning | None:
        meaning = self._of(given.get("input"), "low")
        if meaning is None or meaning.lifted or given.get("dim") not in (2, -3):
            return None
        return replace(meaning, lifted=True)

    def _cat(self, node: fx.Node, given: Mapping[str, Any]) -> Meaning | None:
        tensors = given.get("tensors")
        if not isinstance(tensors, (list, tuple)) or len(tensors) != 2:
            return None
        low, high = self._of(tensors[0], "low"), self._of(tensors[1], "high")
        if low is None or high is None or not low.lifted or given.get("dim", 0) not in (2, -3):
            return None
        if low.source is not high.source or low.levels[0] != high.levels[0]:
            return None
        if low.rows[: low.level] != high.rows:
            return None
        return replace(low, what="merged", packed=False, lifted=False)

    def _conv_transpose2d(self, node: fx.Node, given: Mapping[str, Any]) -> Meaning | None:
        input, weight = _operands(given)
        meaning = self._of(input, "merged")
        inner, outer = shape(input), shape(weight)
        if meaning is None or not meaning.packed or not outer or given.get("bias") is not None:
            return None
        if not all_same(outer, (inner[1], 1, 2, 2)) or not all_same(
            shape(node)[:2], (inner[0], shape(meaning.source)[1])
        ):
            return None
        plain = {"stride": 2, "padding": 0, "output_padding": 0, "dilation": 1}
        if not all(is_number(given.get(k, 1 if k == "stride" else v), v) for k, v in plain.items()):
            return None
        filters = meaning.filters | {weight}
        return self._sized(node, replace(meaning, what="synthesis", filters=filters))

    def _add(self, node: fx.Node, given: Mapping[str, Any]) -> Meaning | None:
        if given.get("alpha", 1) != 1:
            return None
        for first, second in _both_ways(given):
            if type(second) in (int, float) and second == 0:
                return self._of(first, "low", "synthesis", "scaled base")
            upper, lower = self._of(first, "low", "scaled base"), self._of(second, "synthesis")
            if upper is None or lower is None or not lower.cropped:
                continue
            if upper.source is not lower.source or not all_same(shape(first), shape(second)):
                continue
            if upper.what == "scaled base":
                if lower.level == 1:
                    return replace(lower, what="layer", base=upper.base)
            elif not upper.lifted and len(upper.levels) == 1 and _is_below(lower, upper):
                levels = (*upper.levels, *lower.levels)
                filters = upper.filters | lower.filters
                return replace(upper, levels=levels, filters=filters, rows=lower.rows)
        return None


def _is_analysis(given: Mapping[str, Any], input: Any, weight: Any) -> bool:
    """Four 2x2 filters for each channel, without padding; groups follow from the shapes."""
    if given.get("bias") is not None or not all_same(weight, (4 * input[1], 1, 2, 2)):
        return False
    return (
        is_number(given.get("stride", 1), 2)
        and is_number(given.get("padding", 0), 0)
        and is_number(given.get("dilation", 1), 1)
    )


def _keeps_size(given: Mapping[str, Any], weight: Any) -> bool:
    """Stride 1 and zero padding, (k-1)//2 before and k//2 after."""
    height, width = weight[2:]
    if not same(height, width):
        return False
    if not (is_number(given.get("stride", 1), 1) and is_number(given.get("dilation", 1), 1)):
        return False
    padding = given.get("padding", 0)
    if isinstance(padding, str):
        return padding == "same" or same(height, 1)
    return same(height % 2, 1) and is_number(padding, height // 2)


def _is_whole(part: Any) -> bool:
    return isinstance(part, slice) and part == slice(None)


def _is_from_start(part: Any) -> bool:
    return isinstance(part, slice) and part.start in (None, 0) and part.step in (None, 1)


def _is_below(lower: Meaning, upper: Meaning) -> bool:
    """Whether a synthesis belongs to the level that analyses the LL of ``upper``."""
    return lower.level == upper.level + 1 and lower.rows[: upper.level] == upper.rows


def _operands(given: Mapping[str, Any]) -> tuple[Any, Any]:
    return given.get("input"), given.get("weight")


def _both_ways(given: Mapping[str, Any]) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    first, second = given.get("input"), given.get("other")
    return (first, second), (second, first)
