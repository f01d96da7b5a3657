"""Programs that cover the op table: every op × dtypes × views × broadcasts × output dtypes.

All is derived from the table's entries (kind, operand counts, attributes with their checks,
sample range), so that a new pointwise op is covered by its entry alone. One Program holds the
cases of one op and dtype, each case an operation whose result is a Program output, so that a
whole column of the table costs one compilation.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainkernel.builder import ProgramBuilder
from trainkernel.dtypes import DTYPES
from trainkernel.ir import Program, TensorSpec, dense_strides
from trainkernel.ops import OPS, REQUIRED, Op

FLOATS = ("float32", "float16", "bfloat16")
DTYPE_NAMES = (*FLOATS, "bool")
LAYOUTS = ("dense", "transposed", "sliced", "input view", "broadcast rows", "broadcast columns")

SPECIALS = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0, 2.0**-149, -3e-42, 0.5, 3.0e38, 2.0])

ATTR_CANDIDATES: tuple[Any, ...] = (2, -0.5, 0, "lt", "le", "gt", "ge", "eq", "ne")
"""Values offered to every attribute's check; what passes is tested."""

PRODUCT_SIZES = (
    (1, 1, 1),
    (1, 64, 5),
    (1, 201, 33),
    (3, 8, 70),
    (4, 100, 9),
    (33, 7, 18),
    (33, 70, 65),
    (64, 64, 64),
    (17, 33, 31),
    (65, 16, 16),
    (0, 4, 3),
    (3, 0, 4),
    (3, 4, 0),
    (1, 0, 2),
)
"""m, k, n: the scalar product, GEMV, thin, ragged and whole tiles, and every empty one."""

BATCHED_SIZES = (
    (3, 1, 1, 1),
    (5, 1, 64, 40),
    (3, 70, 64, 1),
    (9, 1, 100, 3),
    (4, 3, 8, 70),
    (2, 4, 300, 9),
    (3, 33, 70, 65),
    (2, 17, 400, 18),
    (1, 33, 40, 17),
    (0, 4, 3, 5),
    (2, 0, 4, 3),
    (2, 3, 0, 4),
)
"""batch, m, k, n: dot products, both GEMVs, thin with and without split depth, tiles, split tiles, and empty ones."""

REDUCED: tuple[tuple[tuple[int, ...], tuple[int, ...] | None], ...] = (
    ((5, 7), None),
    ((5, 7), ()),
    ((5, 7), (0,)),
    ((5, 7), (-1,)),
    ((), None),
    ((1,), (0,)),
    ((3, 4, 5, 6), (1, 3)),
    ((3, 4, 5, 6), (0, 2)),
    ((40, 3), (1,)),
    ((3, 300), (0,)),
    ((9, 129), (1,)),
    ((2, 4500), (1,)),
    ((4500, 2), (0,)),
    ((0, 7), (1,)),
)
"""Shapes and dims: one thread per row, one block per row, two phases, and kept dims beside."""


@dataclass(frozen=True)
class Case:
    """A Program, its inputs, and a name for reports."""

    name: str
    program: Program
    inputs: tuple[Any, ...]


class CaseBuilder:
    """A ProgramBuilder that also draws the inputs and lays them out."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.rng = np.random.default_rng(zlib.crc32(name.encode()))
        self.builder = ProgramBuilder()
        self.inputs: list[Any] = []
        self.outputs: list[TensorSpec] = []

    def draw(self, shape: Sequence[int], dtype: str, sample: tuple[float, float]) -> NDArray[Any]:
        """Random values of an op's sample range; a third lie on a coarse grid, so that ties occur."""
        if dtype == "bool":
            return self.rng.random(shape) < 0.5
        values = self.rng.uniform(*sample, shape)
        coarse = np.clip(np.round(values * 4) / 4, *sample)
        return np.where(self.rng.random(shape) < 1 / 3, coarse, values).astype(DTYPES[dtype].numpy)

    def tensor(self, values: NDArray[Any]) -> TensorSpec:
        """A dense input holding ``values``."""
        self.inputs.append(np.ascontiguousarray(values).reshape(values.shape))
        return self.builder.input("x", values.shape, values.dtype.name)

    def place(self, values: NDArray[Any], layout: str) -> TensorSpec:
        """An operand of the shape of ``values`` in the given layout.

        What surrounds a slice is NaN, so that a read beside it is seen in the result.
        """
        if layout == "transposed":
            return self.tensor(values.T).T
        if layout == "sliced":
            return self._sliced(values)
        if layout == "input view":
            return self._input_view(values)
        if layout == "broadcast rows" and values.ndim:
            return self.tensor(values[:1]).broadcast_to(values.shape)
        if layout == "broadcast columns" and values.ndim:
            return self.tensor(values[..., :1]).broadcast_to(values.shape)
        return self.tensor(values)

    def _sliced(self, values: NDArray[Any]) -> TensorSpec:
        whole = np.full([2 * size + 3 for size in values.shape], np.nan).astype(values.dtype)
        whole[tuple(slice(1, 1 + 2 * size, 2) for size in values.shape)] = values
        base = self.tensor(whole)
        offset = sum(base.strides)
        return TensorSpec(base.buffer, values.shape, tuple(2 * step for step in base.strides), offset, base.dtype)

    def _input_view(self, values: NDArray[Any]) -> TensorSpec:
        strides = tuple(2 * step + 1 for step in dense_strides(values.shape))
        spec = self.builder.input_view(
            TensorSpec(f"view{len(self.inputs)}", values.shape, strides, 3, values.dtype.name)
        )
        self.inputs.append(strided_array(values, strides))
        return spec

    def add(self, op: str, *operands: Any, **rest: Any) -> None:
        """One operation whose results are all Program outputs."""
        self.outputs += self.builder.multi(op, *operands, **rest)

    def case(self) -> Case:
        return Case(self.name, self.builder.build(self.outputs), tuple(self.inputs))


def strided_array(values: NDArray[Any], strides: Sequence[int]) -> NDArray[Any]:
    """An array of exactly these strides (in elements) holding ``values``."""
    if values.size == 0:
        return np.zeros(values.shape, values.dtype)
    last = sum((size - 1) * stride for size, stride in zip(values.shape, strides, strict=True))
    base = np.full(last + 1, np.nan).astype(values.dtype)
    item = values.dtype.itemsize
    array = np.lib.stride_tricks.as_strided(base, values.shape, [stride * item for stride in strides])
    array[...] = values
    return array


# ---------------------------------------------------------------------------- attributes


def attr_sets(op: Op) -> list[Mapping[str, Any]]:
    """The defaults, then every attribute at each candidate that its check lets pass."""
    required = {key for key, (default, _) in op.attrs.items() if default is REQUIRED}
    allowed = {
        key: [value for value in ATTR_CANDIDATES if check(value) is None]
        for key, (_, check) in op.attrs.items()
        if key != "dims"
    }
    missing = [key for key in required if not allowed[key]]
    assert not missing, f"{op.name}: no value in ATTR_CANDIDATES fits {missing}; add one"
    base = {key: allowed[key][0] for key in required}
    sets: list[Mapping[str, Any]] = [base]
    sets += [base | {key: value} for key, values in allowed.items() for value in values if base.get(key) != value]
    return sets


# ---------------------------------------------------------------------------- pointwise


def _tensor_counts(op: Op) -> list[int]:
    """How many tensors an op may take: pow's exponent is never one."""
    return [1] if op.name == "pow" else list(op.num_inputs)


def pointwise_case(op: Op, dtype: str) -> Case:
    """All layouts, broadcasts, ranks, scalars, attributes and output dtypes of a pointwise op."""
    c = CaseBuilder(f"{op.name} {dtype}")
    sets = attr_sets(op)
    for count in _tensor_counts(op):
        for first, layout in enumerate(LAYOUTS):
            layouts = [LAYOUTS[(first + 2 * position) % len(LAYOUTS)] for position in range(count)]
            operands = [c.place(c.draw((5, 7), dtype, op.sample), each) for each in layouts]
            c.add(op.name, *operands, shape=(5, 7), dtype="float32" if layout == "dense" else dtype, **sets[0])
        for shapes, shape in (
            ([(5, 1), (7,), (1, 1)], (5, 7)),
            ([(7,), (1, 7), ()], (3, 5, 7)),
            ([(), (), ()], ()),
            ([(0, 3), (1, 3), (3,)], (0, 3)),
            ([(2, 1, 3, 5), (4, 1, 5), (2, 1, 1, 1)], (2, 4, 3, 5)),
            ([(33, 40), (40,), (33, 1)], (33, 40)),
        ):
            operands = [c.tensor(c.draw(each, dtype, op.sample)) for each in shapes[:count]]
            c.add(op.name, *operands, shape=shape, dtype=dtype, **sets[0])
        dense = [c.tensor(c.draw((3, 4), dtype, op.sample)) for _ in range(count)]
        for output in DTYPE_NAMES:
            c.add(op.name, *dense, shape=(3, 4), dtype=output, **sets[0])
        for attrs in sets[1:]:
            c.add(op.name, *dense, shape=(3, 4), dtype=dtype if dtype != "bool" else "float32", **attrs)
        if dtype in FLOATS and count:
            _add_specials(c, op, dtype, count, sets)
    _add_scalars(c, op, dtype, sets)
    return c.case()


def _add_specials(c: CaseBuilder, op: Op, dtype: str, count: int, sets: Sequence[Mapping[str, Any]]) -> None:
    """Every combination of NaN, infinities, zeros, denormals and large numbers."""
    with np.errstate(over="ignore"):
        values = SPECIALS.astype(DTYPES[dtype].numpy)
    size = len(values)
    operands = []
    for position in range(count):
        dims = [1] * count
        dims[position] = size
        operands.append(c.tensor(values.reshape(dims)))
    for attrs in sets:
        c.add(op.name, *operands, shape=(size,) * count, dtype="float32", **attrs)


def _add_scalars(c: CaseBuilder, op: Op, dtype: str, sets: Sequence[Mapping[str, Any]]) -> None:
    """A Python number in each operand position, non-finite ones included, and by-value scalars."""
    count = max(op.num_inputs)
    if not op.scalar_operands or count == 0:
        return
    low, high = op.sample
    numbers: list[float | int] = [2, low + 0.3 * (high - low), float("nan"), float("inf")]
    tensor = c.tensor(c.draw((3, 4), dtype, op.sample))
    attrs = {key: value for key, value in sets[0].items() if not (op.name == "pow" and count == 2)}
    for position, number in product(range(count), numbers):
        if op.name == "pow" and position == 0:
            continue
        operands: list[Any] = [tensor] * count
        operands[position] = number
        c.add(op.name, *operands, shape=(3, 4), dtype="float32", **attrs)
    c.add(op.name, *[numbers[1]] * count, shape=(2, 3), dtype=dtype, **attrs)
    by_value = c.builder.scalar("scalar")
    c.inputs.append(float(np.float32(numbers[1])))
    if op.name != "pow":
        c.add(op.name, *[tensor] * (count - 1), by_value, shape=(3, 4), dtype="float32", **attrs)


# ---------------------------------------------------------------------------- reductions


def reduction_case(op: Op, dtype: str) -> Case:
    """All shapes, dims, layouts and output dtypes of a reduction."""
    c = CaseBuilder(f"{op.name} {dtype}")
    for shape, dims in REDUCED:
        x = c.tensor(c.draw(shape, dtype, op.sample))
        c.add(op.name, x, dims=dims)
    for layout, dims in product(LAYOUTS, [(0,), (1,), (0, 1)]):
        x = c.place(c.draw((12, 33), dtype, op.sample), layout)
        kept = tuple(1 if dim in dims else size for dim, size in enumerate(x.shape))
        c.add(op.name, x, dims=dims, shape=kept, dtype="float32")
    x = c.tensor(c.draw((9, 40), dtype, op.sample))
    for output in DTYPE_NAMES:
        c.add(op.name, x, dims=(1,), dtype=output)
        c.add(op.name, x, dims=(0,), dtype=output)
    if op.name in ("sum", "mean"):
        empty = c.tensor(np.zeros((0, 4), DTYPES[dtype].numpy))
        c.add(op.name, empty, dims=(0,))
        c.add(op.name, empty)
    if dtype in FLOATS:
        rows = c.draw((9, 40), dtype, op.sample)
        for row, values in enumerate(([np.nan], [np.inf], [-np.inf], [np.inf, -np.inf], [np.inf, np.nan], [-0.0])):
            rows[row, 3 : 3 + len(values)] = values
        rows[7], rows[8] = -np.inf, np.inf
        special = c.tensor(rows)
        c.add(op.name, special, dims=(1,), dtype="float32")
        c.add(op.name, special, dims=(0,), dtype="float32")
    return c.case()


# ---------------------------------------------------------------------------- products


def product_case(op: Op, dtypes: tuple[str, str], sizes: tuple[int, int, int]) -> Case:
    """The layouts of both operands of one product, output dtypes, and addmm's biases and factors."""
    m, k, n = sizes
    c = CaseBuilder(f"{op.name} {dtypes[0]} {dtypes[1]} {m}x{k}x{n}")
    a_values = c.draw((m, k), dtypes[0], op.sample)
    b_values = c.draw((k, n), dtypes[1], op.sample)
    small = m * k * n < 30_000
    pairs = [("dense", "dense"), ("transposed", "transposed"), ("sliced", "input view"), ("dense", "transposed")]
    if small:
        pairs += [("transposed", "dense"), ("input view", "sliced"), ("broadcast rows", "broadcast columns")]
    if 0 in sizes:
        pairs = pairs[:2]
    outputs = [dtypes[0], "float32", "float16", "bfloat16", "float32", dtypes[1], "bool"]
    for (a_layout, b_layout), output in zip(pairs, outputs, strict=False):
        a, b = c.place(a_values, a_layout), c.place(b_values, b_layout)
        if op.name == "mm":
            c.add("mm", a, b, dtype=output)
        else:
            c.add("addmm", c.tensor(c.draw((n,), dtypes[0], op.sample)), a, b, dtype=output)
    if op.name == "addmm":
        _add_biases(c, op, dtypes, (m, n), c.tensor(a_values), c.tensor(b_values))
    return c.case()


def batched_product_case(dtypes: tuple[str, str], sizes: tuple[int, int, int, int]) -> Case:
    """A batched product of plain, permuted, sliced and stride-0 operands, fused on both sides."""
    batch, m, k, n = sizes
    c = CaseBuilder(f"bmm {dtypes[0]} {dtypes[1]} {batch}x{m}x{k}x{n}")
    a_values = c.draw((batch, m, k), dtypes[0], OPS["bmm"].sample)
    b_values = c.draw((batch, k, n), dtypes[1], OPS["bmm"].sample)
    pairs = [("dense", "dense"), ("permuted", "swapped"), ("swapped", "permuted"), ("shared", "input view")]
    if batch * m * k * n < 30_000:
        pairs += [("sliced", "shared"), ("swapped", "dense")]
    for (a_layout, b_layout), output in zip(pairs, (dtypes[0], "float32", "float16", "bfloat16") * 2, strict=False):
        a, b = _place_batched(c, a_values, a_layout), _place_batched(c, b_values, b_layout)
        c.add("bmm", a, b, dtype=output)
    a, b = c.tensor(a_values), c.tensor(b_values)
    scaled = c.builder.op("mul", a, 0.5)
    product = c.builder.op("bmm", scaled, c.builder.op("cast", b, dtype=dtypes[0]), dtype="float32")
    column = c.tensor(c.draw((1, m, 1), "float32", (-2, 2)))
    c.add("relu", c.builder.op("add", product, column))
    return c.case()


def _place_batched(c: CaseBuilder, values: NDArray[Any], layout: str) -> TensorSpec:
    """A batch of matrices: transposed ones, one that all share, or with the batch inside (heads of a sequence)."""
    if layout == "swapped":
        return c.tensor(np.swapaxes(values, 1, 2)).mT
    if layout == "shared":
        one = c.tensor(values[0] if len(values) else np.zeros(values.shape[1:], values.dtype))
        return one.broadcast_to(values.shape)
    if layout == "permuted":
        inside = c.tensor(np.swapaxes(values, 0, 1))
        strides = (inside.strides[1], inside.strides[0], inside.strides[2])
        return TensorSpec(inside.buffer, values.shape, strides, 0, inside.dtype)
    return c.place(values, layout)


def _add_biases(
    c: CaseBuilder, op: Op, dtypes: tuple[str, str], size: tuple[int, int], a: TensorSpec, b: TensorSpec
) -> None:
    m, n = size
    shapes: list[tuple[int, ...]] = [(m, n), (m, 1), (1, n), (), (1,)]
    for shape, attrs in zip(shapes, attr_sets(op), strict=False):
        layout = "sliced" if len(shape) == 2 else "dense"
        bias = c.place(c.draw(shape, dtypes[1], op.sample), layout)
        c.add("addmm", bias, a, b, dtype="float32", **attrs)
    nan = c.tensor(np.full((n,), np.nan).astype(DTYPES[dtypes[0]].numpy))
    c.add("addmm", nan, a, b, dtype="float32", beta=0)
    c.add("addmm", nan, a, b, dtype="float32", beta=0.0, alpha=0)
    nans = c.tensor(np.full(a.shape, np.nan).astype(DTYPES[a.dtype].numpy))
    c.add("addmm", nan, nans, b, dtype="float32", beta=1e-60, alpha=-1e-60)
    bias = c.tensor(c.draw((n,), dtypes[0], op.sample))
    c.add("addmm", bias, a, b, dtype="float32", alpha=0, beta=-0.5)


# ---------------------------------------------------------------------------- all


def op_cases() -> Iterator[Case]:
    """Every case of the table, in the table's order."""
    for op in OPS.values():
        if op.kind == "pointwise":
            dtypes: Sequence[str] = DTYPE_NAMES if max(op.num_inputs) else ("float32",)
            yield from (pointwise_case(op, dtype) for dtype in dtypes)
        elif op.kind == "reduction":
            yield from (reduction_case(op, dtype) for dtype in DTYPE_NAMES)
        elif op.name == "bmm":
            for dtype, batched in product(FLOATS, BATCHED_SIZES):
                yield batched_product_case((dtype, dtype), batched)
            yield batched_product_case(("float16", "bfloat16"), (3, 17, 33, 31))
        else:
            for dtype, sizes in product(FLOATS, PRODUCT_SIZES):
                yield product_case(op, (dtype, dtype), sizes)
            for pair in (("float16", "bfloat16"), ("float32", "float16"), ("bool", "float32")):
                yield product_case(op, pair, (17, 33, 31))
