"""Seeded random programs with moderate inputs, and random sets of compile options.

A program grows operation by operation; each candidate is evaluated by the reference at once and
kept only if its values are finite and of moderate size, so that any op of the table may appear
anywhere, and what is compared later is never a field of infinities.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray
from table import DTYPE_NAMES, FLOATS, attr_sets, strided_array

from trainkernel import reference
from trainkernel.dtypes import DTYPES
from trainkernel.errors import ProgramError
from trainkernel.ir import Loop, Operand, Operation, Program, ScalarSpec, TensorSpec, dense_strides
from trainkernel.ops import OPS
from trainkernel.validation import validate_program

MAX_VALUE = 30.0
MAX_ELEMENTS = 4900
SIZES = (1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 32, 33, 40, 64, 65, 70)
DEPTHS = (1, 3, 8, 9, 16, 33, 64, 65, 70, 100, 130, 201)


@dataclass(frozen=True)
class RandomProgram:
    """A program, its inputs, and which outputs take over the storage of which inputs."""

    name: str
    program: Program
    inputs: tuple[Any, ...]
    inplace_outputs: Mapping[int, int] = field(default_factory=dict)

    @property
    def is_exact(self) -> bool:
        """Whether IEEE arithmetic fixes every bit: no approximated function, no tensor cores."""
        return all(_operation_is_exact(operation) for operation in all_operations(self.program))


def all_operations(program: Program) -> Iterator[Operation]:
    """Every operation, those of Loop bodies included."""
    for item in program.operations:
        if isinstance(item, Loop):
            yield from all_operations(item.body)
        else:
            yield item


def _operation_is_exact(operation: Operation) -> bool:
    op = OPS[operation.op]
    operands = [spec for spec in operation.inputs[-2:] if isinstance(spec, TensorSpec)]
    sixteen_bit = all(DTYPES[spec.dtype].itemsize_bytes == 2 for spec in operands)
    return op.max_ulps <= 0.5 and not (op.kind == "product" and sixteen_bit)


# ---------------------------------------------------------------------------- growing a program


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

    def pick(self, items: Sequence[Any]) -> Any:
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
        values = self.rng.standard_normal(shape)
        array = values > 0 if dtype == "bool" else (0.7 * values).astype(DTYPES[dtype].numpy)
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
        with np.errstate(all="ignore"):
            results = reference._run_operation(operation, self.buffers)
        if not all(_is_moderate(result) for result in results):
            return None
        self._append(operation, results)
        return outputs[-1]

    def _append(self, item: Operation | Loop, results: Sequence[NDArray[Any]]) -> None:
        self.items.append(item)
        for spec, result in zip(item.outputs, results, strict=True):
            self.buffers[spec.buffer] = result.reshape(-1)
            self.pool.append(spec)

    def pointwise(self) -> TensorSpec | None:
        """Any pointwise op on pool values, views, scalars, or a fresh input that broadcasts."""
        allowed = [op for op in OPS.values() if op.kind == "pointwise" and not (self.exact and op.max_ulps > 0.5)]
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
        op = str(self.pick(("sum", "mean", "max", "sum") if self.exact else ("sum", "mean", "max", "softmax_stats")))
        operand = self.view(self.recent())
        subsets = [dims for size in range(operand.ndim + 1) for dims in combinations(range(operand.ndim), size)]
        dims = self.pick([None, *subsets])
        reduced = range(operand.ndim) if dims is None else dims
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

    def grow(self, num_operations: int) -> None:
        attempts = 0
        while len(self.items) < num_operations and attempts < 8 * num_operations:
            attempts += 1
            step = self.pick((self.pointwise, self.pointwise, self.pointwise, self.reduction, self.product))
            step()

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


# ---------------------------------------------------------------------------- kinds of programs


def _mixture(g: Grower) -> tuple[list[TensorSpec], dict[int, int]]:
    for _ in range(int(g.rng.integers(1, 4))):
        g.input(g.shape())
    if g.chance(0.3):
        g.scalar()
    g.grow(int(g.rng.integers(3, 14)))
    if not g.items:
        g.add("neg", [g.pool[0]], g.pool[0].shape)
    outputs = g.outputs()
    inplace: dict[int, int] = {}
    while g.chance(0.3) and len(inplace) < 3:
        _update_state(g, outputs, inplace)
    return outputs, inplace


def _update_state(g: Grower, outputs: list[TensorSpec], inplace: dict[int, int]) -> None:
    """A new state input and its in-place successor; sometimes the old value is wanted later too."""
    delta = g.pick(g.pool)
    if g.chance(0.3):
        delta = delta.T
    state = g.input(delta.shape, "float32", dense=True)
    position = len(g.specs) - 1
    if g.chance(0.25):
        g.add("tanh", [state], state.shape)
    operands = [state, delta] if g.chance(0.8) else [delta, state]
    fresh = g.add("sub", operands, state.shape, "float32", alpha=g.pick((1, 0.125)))
    if fresh is None:
        return
    if g.chance(0.3):
        outputs.append(g.add("mul", [state, 0.5], state.shape) or fresh)
    if g.chance(0.15):
        outputs.append(state)
    inplace[len(outputs)] = position
    outputs.append(fresh)


def _mlp_step(g: Grower) -> tuple[list[TensorSpec], dict[int, int]]:
    """Forward, backward by hand and SGD in place, for one or two hidden layers."""
    activation = "relu" if g.exact else str(g.pick(("relu", "tanh")))
    batch, widths = int(g.pick((1, 5, 16, 33))), [int(g.pick((1, 3, 8, 17, 33, 65))) for _ in range(g.pick((3, 4)))]
    compute = g.dtype()
    x = g.input((batch, widths[0]), compute)
    target = g.input((batch, widths[-1]), "float32")
    rate = g.scalar()
    outputs: list[TensorSpec] = []
    inplace: dict[int, int] = {}
    states, hidden = [], [x]
    for fan_in, fan_out in zip(widths[:-1], widths[1:], strict=True):
        w = g.input((fan_in, fan_out), "float32", dense=True)
        w_index = len(g.specs) - 1
        bias = g.input((fan_out,), "float32", dense=True)
        states.append((w, w_index, bias, len(g.specs) - 1))
        w_used = w if compute == "float32" else g.add("cast", [w], w.shape, compute)
        last = len(states) == len(widths) - 1
        z = g.add("addmm", [bias, hidden[-1], w_used], None, "float32" if last else compute, alpha=fan_in**-0.5)
        out = z if last else z and g.add(activation, [z], z.shape, compute)
        if w_used is None or out is None:
            return g.outputs(), {}
        hidden.append(out)
    grad = g.add("sub", [hidden[-1], target], target.shape, "float32")
    if grad is None:
        return g.outputs(), {}
    squares = g.add("mul", [grad, grad], grad.shape, "float32")
    loss = squares and g.add("mean", [squares], None, "float32")
    outputs += [loss] if loss else []
    for layer in reversed(range(len(states))):
        w, w_index, bias, bias_index = states[layer]
        grad_in = grad if compute == "float32" else g.add("cast", [grad], grad.shape, compute)
        grad_w = grad_in and g.add("mm", [hidden[layer].T, grad_in], None, "float32")
        grad_bias = g.add("sum", [grad], None, "float32", dims=(0,))
        for spec, index, delta in ((w, w_index, grad_w), (bias, bias_index, grad_bias)):
            step = delta and g.add("mul", [delta, rate], spec.shape, "float32")
            fresh = step and g.add("sub", [spec, step], spec.shape, "float32")
            if fresh:
                if g.chance(0.9):
                    inplace[len(outputs)] = index
                outputs.append(fresh)
        if layer == 0 or grad_in is None:
            break
        back = g.add("mm", [grad_in, w.T if compute == "float32" else _cast_of(g, w, compute).T], None, "float32")
        through = back and _through(g, activation, back, hidden[layer])
        if through is None:
            break
        grad = through
    return outputs or g.outputs(), inplace


def _cast_of(g: Grower, spec: TensorSpec, dtype: str) -> TensorSpec:
    """The cast of a weight that the forward pass already made."""
    for item in g.items:
        if isinstance(item, Operation) and item.op == "cast" and item.inputs == (spec,):
            return item.outputs[0]
    return g.add("cast", [spec], spec.shape, dtype) or spec


def _through(g: Grower, activation: str, grad: TensorSpec, out: TensorSpec) -> TensorSpec | None:
    if activation == "relu":
        return g.add("threshold_backward", [grad, out], grad.shape, "float32")
    square = g.add("mul", [out, out], out.shape, "float32")
    slope = square and g.add("sub", [1, square], out.shape, "float32")
    return slope and g.add("mul", [grad, slope], grad.shape, "float32")


def _softmax_rows(g: Grower) -> tuple[list[TensorSpec], dict[int, int]]:
    """Log-softmax, its loss and gradient through ``softmax_stats``, over either dim."""
    rows, columns = int(g.pick((1, 4, 9, 33))), int(g.pick((1, 2, 10, 70, 129)))
    dim = int(g.rng.integers(2))
    x = g.input((rows, columns))
    logits = g.view(x) if g.chance(0.3) and rows == columns else x
    stats_shape = tuple(1 if at == dim else size for at, size in enumerate(logits.shape))
    before = len(g.items)
    g.add("softmax_stats", [logits], stats_shape, "float32", dims=(dim,))
    if len(g.items) == before:
        return _mixture(g)
    largest, total = g.items[-1].outputs
    shifted = g.add("sub", [logits, largest], logits.shape, "float32")
    exponent = shifted and g.add("exp", [shifted], logits.shape, "float32")
    weights = exponent and g.add("div", [exponent, total], logits.shape)
    logarithm = g.add("log", [total], total.shape, "float32")
    scores = shifted and logarithm and g.add("sub", [shifted, logarithm], logits.shape, "float32")
    if weights and g.chance(0.6):
        g.add("mm", [weights, g.input((logits.shape[1], int(g.pick(g.dims))), weights.dtype)], None)
    if scores:
        g.add("mean", [scores], None, "float32")
    g.grow(len(g.items) + int(g.rng.integers(0, 3)))
    return [*g.outputs(), *([weights] if weights else [])], {}


def _loop_program(g: Grower) -> tuple[list[TensorSpec], dict[int, int]]:
    """A Loop with constants, a carry, maybe stacked inputs and outputs, a dynamic length."""
    rows, width = int(g.pick((1, 4, 17))), int(g.pick((3, 8, 33)))
    room, reverse, dynamic = int(g.rng.integers(1, 5)), g.chance(0.3), g.chance(0.3)
    num_xs = int(g.rng.integers(0, 2))
    dtype = g.dtype()
    w, start = g.input((width, width), dtype), g.input((rows, width), dtype, dense=True)
    xs = [g.input((room, rows, width)) for _ in range(num_xs)]
    body = Grower(g.rng, g.dtypes, "b_")
    carry = [body.input((width, width), dtype, dense=True), body.input((rows, width), dtype, dense=True)]
    slices = [body.input((rows, width), spec.dtype, dense=True) for spec in xs]
    product = body.add("mm", [carry[1], carry[0].T if g.chance(0.5) else carry[0]], None, "float32")
    if product is not None:
        body.add("mul", [product, width**-0.5], product.shape, "float32")
    # Inputs that growth would add have no counterpart in the loop, so only named steps follow.
    for spec in slices:
        body.add("add", [body.pool[-1], spec], (rows, width), "float32")
    extra = body.add("sum", [body.pool[-1]], None, "float32", dims=(1,))
    after = body.add("tanh", [body.pool[-2] if extra else body.pool[-1]], (rows, width), dtype)
    assert after is not None
    ys = [spec for spec in (extra, after.T if g.chance(0.5) else after) if spec is not None and g.chance(0.6)]
    program = Program(tuple(body.specs), tuple(body.items), (after, *ys))
    length: int | str = room
    if dynamic:
        length = "steps"
        g.specs.append(ScalarSpec("steps", "int32"))
        g.arrays.append(int(g.rng.integers(0, room + 1)))
        g.buffers["steps"] = np.array([g.arrays[-1]], np.int32)
    results = [TensorSpec.dense("final", after.shape, dtype)]
    results += [TensorSpec.dense(f"ys{at}", (room, *spec.shape), spec.dtype) for at, spec in enumerate(ys)]
    loop = Loop("loop", program, (w, start, *xs), tuple(results), 1, num_xs, length, reverse)
    with np.errstate(all="ignore"):
        g._append(loop, reference._run_loop(loop, g.buffers))
    inplace = {}
    if g.chance(0.3) and start.dtype == dtype:
        inplace[0] = 1
    g.grow(len(g.items) + int(g.rng.integers(0, 4)))
    return [results[0], *results[1:], *g.outputs()], inplace


_KINDS: Mapping[str, Callable[[Grower], tuple[list[TensorSpec], dict[int, int]]]] = {
    "mixture": _mixture,
    "mlp": _mlp_step,
    "softmax": _softmax_rows,
    "loop": _loop_program,
}


def random_program(seed: int) -> RandomProgram:
    """The seed's program: half are free mixtures, the rest training steps, row programs, Loops."""
    rng = np.random.default_rng(seed)
    kind = str(rng.choice(list(_KINDS), p=[0.55, 0.17, 0.13, 0.15]))
    dtypes: Sequence[str] = ("float32",) if rng.random() < 0.5 else (*FLOATS, str(rng.choice(FLOATS)))
    if rng.random() < 0.25:
        dtypes = (str(rng.choice(("float16", "bfloat16"))),)
    exact = rng.random() < 0.3
    g = Grower(rng, ("float32",) if exact else dtypes, exact=exact)
    outputs, inplace = _KINDS[kind](g)
    program = Program(tuple(g.specs), tuple(g.items), tuple(outputs))
    validate_program(program)
    return RandomProgram(f"{kind} {seed}", program, tuple(g.arrays), inplace)


def random_options(rng: np.random.Generator) -> dict[str, Any]:
    """Some of ``generate``'s tuning options at random values; the others are left to its choice."""
    choices: Mapping[str, Sequence[Any]] = {
        "blocks_per_sm": range(1, 9),
        "max_blocks": (1, 2, 3, 7, 64),
        "gemm_k_tile": (16, 32),
        "gemm_tile_n": (32, 64),
        "shared_skew": (0, 16),
        "split_k_gemv": (True, False),
        "threads_per_block": (128, 256, 512, 1024),
    }
    return {name: values[int(rng.integers(len(values)))] for name, values in choices.items() if rng.random() < 0.5}


FUSED: Mapping[str, bool] = {"fuse_pointwise": True, "fuse_epilogues": True, "inline_input_casts": True}
UNFUSED: Mapping[str, bool] = {"fuse_pointwise": False, "fuse_epilogues": False, "inline_input_casts": False}
