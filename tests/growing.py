"""Growing a random program operation by operation, with the value of everything at hand.

Each candidate operation is evaluated by the reference at once and kept only if its values are
finite and of moderate size, so that any op of the table may appear anywhere, and what is compared
later is never a field of infinities.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from math import prod
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from scan_table import INDEX_DTYPES
from table import DTYPE_NAMES, INTEGERS, attr_sets, is_covered, strided_array

from trainkernel import reference
from trainkernel.arithmetic import domain_of
from trainkernel.dtypes import DTYPES
from trainkernel.errors import ProgramError
from trainkernel.ir import Loop, Operand, Operation, Program, ScalarSpec, TensorSpec, dense_strides
from trainkernel.ops import OPS
from trainkernel.ops.domains import FLOAT_DOMAINS
from trainkernel.validation import validate_program

T = TypeVar("T")

MAX_VALUE = 120.0
MAX_ELEMENTS = 4900
MAX_FACTORS = 40
SIZES = (1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 32, 33, 40, 64, 65, 70)
ENDS_AT_ONE = ("arcsin", "arccos", "arccosh")
"""Not in random programs: of a 1 that is off by an ulp, which softmax makes, nothing is known of them."""
DEPTHS = (1, 3, 8, 9, 16, 33, 64, 65, 70, 100, 130, 201)


class Grower:
    """Collects inputs, operations and their values."""

    def __init__(
        self, rng: np.random.Generator, dtypes: Sequence[str], prefix: str = "", *, exact: bool = False
    ) -> None:
        self.rng = rng
        self.exact = exact
        self.dtypes = dtypes
        self.prefix = prefix
        self.specs: list[TensorSpec | ScalarSpec] = []
        self.arrays: list[Any] = []
        self.items: list[Operation | Loop] = []
        self.pool: list[TensorSpec] = []
        self.buffers: dict[str, NDArray[Any]] = {}
        self.dims = tuple(int(size) for size in rng.choice(SIZES, 3))
        self._count = 0

    def chance(self, probability: float) -> bool:
        return bool(self.rng.random() < probability)

    def pick(self, items: Sequence[T]) -> T:
        return items[int(self.rng.integers(len(items)))]

    def _name(self, stem: str) -> str:
        self._count += 1
        return f"{self.prefix}{stem}{self._count}"

    def dtype(self) -> str:
        return str(self.pick(self.dtypes))

    def shape(self) -> tuple[int, ...]:
        """A shape of rank 0 to 4 from the program's few sizes, so that shapes meet."""
        rank = int(self.rng.choice(5, p=[0.04, 0.16, 0.6, 0.12, 0.08]))
        shape = tuple(int(self.pick(self.dims)) for _ in range(rank))
        while prod(shape) > MAX_ELEMENTS:
            largest = shape.index(max(shape))
            shape = (*shape[:largest], int(self.pick((1, 2, 3, 5))), *shape[largest + 1 :])
        return shape

    # ------------------------------------------------------------------ inputs

    def input(self, shape: Sequence[int], dtype: str | None = None, *, dense: bool = False) -> TensorSpec:
        """A new tensor input: normal values, small for products' sake; sometimes with strides of its own."""
        dtype = dtype or self.dtype()
        values = np.asarray(self.rng.standard_normal(shape))
        if dtype in INTEGERS:
            values = np.round(4 * np.abs(values) if dtype[0] == "u" else 4 * values) / 0.7
        array = np.asarray(values > 0 if dtype == "bool" else 0.7 * values).astype(DTYPES[dtype].numpy)
        spec = TensorSpec.dense(self._name("x"), tuple(shape), dtype)
        if not dense and array.ndim and self.chance(0.15):
            strides = tuple(2 * step for step in dense_strides(spec.shape))
            if len(shape) == 2 and self.chance(0.5):
                strides = (1, max(spec.shape[0], 1) + 1)
            spec = TensorSpec(spec.buffer, spec.shape, strides, int(self.rng.integers(4)), dtype)
            array = strided_array(array, strides)
        self.specs.append(spec)
        self.arrays.append(array)
        self.buffers[spec.buffer] = reference._input_buffer(0, spec, array)
        self.pool.append(spec)
        return spec

    def scalar(self) -> TensorSpec:
        """A float32 scalar by value."""
        spec = ScalarSpec(self._name("s"))
        value = float(np.float32(self.rng.uniform(0.1, 1.5)))
        self.specs.append(spec)
        self.arrays.append(value)
        self.buffers[spec.buffer] = reference._input_buffer(0, spec, value)
        self.pool.append(spec.spec)
        return spec.spec

    def index(self, shape: Sequence[int], room: int) -> TensorSpec:
        """A new input of indices into ``range(room)``, some outside; nothing else reads it."""
        dtype = str(self.pick(INDEX_DTYPES))
        low = 0 if dtype.startswith("u") else -2
        array = np.asarray(self.rng.integers(low, room + 2, shape)).astype(dtype)
        spec = TensorSpec.dense(self._name("at"), tuple(shape), dtype)
        self.specs.append(spec)
        self.arrays.append(array)
        self.buffers[spec.buffer] = reference._input_buffer(0, spec, array)
        return spec

    # ------------------------------------------------------------------ views

    def view(self, spec: TensorSpec) -> TensorSpec:
        """The spec itself, or a transpose, a slice, a broadcast or a reshape of it."""
        kind = self.pick(("plain", "plain", "plain", "transpose", "slice", "broadcast", "reshape"))
        if kind == "transpose" and spec.ndim >= 2:
            return spec.T
        if kind == "slice" and spec.ndim and spec.num_elements > 1:
            return self._slice(spec)
        if kind == "broadcast" and spec.ndim and spec.num_elements:
            dim = int(self.rng.integers(spec.ndim))
            strides = tuple(0 if at == dim else stride for at, stride in enumerate(spec.strides))
            return TensorSpec(spec.buffer, spec.shape, strides, spec.offset, spec.dtype)
        if kind == "reshape" and spec.is_dense and spec.ndim:
            return spec.reshape((spec.num_elements,)) if self.chance(0.5) else spec.reshape((*spec.shape, 1))
        return spec

    def _slice(self, spec: TensorSpec) -> TensorSpec:
        shape, strides, offset = [], [], spec.offset
        for size, stride in zip(spec.shape, spec.strides, strict=True):
            start = int(self.rng.integers(0, max(size // 3, 1)))
            step = int(self.rng.integers(1, 3))
            shape.append(max((size - start + step - 1) // step, 0) if size else 0)
            strides.append(stride * step)
            offset += start * stride if size else 0
        return TensorSpec(spec.buffer, tuple(shape), tuple(strides), offset, spec.dtype)

    # ------------------------------------------------------------------ operations

    def value(self, spec: TensorSpec) -> NDArray[np.float64]:
        return np.asarray(reference._view(self.buffers[spec.buffer], spec)).astype(np.float64)

    def add(
        self,
        op: str,
        operands: Sequence[Operand],
        shape: Sequence[int] | None = None,
        dtype: str | None = None,
        **attrs: Any,
    ) -> TensorSpec | None:
        """Append the operation if it fits and its values are moderate; its (last) result, or None."""
        shapes = [operand.shape if isinstance(operand, TensorSpec) else () for operand in operands]
        try:
            natural = OPS[op].shape(shapes, attrs)
        except ProgramError:
            return None
        dtype = dtype or self.dtype()
        outputs = tuple(
            TensorSpec.dense(self._name(op[0]), tuple(each if shape is None else shape), dtype) for each in natural
        )
        if any(prod(spec.shape) > MAX_ELEMENTS for spec in outputs):
            return None
        operation = Operation(
            outputs[0].buffer, op, tuple(operands), outputs if len(outputs) > 1 else outputs[0], attrs
        )
        if not self._computes(operation):
            return None
        with np.errstate(all="ignore"):
            results = reference._run_operation(operation, self.buffers)
        if not all(_is_moderate(result) for result in results):
            return None
        self._append(operation, results)
        return outputs[-1]

    @staticmethod
    def _computes(operation: Operation) -> bool:
        """Whether one domain holds the operation's operands and numbers, and no integer cuts an uncertain sum."""
        specs = {
            spec.buffer: TensorSpec.dense(spec.buffer, (spec.last_index + 1,), spec.dtype)
            for spec in operation.tensor_inputs
        }
        try:
            validate_program(Program(tuple(specs.values()), (operation,), ()))
        except ProgramError:
            return False
        accumulates = OPS[operation.op].kind != "pointwise" and domain_of(operation) in FLOAT_DOMAINS
        return not (accumulates and operation.outputs[0].dtype in INTEGERS)

    def _append(self, item: Operation | Loop, results: Sequence[NDArray[Any]]) -> None:
        self.items.append(item)
        for spec, result in zip(item.outputs, results, strict=True):
            self.buffers[spec.buffer] = result.reshape(-1)
            self.pool.append(spec)

    def pointwise(self) -> TensorSpec | None:
        """Any pointwise op on pool values, views, scalars, or a fresh input that broadcasts."""
        kinds = [op for op in OPS.values() if op.kind == "pointwise" and is_covered(op) and op.name not in ENDS_AT_ONE]
        allowed = [op for op in kinds if not (self.exact and op.max_ulps > 0.5)]
        op = self.pick(allowed)
        attrs = self.pick(attr_sets(op))
        first = self.view(self.recent())
        count = int(self.pick(op.num_inputs))
        if op.name == "pow" and count == 2:
            return self.add("pow", [first, self.pick((2, 3, 2.0, 0.5))], first.shape)
        operands = [self.partner(first) for _ in range(count)]
        if count:
            operands[int(self.rng.integers(count))] = first
        shape = first.shape
        if self.chance(0.1):
            shape = (2, *shape) if len(shape) < 4 else shape
        dtype = "bool" if op.name == "compare" and self.chance(0.6) else None
        return self.add(op.name, operands, shape, dtype, **attrs)

    def partner(self, first: TensorSpec) -> Operand:
        """An operand that broadcasts with ``first``: a scalar, a pool value or a new input."""
        if self.chance(0.15):
            return float(self.pick((0.5, -1.25, 2))) if self.chance(0.6) else int(self.pick((1, 2, -1)))
        fitting = [view for spec in self.pool for view in (spec, spec.T) if _broadcasts(view.shape, first.shape)]
        if fitting and self.chance(0.75):
            return self.pick(fitting)
        shape = tuple(1 if self.chance(0.2) else size for size in first.shape)
        return self.input(shape[int(self.rng.integers(0, 2)) if shape and self.chance(0.3) else 0 :])

    def recent(self) -> TensorSpec:
        """A pool value, preferably one of the last: chains grow, and some values have many uses."""
        if self.chance(0.6):
            return self.pool[-1 - int(self.rng.integers(min(3, len(self.pool))))]
        return self.pick(self.pool)

    def reduction(self) -> TensorSpec | None:
        exact = ("sum", "mean", "max", "sum", "min", "prod")
        op = str(self.pick(exact if self.exact else (*exact[:3], "min", "prod", "softmax_stats", "moments")))
        operand = self.view(self.recent())
        subsets = [dims for size in range(operand.ndim + 1) for dims in combinations(range(operand.ndim), size)]
        dims = self.pick([None, *subsets])
        reduced = range(operand.ndim) if dims is None else dims
        if op == "prod" and prod(operand.shape[dim] for dim in reduced) > MAX_FACTORS:
            return None
        kept = tuple(1 if dim in reduced else size for dim, size in enumerate(operand.shape))
        if dims and self.chance(0.3):
            dims = tuple(dim - operand.ndim for dim in dims)
        return self.add(op, [operand], kept if self.chance(0.4) else None, dims=dims)

    def product(self) -> TensorSpec | None:
        """mm or addmm of rank-2 values and views; what is missing becomes an input."""
        matrices = [spec for spec in self.pool[-6:] if spec.ndim == 2 and spec.num_elements]
        if matrices and self.chance(0.8):
            a = self.view(self.pick(matrices))
            if a.ndim != 2:
                return None
        else:
            a = self.input((self.pick(self.dims), self.pick(DEPTHS)))
            a = self.input(a.shape[::-1], a.dtype).T if self.chance(0.3) else a
        fitting = [
            view for spec in self.pool for view in (spec, spec.T) if view.ndim == 2 and view.shape[0] == a.shape[1]
        ]
        if fitting and self.chance(0.5):
            b = self.pick(fitting)
        else:
            n = int(self.pick(self.dims))
            b = self.input((n, a.shape[1]), a.dtype).T if self.chance(0.5) else self.input((a.shape[1], n), a.dtype)
        scale = float(np.float32(1 / max(a.shape[1], 1) ** 0.5))
        if self.chance(0.5):
            m, n = a.shape[0], b.shape[1]
            bias = self.input(self.pick([(n,), (1, n), (m, 1), (m, n), ()]))
            return self.add("addmm", [bias, a, b], None, None, alpha=scale, beta=self.pick((1, 0.5, 0)))
        result = self.add("mm", [a, b])
        return result and self.add("mul", [result, scale], result.shape)

    def batched_product(self) -> TensorSpec | None:
        """A batched product of a rank-3 value, or of one that all products share."""
        fitting = [spec for spec in self.pool if spec.ndim == 3 and spec.num_elements]
        if fitting and self.chance(0.5):
            a = self.pick(fitting)
        else:
            a = self.input((int(self.pick((1, 2, 3, 5))), int(self.pick((1, 3, 17, 33))), int(self.pick((3, 16, 70)))))
        a = a.mT if self.chance(0.3) else a
        shape = (a.shape[0], a.shape[2], int(self.pick((1, 4, 20))))
        b = self.input(shape[1:], a.dtype).broadcast_to(shape) if self.chance(0.3) else self.input(shape, a.dtype)
        result = self.add("bmm", [a, b])
        return result and self.add("mul", [result, float(np.float32(1 / max(a.shape[2], 1) ** 0.5))], result.shape)

    def scan(self) -> TensorSpec | None:
        """A cumulative sum of a value scaled down, along any dim."""
        operand = self.view(self.recent())
        if operand.ndim == 0:
            return None
        dim = int(self.rng.integers(operand.ndim))
        scaled = self.add("mul", [operand, 1 / max(operand.shape[dim], 1)], operand.shape)
        return scaled and self.add("cumsum", [scaled], dim=dim - operand.ndim, reverse=self.chance(0.5))

    def scatter(self) -> TensorSpec | None:
        updates = self.view(self.recent())
        if updates.ndim == 0:
            return None
        size = int(self.pick((1, 3, 8, 40)))
        return self.add("scatter_add", [self.index(updates.shape[:1], size), updates], size=size)

    # ------------------------------------------------------------------ indexed operations

    def indexed(self) -> TensorSpec | None:
        """Any indexed operation on a value or view of rank 1 and more."""
        x = self.view(self.recent())
        if x.ndim == 0 or x.num_elements == 0:
            return None
        steps = (self._flip, self._pad, self._concatenate, self._take, self._dynamic_slice, self.dynamic_update)
        return self.pick((*steps, self._drop))(x)

    def _flip(self, x: TensorSpec) -> TensorSpec | None:
        return self.add("flip", [x], dims=tuple(dim for dim in range(x.ndim) if self.chance(0.6)))

    def _pad(self, x: TensorSpec) -> TensorSpec | None:
        low, high, interior = (tuple(int(self.pick((0, 0, 1, 3))) for _ in x.shape) for _ in range(3))
        return self.add("pad", [x, self.pick((0, 0.5, -1))], low=low, high=high, interior=interior)

    def _concatenate(self, x: TensorSpec) -> TensorSpec | None:
        dim = int(self.rng.integers(x.ndim))
        rest = (*x.shape[:dim], *x.shape[dim + 1 :])
        views = [view for spec in self.pool for view in (spec, spec.T) if view.ndim == x.ndim]
        others = [view for view in views if (*view.shape[:dim], *view.shape[dim + 1 :]) == rest]
        return self.add(
            "concatenate", [x, *(self.pick(others) for _ in range(self.pick((0, 1, 1, 3))) if others)], dim=dim
        )

    def _take(self, x: TensorSpec) -> TensorSpec | None:
        shape: tuple[int, ...] = self.pick(((), (int(self.pick(self.dims)),), (3, 2)))
        return self.add("take", [x, self.index(shape, x.shape[0])])

    def _starts(self, x: TensorSpec, sizes: Sequence[int]) -> list[Operand]:
        pairs = zip(x.shape, sizes, strict=True)
        return [int(self.rng.integers(-1, 3)) if self.chance(0.3) else self.index((), a - b) for a, b in pairs]

    def _dynamic_slice(self, x: TensorSpec) -> TensorSpec | None:
        sizes = tuple(int(self.rng.integers(1, size + 1)) if self.chance(0.7) else size for size in x.shape)
        return self.add("dynamic_slice", [x, *self._starts(x, sizes)], sizes=sizes)

    def dynamic_update(self, x: TensorSpec, dtype: str | None = None) -> TensorSpec | None:
        """``x`` with a window of it overwritten: by a slice of itself, or by a new input."""
        update = self._slice(x) if self.chance(0.5) else self.input([max(size // 2, 1) for size in x.shape])
        return self.add("dynamic_update", [x, update, *self._starts(x, update.shape)], dtype=dtype)

    def _drop(self, x: TensorSpec) -> TensorSpec | None:
        """Some elements replaced by zero, chosen by random bits."""
        key = TensorSpec.dense(self._name("key"), (2,), "uint32")
        bits = TensorSpec.dense(self._name("bits"), x.shape, "uint32")
        self.specs.append(key)
        self.arrays.append(self.rng.integers(0, 2**32, 2, np.uint32))
        self.buffers[key.buffer] = self.arrays[-1]
        draw = Operation(bits.buffer, "random_bits", (key,), bits, {"shape": x.shape, "stream": 1})
        self._append(draw, reference._run_operation(draw, self.buffers))
        self.pool.pop()
        keep = self.add("compare", [bits, 2**31], x.shape, "bool", comparison=str(self.pick(("lt", "ge"))))
        return keep and self.add("where", [keep, x, 0], x.shape)

    def grow(self, num_operations: int) -> None:
        attempts = 0
        steps = [self.pointwise] * 6 + [self.reduction, self.product] * 2 + [self.indexed] * 3
        steps += [self.scan, self.scatter, self.batched_product]
        while len(self.items) < num_operations and attempts < 8 * num_operations:
            attempts += 1
            self.pick(steps)()

    def outputs(self) -> list[TensorSpec]:
        """The last value and a few more: views, duplicates, other dtypes, now and then an input."""
        computed = [spec for item in self.items for spec in item.outputs]
        chosen = [computed[-1]]
        for _ in range(int(self.rng.integers(0, 4))):
            spec = self.pick(computed if self.chance(0.85) else [s for s in self.specs if isinstance(s, TensorSpec)])
            if self.chance(0.3):
                spec = self.view(spec)
            if self.chance(0.2):
                spec = TensorSpec(spec.buffer, spec.shape, spec.strides, spec.offset, self.pick(DTYPE_NAMES))
            chosen.append(spec)
        return chosen


def _is_moderate(array: NDArray[Any]) -> bool:
    values = array.astype(np.float64)
    return values.size == 0 or bool(np.all(np.isfinite(values)) and np.max(np.abs(values)) <= MAX_VALUE)


def _broadcasts(shape: Sequence[int], target: Sequence[int]) -> bool:
    padded = (1,) * (len(target) - len(shape)) + tuple(shape)
    return len(padded) == len(target) and all(a in (1, b) for a, b in zip(padded, target, strict=True))
