"""Windows that slide over an array: convolution and pooling, on slices and matrix products.

The windows of one dim are its strided slices, one for each place in the window, put side by
side; further dims are unfolded one after the other, so a window of ``h × w`` costs ``h + w``
slices. Windows that touch without overlap are a reshape. A convolution is then one product with
the kernel, and its derivatives are products and sums of padded slices: nothing is scattered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from trainkernel import primitives as b
from trainkernel.errors import TraceError
from trainkernel.numpy.axes import as_int
from trainkernel.numpy.products import contract, factors
from trainkernel.numpy.shapes import join
from trainkernel.promotion import inexact, is_float
from trainkernel.trace import Shape, at_user_line, aval_of

Value = Any
Pairs = Sequence[tuple[int, int]]

__all__ = ["avg_pool", "conv_general_dilated", "max_pool"]


# ---------------------------------------------------------------------------- windows


def unfold(x: Value, dim: int, place: int, size: int, stride: int, dilation: int) -> Value:
    """The windows of one dim: how many there are stays in ``dim``, their elements become a new dim at ``place``."""
    length = x.shape[dim]
    span = (size - 1) * dilation + 1
    count = (length - span) // stride + 1
    if count < 1:
        raise TraceError(f"a window of {span} elements does not fit {length}{at_user_line()}")
    if size == stride and dilation == 1:
        return _touching(x, dim, place, size, count)
    taps = [_every(x, dim, tap * dilation, count, stride) for tap in range(size)]
    return join([b.reshape(tap, (*tap.shape[:place], 1, *tap.shape[place:])) for tap in taps], place)


def _every(x: Value, dim: int, start: int, count: int, stride: int) -> Value:
    first, limit, step = [0] * len(x.shape), list(x.shape), [1] * len(x.shape)
    first[dim], limit[dim], step[dim] = start, start + (count - 1) * stride + 1, stride
    return b.slice(x, first, limit, step)


def _touching(x: Value, dim: int, place: int, size: int, count: int) -> Value:
    """Windows that touch: a view."""
    used = _every(x, dim, 0, count * size, 1)
    split = b.reshape(used, (*used.shape[:dim], count, size, *used.shape[dim + 1 :]))
    order = [each for each in range(len(split.shape)) if each != dim + 1]
    order.insert(place, dim + 1)
    return b.transpose(split, order)


def _padding(
    padding: Any, lengths: Sequence[int], spans: Sequence[int], strides: Sequence[int]
) -> list[tuple[int, int]]:
    """Elements before and after each dim: "SAME", "SAME_LOWER", "VALID", or pairs."""
    if not isinstance(padding, str):
        pairs = [(as_int(low, "padding"), as_int(high, "padding")) for low, high in padding]
        if len(pairs) != len(lengths):
            raise TraceError(f"{len(pairs)} pairs of padding for {len(lengths)} dims{at_user_line()}")
        return pairs
    if padding.upper() == "VALID":
        return [(0, 0)] * len(lengths)
    if padding.upper() not in ("SAME", "SAME_LOWER"):
        raise TraceError(f"padding must be 'SAME', 'SAME_LOWER', 'VALID' or pairs, got {padding!r}{at_user_line()}")
    pairs = []
    for length, span, stride in zip(lengths, spans, strides, strict=True):
        missing = max((-(-length // stride) - 1) * stride + span - length, 0)
        less, more = missing // 2, missing - missing // 2
        pairs.append((less, more) if padding.upper() == "SAME" else (more, less))
    return pairs


def padded(x: Value, value: Value, first: int, pairs: Pairs, gaps: Sequence[int]) -> Value:
    """The dims from ``first`` with elements around them, or without some where a number is negative."""
    rank = len(x.shape)
    low, high, interior = [0] * rank, [0] * rank, [0] * rank
    start, cut = [0] * rank, [0] * rank
    for dim, ((before, after), gap) in enumerate(zip(pairs, gaps, strict=True), first):
        low[dim], high[dim], interior[dim] = max(before, 0), max(after, 0), gap
        start[dim], cut[dim] = max(-before, 0), max(-after, 0)
    padded = b.pad(x, value, low=low, high=high, interior=interior)
    limit = [size - less for size, less in zip(padded.shape, cut, strict=True)]
    return b.slice(padded, start, limit, [1] * rank)


def _per_dim(value: Any, count: int, what: str) -> list[int]:
    """One int for each dim; None stands for ones."""
    given = [1] * count if value is None else [value] * count if isinstance(value, int) else list(value)
    if len(given) != count or any(as_int(each, what) < 1 for each in given):
        raise TraceError(f"{what} needs {count} positive ints, got {value!r}{at_user_line()}")
    return given


# ---------------------------------------------------------------------------- convolution


@dataclass(frozen=True)
class Layout:
    """Where the dims of input, kernel and output lie; each spec lists batch (out), feature (in), spatial dims."""

    lhs: tuple[int, ...]
    rhs: tuple[int, ...]
    out: tuple[int, ...]


def _layout(dimension_numbers: Any, rank: int) -> Layout:
    """The layout that three strings say ("NCHW", "OIHW", "NCHW"); None is channels first."""
    spatial = "HWDXYZ"[: rank - 2] if rank > 3 else "W"[: rank - 2]
    names = ("NC" + spatial, "OI" + spatial, "NC" + spatial) if dimension_numbers is None else dimension_numbers
    if not (isinstance(names, tuple) and len(names) == 3 and all(isinstance(name, str) for name in names)):
        raise TraceError(
            f"dimension_numbers must be three strings such as ('NHWC', 'HWIO', 'NHWC'), got {names!r}{at_user_line()}"
        )
    lhs, rhs, out = names
    order = [letter for letter in rhs if letter not in "OI"]
    wanted = (("NC", lhs), ("OI", rhs), ("NC", out))
    if any(len(name) != rank or sorted(name) != sorted([*lead, *order]) for lead, name in wanted):
        raise TraceError(f"dimension_numbers {names!r} do not fit arrays of rank {rank}{at_user_line()}")
    lhs_spec, rhs_spec, out_spec = (tuple(name.index(letter) for letter in [*lead, *order]) for lead, name in wanted)
    return Layout(lhs_spec, rhs_spec, out_spec)


def conv_general_dilated(
    lhs: Value,
    rhs: Value,
    window_strides: Sequence[int],
    padding: Any,
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision: Any = None,
    preferred_element_type: Any = None,
) -> Value:
    """The convolution of deep learning: the meaning of ``jax.lax.conv_general_dilated``.

    Parameters
    ----------
    lhs, rhs : array
        Input and kernel, with any number of spatial dims.
    window_strides : sequence of int
    padding : str or sequence of (int, int)
        "SAME", "SAME_LOWER", "VALID", or elements before and after each spatial dim.
    lhs_dilation, rhs_dilation : sequence of int, optional
        Distances between the elements of input and kernel.
    dimension_numbers : three strings, optional
        Layouts such as ``("NHWC", "HWIO", "NHWC")``; channels first by default.
    feature_group_count : int
        Groups of channels that do not mix.

    Raises
    ------
    TraceError
        If shapes, layouts and groups do not fit.
    """
    (x, w), dtype = factors((lhs, rhs), preferred_element_type)
    rank = len(x.shape)
    if rank < 2 or len(w.shape) != rank or batch_group_count != 1:
        raise TraceError(
            f"a convolution needs an input and a kernel of one rank and batch_group_count 1, got shapes "
            f"{list(x.shape)} and {list(w.shape)}, batch_group_count {batch_group_count}{at_user_line()}"
        )
    layout = _layout(dimension_numbers, rank)
    x = b.transpose(x, (layout.lhs[0], *layout.lhs[2:], layout.lhs[1]))
    w = b.transpose(w, (*layout.rhs[2:], layout.rhs[1], layout.rhs[0]))
    _check_groups(tuple(x.shape), tuple(w.shape), feature_group_count)
    strides, dilations = (_per_dim(v, rank - 2, "strides and dilations") for v in (window_strides, rhs_dilation))
    gaps = [each - 1 for each in _per_dim(lhs_dilation, rank - 2, "lhs_dilation")]
    spans = [(size - 1) * each + 1 for size, each in zip(w.shape, dilations, strict=False)]
    lengths = [size + max(size - 1, 0) * gap for size, gap in zip(x.shape[1:], gaps, strict=False)]
    x = padded(x, 0, 1, _padding(padding, lengths, spans, strides), gaps)
    for dim, (size, stride, each) in enumerate(zip(w.shape, strides, dilations, strict=False), 1):
        x = unfold(x, dim, rank - 2 + dim, size, stride, each)
    result = _windows_times_kernel(x, w, feature_group_count, dtype)
    back = [0, rank - 1, *range(1, rank - 1)]
    return b.transpose(result, [back[layout.out.index(dim)] for dim in range(rank)])


def _check_groups(x: Shape, w: Shape, groups: int) -> None:
    if x[-1] != w[-2] * groups or w[-1] % groups:
        raise TraceError(
            f"a convolution of {x[-1]} channels in {groups} groups needs a kernel of {x[-1] / groups:g} input channels "
            f"and a multiple of {groups} outputs, got {w[-2]} and {w[-1]}{at_user_line()}"
        )


def _windows_times_kernel(x: Value, w: Value, groups: int, dtype: str) -> Value:
    """``[N, spatial, window, C]`` times ``[window, I, O]``, as one product per group."""
    spatial, (inputs, outputs) = len(w.shape) - 2, w.shape[-2:]
    outer, window = tuple(x.shape[: spatial + 1]), prod(w.shape[:spatial])
    grouped = b.reshape(x, (prod(outer), window, groups, inputs))
    kernel = b.reshape(w, (window, inputs, groups, outputs // groups))
    if groups == 1:
        grouped, kernel = (
            b.reshape(grouped, (prod(outer), window, inputs)),
            b.reshape(kernel, (window, inputs, outputs)),
        )
        return b.reshape(contract(grouped, "pti", kernel, "tio", "po", dtype), (*outer, outputs))
    if inputs == 1:
        return _depthwise(grouped, kernel, (*outer, outputs), dtype)
    return b.reshape(contract(grouped, "ptgi", kernel, "tigo", "pgo", dtype), (*outer, outputs))


def _depthwise(x: Value, w: Value, shape: Shape, dtype: str) -> Value:
    """A channel by itself: a sum of products over its window, as there is no matrix."""
    places, window, groups, _ = x.shape
    outputs = w.shape[-1]
    wide = "float32" if aval_of(x).dtype in ("float16", "bfloat16") else aval_of(x).dtype
    full = (places, window, groups, outputs)
    first = b.broadcast(b.cast(b.reshape(x, (places, window, groups)), wide), full, (0, 1, 2))
    second = b.broadcast(b.cast(b.reshape(w, (window, groups, outputs)), wide), full, (1, 2, 3))
    return b.reshape(b.cast(b.sum(b.mul(first, second), dims=(1,)), dtype), shape)


# ---------------------------------------------------------------------------- pooling


def max_pool(
    inputs: Value, window_shape: Sequence[int], strides: Sequence[int] | None = None, padding: Any = "VALID"
) -> Value:
    """The maximum of each window.

    Elements that tie share the gradient (XLA gives it to the first).

    Parameters
    ----------
    inputs : array
        ``[..., spatial dims, channels]``.
    window_shape : sequence of int
        One size for each spatial dim.
    strides : sequence of int, optional
        Ones by default, as in Flax.
    padding : str or sequence of (int, int)
    """
    x = b.as_array(inputs)
    lowest: Any = -math.inf if is_float(aval_of(x).dtype) else _lowest(aval_of(x).dtype)
    return _pool(x, b.max, lowest, window_shape, strides, padding)


def _lowest(dtype: str) -> int:
    return {"int32": -(2**31), "int64": -(2**63)}.get(dtype, 0)


def avg_pool(
    inputs: Value,
    window_shape: Sequence[int],
    strides: Sequence[int] | None = None,
    padding: Any = "VALID",
    count_include_pad: bool = True,
) -> Value:
    """The mean of each window; the padding counts as zeros, or not at all. See ``max_pool``."""
    x = b.as_array(inputs)
    x = b.cast(x, inexact(aval_of(x).dtype))
    wide = b.cast(x, "float32") if aval_of(x).dtype in ("float16", "bfloat16") else x
    total = _pool(wide, b.sum, 0.0, window_shape, strides, padding)
    if count_include_pad:
        return b.cast(b.div(total, float(prod(window_shape))), x.dtype)
    count = _pool(b.full(wide.shape, 1, wide.dtype), b.sum, 0.0, window_shape, strides, padding)
    return b.cast(b.div(total, count), x.dtype)


def _pool(
    x: Value, reduce: Callable[..., Value], neutral: float, window_shape: Sequence[int], strides: Any, padding: Any
) -> Value:
    """One spatial dim after the other."""
    sizes = list(window_shape)
    count = len(sizes)
    first = len(x.shape) - 1 - count
    if first < 0:
        raise TraceError(
            f"pooling over {count} dims needs [..., spatial dims, channels], got shape {list(x.shape)}{at_user_line()}"
        )
    steps = _per_dim(strides, count, "strides")
    pairs = _padding(padding, x.shape[first:-1], sizes, steps)
    x = padded(x, neutral, first, pairs, [0] * count)
    for dim, (size, step) in enumerate(zip(sizes, steps, strict=True), first):
        rank = len(x.shape)
        x = reduce(unfold(x, dim, rank, size, step, 1), dims=(rank,))
    return x
