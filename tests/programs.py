"""Seeded random programs with moderate inputs, and random sets of compile options."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from growing import Grower
from table import DTYPE_NAMES, FLOATS, INTEGERS

from trainkernel import reference
from trainkernel.dtypes import DTYPES
from trainkernel.ir import Loop, Operation, Program, ScalarSpec, TensorSpec
from trainkernel.ops import OPS
from trainkernel.validation import validate_program


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
    if state.num_elements and g.chance(0.2):
        fresh = g.dynamic_update(state, "float32")
    else:
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
    for fan_in, fan_out in itertools.pairwise(widths):
        w = g.input((fan_in, fan_out), "float32", dense=True)
        w_index = len(g.specs) - 1
        bias = g.input((fan_out,), "float32", dense=True)
        states.append((w, w_index, bias, len(g.specs) - 1))
        w_used = w if compute == "float32" else g.add("cast", [w], w.shape, compute)
        if w_used is None:
            return g.outputs(), {}
        last = len(states) == len(widths) - 1
        z = g.add("addmm", [bias, hidden[-1], w_used], None, "float32" if last else compute, alpha=fan_in**-0.5)
        out = z if last else z and g.add(activation, [z], z.shape, compute)
        if out is None:
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
    squash = "sign" if dtype in INTEGERS else "tanh"
    after = body.add(squash, [body.pool[-2] if extra else body.pool[-1]], (rows, width), dtype)
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
    if exact:
        dtypes = ("float32",)
    if kind in ("mixture", "loop") and rng.random() < 0.35:
        # Exact, because what an integer is truncated from must not be uncertain.
        dtypes, exact = tuple(str(name) for name in rng.choice(("float32", "int32", *DTYPE_NAMES), 3)), True
    g = Grower(rng, dtypes, exact=exact)
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
        "region_pieces": (0, 1, 1, 2, 3, 4, 5, 7, 8),
    }
    return {name: values[int(rng.integers(len(values)))] for name, values in choices.items() if rng.random() < 0.5}


FUSED: Mapping[str, bool] = {"fuse_pointwise": True, "fuse_epilogues": True, "inline_input_casts": True}
UNFUSED: Mapping[str, bool] = {"fuse_pointwise": False, "fuse_epilogues": False, "inline_input_casts": False}
