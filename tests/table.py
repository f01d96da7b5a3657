"""Programs that cover the op table: every op × dtypes × views × broadcasts × output dtypes.

All is derived from the table's entries (kind, operand counts, attributes with their checks,
sample range, what they accept), so that a new pointwise op is covered by its entry alone. One
Program holds the cases of one op and dtype, each case an operation whose result is a Program
output, so that a whole column of the table costs one compilation. Views and broadcasts do not
depend on the dtype: they are swept in full for float32 and for a few ops of every dtype.
"""

from __future__ import annotations

import functools
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
from trainkernel.ops import OPS, REQUIRED, Op, domains

FLOATS = ("float32", "float16", "bfloat16")
DTYPE_NAMES = tuple(DTYPES)
INTEGERS = tuple(name for name, dtype in DTYPES.items() if dtype.numpy.kind in "iu")
SWEPT_IN_FULL = ("add", "where")
REDUCED_IN_FULL = ("sum", "softmax_stats")
MIXED = ("add", "mul", "where", "compare", "maximum", "remainder")
OWN_TABLES = ("scatter_add", "cumsum")
"""Ops that ``scan_table`` covers; ``indexed_table`` covers the indexed ones."""
LAYOUTS = ("dense", "transposed", "sliced", "input view", "broadcast rows", "broadcast columns")

SPECIALS = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0, 2.0**-149, -3e-42, 0.5, 3.0e38, 2.0])

WIDE_SPECIALS = np.array([*SPECIALS, 2.0**-1074, 1e300, -1e300, 2.0**53 + 2, 1 + 2.0**-52, 65520.0, 2.0**31, -3e9])

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


SHORT_REDUCED = (
    ((5, 7), None),
    ((40, 3), (1,)),
    ((3, 300), (0,)),
    ((9, 129), (1,)),
    ((2, 4500), (1,)),
    ((4500, 9), (0,)),
)
"""One shape for each way in which a reduction uses threads."""


def is_covered(op: Op) -> bool:
    """Whether the op is one of this table."""
    return op.kind in ("pointwise", "reduction", "product") and not op.indexed and op.name not in OWN_TABLES


def accepts(op: Op, dtype: str) -> bool:
    """Whether operands of a dtype may be computed with."""
    return op.accepts != "int" or domains.domain_of_dtype(dtype) in domains.INTEGER_DOMAINS or dtype == "bool"


def specials(dtype: str) -> NDArray[Any]:
    """The numbers of a dtype at which something may go wrong."""
    numpy_dtype = DTYPES[dtype].numpy
    if dtype == "bool":
        return np.array([False, True])
    if dtype in INTEGERS:
        bounds = np.iinfo(numpy_dtype)
        small = (
            -33,
            -7,
            -2,
            -1,
            0,
            1,
            2,
            7,
            31,
            33,
            64,
            255,
            2**24 + 1,
            2**25 + 2**17 + 1,
            2**53 + 1,
            2**62 + 2**54 + 1,
        )
        values = [value for value in small if bounds.min <= value <= bounds.max]
        return np.array([bounds.min, bounds.min + 1, *values, bounds.max - 1, bounds.max], numpy_dtype)
    with np.errstate(over="ignore"):
        return (WIDE_SPECIALS if dtype == "float64" else SPECIALS).astype(numpy_dtype)


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
        if dtype in INTEGERS:
            return self.rng.integers(0 if dtype[0] == "u" else -20, 21, shape).astype(DTYPES[dtype].numpy)
        values = self.rng.uniform(*sample, shape)
        coarse = np.clip(np.round(values * 4) / 4, *sample)
        return np.where(self.rng.random(shape) < 1 / 3, coarse, values).astype(DTYPES[dtype].numpy)

    def draw_factors(self, shape: Sequence[int], dtype: str, op: Op) -> NDArray[Any]:
        """Values for a reduction; a long product is of ones and a few other powers of two, to stay in range."""
        values = self.draw(shape, dtype, op.sample)
        if op.name != "prod" or dtype == "bool":
            return values
        powers = self.rng.choice([2, 3] if dtype[0] == "u" else [2, -1, 3] if dtype[0] == "i" else [2, -1, 0.5], shape)
        few = self.rng.random(shape) < min(1.0, 20 / max(values.size, 1))
        return np.where(few, powers, 1).astype(values.dtype) if values.size > 100 else values

    def tensor(self, values: NDArray[Any]) -> TensorSpec:
        """A dense input holding ``values``."""
        self.inputs.append(np.ascontiguousarray(values).reshape(values.shape))
        return self.builder.input("x", values.shape, values.dtype.name)

    def place(self, values: NDArray[Any], layout: str) -> TensorSpec:
        """An operand of the shape of ``values`` in the given layout.

        What surrounds a slice is NaN (for integers 99), so that a read beside it is seen in the result.
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
        whole = np.full([2 * size + 3 for size in values.shape], _gap(values.dtype))
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


def _gap(dtype: np.dtype[Any]) -> Any:
    return np.array(99 if dtype.kind in "iu" else np.nan).astype(dtype)


def strided_array(values: NDArray[Any], strides: Sequence[int]) -> NDArray[Any]:
    """An array of exactly these strides (in elements) holding ``values``."""
    if values.size == 0:
        return np.zeros(values.shape, values.dtype)
    last = sum((size - 1) * stride for size, stride in zip(values.shape, strides, strict=True))
    base = np.full(last + 1, _gap(values.dtype))
    item = values.dtype.itemsize
    array = np.lib.stride_tricks.as_strided(base, values.shape, [stride * item for stride in strides])
    array[...] = values
    return array


# ---------------------------------------------------------------------------- attributes


def attr_sets(op: Op, domain: str = "float32") -> list[Mapping[str, Any]]:
    """The defaults, then every attribute at each candidate that its check and the domain let pass."""
    required = {key for key, (default, _) in op.attrs.items() if default is REQUIRED}
    allowed = {
        key: [value for value in _candidates(key in op.constants, domain) if check(value) is None]
        for key, (_, check) in op.attrs.items()
        if key != "dims"
    }
    missing = [key for key in required if not allowed[key]]
    assert not missing, f"{op.name}: no value in ATTR_CANDIDATES fits {missing}; add one"
    base = {key: allowed[key][0] for key in required}
    sets: list[Mapping[str, Any]] = [base]
    sets += [base | {key: value} for key, values in allowed.items() for value in values if base.get(key) != value]
    return sets


def _candidates(is_number: bool, domain: str) -> list[Any]:
    whole = is_number and domain in domains.INTEGER_DOMAINS
    return [value for value in ATTR_CANDIDATES if not (whole and isinstance(value, float))]


# ---------------------------------------------------------------------------- pointwise


def _tensor_counts(op: Op) -> list[int]:
    """How many tensors an op may take: pow's exponent is never one."""
    return [1] if op.name == "pow" else list(op.num_inputs)


def pointwise_case(op: Op, dtype: str) -> Case:
    """All layouts, broadcasts, ranks, scalars, attributes and output dtypes of a pointwise op."""
    c = CaseBuilder(f"{op.name} {dtype}")
    sets = attr_sets(op, domains.promote([dtype], op.accepts))
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
            c.add(op.name, *dense, shape=(3, 4), dtype=_wide(dtype), **attrs)
        if count:
            _add_specials(c, op, dtype, count, sets)
    _add_scalars(c, op, dtype, sets)
    return c.case()


def short_case(op: Op, dtype: str) -> Case:
    """One layout and one broadcast of a pointwise op, its attributes, specials and scalars."""
    c = CaseBuilder(f"{op.name} {dtype}")
    sets = attr_sets(op, domains.promote([dtype], op.accepts))
    for count in _tensor_counts(op):
        layouts = ("sliced", "transposed", "input view")[:count]
        operands = [c.place(c.draw((5, 7), dtype, op.sample), layout) for layout in layouts]
        c.add(op.name, *operands, shape=(5, 7), dtype=dtype, **sets[0])
        operands = [c.tensor(c.draw(shape, dtype, op.sample)) for shape in ((33, 40), (40,), (33, 1))[:count]]
        output = DTYPE_NAMES[zlib.crc32(c.name.encode()) % len(DTYPE_NAMES)]
        for attrs in sets:
            c.add(op.name, *operands, shape=(33, 40), dtype=output if attrs is sets[0] else _wide(dtype), **attrs)
        if count:
            _add_specials(c, op, dtype, count, sets[:1])
    _add_scalars(c, op, dtype, sets, slice(None, None, 3))
    return c.case()


def _wide(dtype: str) -> str:
    """The dtype, for bool one that shows what the op computes."""
    return dtype if dtype != "bool" else "float32"


def _add_specials(c: CaseBuilder, op: Op, dtype: str, count: int, sets: Sequence[Mapping[str, Any]]) -> None:
    """Every combination of a dtype's specials: NaN, infinities, zeros, denormals; the least and greatest."""
    values = specials(dtype)
    size = len(values)
    operands = []
    for position in range(count):
        dims = [1] * count
        dims[position] = size
        operands.append(c.tensor(values.reshape(dims)))
    output = "float32" if dtype in (*FLOATS, "bool") else dtype
    for attrs in sets:
        c.add(op.name, *operands, shape=(size,) * count, dtype=output, **attrs)


def _numbers(op: Op, domain: str) -> list[float | int]:
    """Python numbers that a domain holds."""
    if domain in domains.INTEGER_DOMAINS:
        bounds = np.iinfo(domain)
        return [2, 5, int(bounds.max), int(bounds.min)]
    low, high = op.sample
    return [2, low + 0.3 * (high - low), float("nan"), float("inf"), -0.0]


def _add_scalars(
    c: CaseBuilder, op: Op, dtype: str, sets: Sequence[Mapping[str, Any]], chosen: slice = slice(None)
) -> None:
    """A Python number in each operand position, non-finite ones included, and by-value scalars."""
    count = max(op.num_inputs)
    if not op.scalar_operands or count == 0:
        return
    tensor = c.tensor(c.draw((3, 4), dtype, op.sample))
    numbers = _numbers(op, domains.promote([dtype], op.accepts))[chosen]
    output = "int32" if op.accepts == "int" and dtype == "bool" else _wide(dtype)
    attrs = {key: value for key, value in sets[0].items() if not (op.name == "pow" and count == 2)}
    for position, number in product(range(count), numbers):
        if op.name == "pow" and position == 0:
            continue
        if op.data_operands is not None and position not in op.data_operands:
            number = bool(number) + 0
        operands: list[Any] = [tensor] * count
        operands[position] = number
        c.add(op.name, *operands, shape=(3, 4), dtype=output, **attrs)
    c.add(op.name, *[numbers[1]] * count, shape=(2, 3), dtype=output, **attrs)
    if op.name == "pow":
        return
    by_value = "float32" if accepts(op, "float32") else "int32"
    c.inputs.append(float(np.float32(op.sample[0] + 0.3 * (op.sample[1] - op.sample[0]))) if by_value[0] == "f" else 3)
    c.add(op.name, *[tensor] * (count - 1), c.builder.scalar("scalar", by_value), shape=(3, 4), **attrs)


def conversion_case() -> Case:
    """Every dtype's specials to every dtype, by a cast and by an output of another dtype, and as literals."""
    c = CaseBuilder("cast of specials")
    for source in DTYPE_NAMES:
        x = c.tensor(specials(source))
        computed = c.builder.op("neg", x)
        for value in specials(source):
            c.add("full", shape=(3,), dtype=source, value=value.item() if source != "bool" else int(value))
        for dtype in DTYPE_NAMES:
            c.add("cast", x, dtype=dtype)
            c.outputs.append(TensorSpec(computed.buffer, computed.shape, computed.strides, 0, dtype))
    return c.case()


def mixed_case(op: Op) -> Case:
    """Operands of every pair of dtypes; conditions keep their own."""
    c = CaseBuilder(f"{op.name} of mixed dtypes")
    tensors = {dtype: c.tensor(c.draw((3, 4), dtype, (0.25, 3.0))) for dtype in DTYPE_NAMES}
    attrs = attr_sets(op)[0]
    for first, second in product(DTYPE_NAMES, DTYPE_NAMES):
        operands = [tensors[first], tensors[second]]
        if max(op.num_inputs) == 3:
            operands = [tensors[first], tensors[second], tensors["int32"]]
        output = DTYPE_NAMES[(len(c.outputs) * 5) % len(DTYPE_NAMES)]
        c.add(op.name, *operands, dtype=output, **attrs)
    for dtype in INTEGERS:  # with a Python float it is computed in float32
        rest = (tensors[dtype],) * (max(op.num_inputs) - 1)
        c.add(op.name, *rest, 2.5, dtype="float32", **attrs)
    return c.case()


# ---------------------------------------------------------------------------- reductions


def reduction_case(op: Op, dtype: str) -> Case:
    """All shapes, dims, layouts and output dtypes of a reduction."""
    c = CaseBuilder(f"{op.name} {dtype}")
    for shape, dims in REDUCED:
        x = c.tensor(c.draw_factors(shape, dtype, op))
        c.add(op.name, x, dims=dims)
    for layout, dims in product(LAYOUTS, [(0,), (1,), (0, 1)]):
        x = c.place(c.draw((12, 33), dtype, op.sample), layout)
        kept = tuple(1 if dim in dims else size for dim, size in enumerate(x.shape))
        c.add(op.name, x, dims=dims, shape=kept, dtype="float32")
    _add_outputs(c, op, dtype)
    _add_special_rows(c, op, dtype)
    return c.case()


def short_reduction_case(op: Op, dtype: str) -> Case:
    """One shape for each way to use threads, output dtypes and special rows of a reduction."""
    c = CaseBuilder(f"{op.name} {dtype}")
    for shape, dims in SHORT_REDUCED:
        c.add(op.name, c.tensor(c.draw_factors(shape, dtype, op)), dims=dims)
    _add_outputs(c, op, dtype)
    _add_special_rows(c, op, dtype)
    return c.case()


def _add_outputs(c: CaseBuilder, op: Op, dtype: str) -> None:
    x = c.tensor(c.draw_factors((9, 40), dtype, op))
    for output in DTYPE_NAMES:
        c.add(op.name, x, dims=(1,), dtype=output)
    c.add(op.name, x, dims=(0,), dtype="float32")
    if op.name in ("sum", "mean", "prod", "moments"):
        empty = c.tensor(np.zeros((0, 4), DTYPES[dtype].numpy))
        c.add(op.name, empty, dims=(0,))
        c.add(op.name, empty)


def _add_special_rows(c: CaseBuilder, op: Op, dtype: str) -> None:
    """Rows that NaN, infinities and -0 decide; integers that overflow."""
    if dtype in (*FLOATS, "float64"):
        rows = c.draw((9, 40), dtype, op.sample)
        for row, values in enumerate(([np.nan], [np.inf], [-np.inf], [np.inf, -np.inf], [np.inf, np.nan], [-0.0])):
            rows[row, 3 : 3 + len(values)] = values
        rows[7], rows[8] = -np.inf, np.inf
        special = c.tensor(rows)
        c.add(op.name, special, dims=(1,), dtype="float32")
        c.add(op.name, special, dims=(0,), dtype="float32")
    elif dtype in INTEGERS:
        values = specials(dtype)
        special = c.tensor(c.rng.choice(values, (9, 40)))
        c.add(op.name, special, dims=(1,))
        c.add(op.name, special, dims=(0,), dtype="int64")


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
    outputs = [dtypes[0]] * 6 if dtypes[0] in INTEGERS else [dtypes[0], "float32", "float16", "bfloat16"] * 2
    for (a_layout, b_layout), output in zip(pairs, outputs, strict=False):
        a, b = _place_batched(c, a_values, a_layout), _place_batched(c, b_values, b_layout)
        c.add("bmm", a, b, dtype=output)
    a, b = c.tensor(a_values), c.tensor(b_values)
    scaled = c.builder.op("mul", a, 2)
    together = c.builder.op(
        "bmm", scaled, c.builder.op("cast", b, dtype=dtypes[0]), dtype=dtypes[0] if dtypes[0] in INTEGERS else "float32"
    )
    column = c.tensor(c.draw((1, m, 1), together.dtype, (-2, 2)))
    c.add("relu", c.builder.op("add", together, column))
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
    domain = domains.promote(dtypes)
    for shape, attrs in zip(shapes, attr_sets(op, domain), strict=False):
        layout = "sliced" if len(shape) == 2 else "dense"
        bias = c.place(c.draw(shape, dtypes[1], op.sample), layout)
        c.add("addmm", bias, a, b, dtype="float32", **attrs)
    zero, factor = (0, 3) if domain in domains.INTEGER_DOMAINS else (0.0, -0.5)
    nan = c.tensor(np.full((n,), _gap(DTYPES[dtypes[0]].numpy)))
    c.add("addmm", nan, a, b, dtype="float32", beta=0)
    c.add("addmm", nan, a, b, dtype="float32", beta=zero, alpha=0)
    if a.dtype in FLOATS:
        nans = c.tensor(np.full(a.shape, np.nan).astype(DTYPES[a.dtype].numpy))
        c.add("addmm", nan, nans, b, dtype="float32", beta=1e-60, alpha=-1e-60)
    bias = c.tensor(c.draw((n,), dtypes[0], op.sample))
    c.add("addmm", bias, a, b, dtype="float32", alpha=0, beta=factor)


# ---------------------------------------------------------------------------- all


@functools.cache
def op_cases() -> tuple[Case, ...]:
    """Every case of the table, in the table's order; ``indexed_table`` and ``scan_table`` have the others."""
    return tuple(_op_cases())


def _op_cases() -> Iterator[Case]:
    for op in filter(is_covered, OPS.values()):
        if op.kind == "pointwise":
            yield from _pointwise_cases(op)
        elif op.kind == "reduction":
            for dtype in DTYPE_NAMES:
                full = op.name in REDUCED_IN_FULL and dtype in ("float32", "int32")
                yield reduction_case(op, dtype) if full else short_reduction_case(op, dtype)
        else:
            yield from _product_cases(op)
    yield conversion_case()
    yield from (mixed_case(OPS[name]) for name in MIXED)


def _pointwise_cases(op: Op) -> Iterator[Case]:
    for dtype in DTYPE_NAMES:
        if not accepts(op, dtype):
            continue
        full = op.name in SWEPT_IN_FULL or dtype == ("float32" if accepts(op, "float32") else "int32")
        yield pointwise_case(op, dtype) if full else short_case(op, dtype)


def _product_cases(op: Op) -> Iterator[Case]:
    if op.name == "bmm":
        for dtype, batched in product(FLOATS, BATCHED_SIZES):
            yield batched_product_case((dtype, dtype), batched)
        for dtype in ("float64", *INTEGERS):
            yield batched_product_case((dtype, dtype), (2, 4, 300, 9))
        for pair in (("float16", "bfloat16"), ("int32", "float32")):
            yield batched_product_case(pair, (3, 17, 33, 31))
        return
    for dtype, sizes in product(FLOATS, PRODUCT_SIZES):
        yield product_case(op, (dtype, dtype), sizes)
    for pair in (("float16", "bfloat16"), ("float32", "float16"), ("bool", "float32"), ("int32", "float32")):
        yield product_case(op, pair, (17, 33, 31))
    for dtype in ("float64", *INTEGERS):
        for sizes in ((1, 201, 33), (17, 33, 31), (3, 0, 4)):
            yield product_case(op, (dtype, dtype), sizes)
    for pair in (("float64", "float32"), ("int64", "uint32"), ("bool", "uint8"), ("bfloat16", "float64")):
        yield product_case(op, pair, (5, 9, 7))
