"""The error bounds themselves: a float32 device simulated in NumPy lies within, a wrong one does not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from error_bounds import assert_close, run_with_bounds
from numpy.typing import NDArray
from programs import RandomProgram, random_program
from table import Case, op_cases

from trainkernel import reference
from trainkernel.arithmetic import domain_of, operand_domains
from trainkernel.builder import ProgramBuilder
from trainkernel.ir import Operation, Program, TensorSpec
from trainkernel.ops import OPS, domains

CHUNKS = range(5)


ROUNDED_ONCE = ("floor_divide", "add", "sub")


def simulate(program: Program, inputs: Sequence[Any], monkeypatch: pytest.MonkeyPatch) -> tuple[NDArray[Any], ...]:
    """The reference with every float32 operation computed in float32, as a device does it."""

    def in_float32(operation: Operation, buffers: dict[str, NDArray[Any]]) -> list[NDArray[Any]]:
        op, domain = OPS[operation.op], domain_of(operation)
        if domain != "float32":
            return on_reference(operation, buffers)
        arrays: list[Any] = []
        for operand, own in zip(operation.inputs, operand_domains(operation), strict=True):
            if isinstance(operand, TensorSpec):
                value = domains.load(reference._view(buffers[operand.buffer], operand), own)
            else:
                value = np.asarray(domains.constant(operand, own))
            arrays.append(value.astype(np.float32) if own == "float32" and op.name not in ROUNDED_ONCE else value)
        shapes = [spec.shape for spec in operation.outputs]
        attrs = {k: domains.constant(v, domain) if k in op.constants else v for k, v in operation.attrs.items()}
        values = op.reference(arrays, attrs, shapes)
        results = []
        for value, spec in zip(values, operation.outputs, strict=True):
            single = np.asarray(value).astype(np.float32).astype(np.float64)
            if op.kind == "pointwise":
                single = np.broadcast_to(single, spec.shape)
            results.append(domains.convert(np.asarray(single, np.float64), "float32", spec.dtype).reshape(spec.shape))
        return results

    on_reference = reference._run_operation
    with monkeypatch.context() as patch:
        patch.setattr(reference, "_run_operation", in_float32)
        return reference.run(program, inputs)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_a_float32_device_is_within(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cases: list[Case | RandomProgram] = [random_program(seed) for seed in range(chunk, 200, len(CHUNKS))]
    cases += op_cases()[chunk :: len(CHUNKS)]
    for case in cases:
        unknown = assert_close(simulate(case.program, case.inputs, monkeypatch), case.program, case.inputs, case.name)
        assert unknown < 0.05, case.name


def test_bounds_are_tight_enough_to_see_one_wrong_rounding() -> None:
    b = ProgramBuilder()
    x, y = b.input("x", (50,)), b.input("y", (50,))
    program = b.build([b.op("exp", b.op("mul", x, y))])
    rng = np.random.default_rng(0)
    inputs = [rng.standard_normal(50).astype(np.float32) for _ in range(2)]
    (bounded,) = run_with_bounds(program, inputs)
    assert np.all(bounded.error < 1e-6 * bounded.value)
    (right,) = reference.run(program, inputs)
    assert assert_close([right], program, inputs) == 0
    for position in range(50):
        wrong = right.copy()
        wrong[position] *= np.float32(1 + 1e-6)
        with pytest.raises(AssertionError, match="1 of 50 elements are off"):
            assert_close([wrong], program, inputs)


@pytest.mark.parametrize("op", ["add", "sub", "mul", "div"])
def test_arithmetic_must_be_exact(op: str) -> None:
    b = ProgramBuilder()
    program = b.build([b.op(op, b.input("x", (4,)), b.input("y", (4,)))])
    inputs = [np.array([1.1, 2.2, -3.3, 4], np.float32), np.array([0.3, -7, 2, 3], np.float32)]
    (right,) = reference.run(program, inputs)
    wrong = right.copy()
    wrong[2] = np.nextafter(wrong[2], np.float32(9))
    assert_close([right], program, inputs)
    with pytest.raises(AssertionError, match="1 of 4 elements are off"):
        assert_close([wrong], program, inputs)


def test_nan_and_infinity_must_match() -> None:
    b = ProgramBuilder()
    program = b.build([b.op("log", b.input("x", (3,)))])
    inputs = [np.array([0, -1, 1], np.float32)]
    (right,) = reference.run(program, inputs)
    for position, value in ((0, -3e38), (0, np.inf), (1, 0), (1, -np.inf), (2, np.nan)):
        wrong = right.copy()
        wrong[position] = value
        with pytest.raises(AssertionError, match="1 of 3 elements are off"):
            assert_close([wrong], program, inputs)


def test_shape_and_dtype_must_match() -> None:
    b = ProgramBuilder()
    program = b.build([b.op("neg", b.input("x", (3,)))])
    inputs = [np.zeros(3, np.float32)]
    with pytest.raises(AssertionError, match="needs neg"):
        assert_close([np.zeros((1, 3), np.float32)], program, inputs)
    with pytest.raises(AssertionError, match="needs neg"):
        assert_close([np.zeros(3)], program, inputs)


def test_a_comparison_within_the_error_may_go_either_way() -> None:
    b = ProgramBuilder()
    x = b.input("x", (2,))
    near = b.op("exp", x)
    program = b.build([b.op("compare", near, float(np.exp(np.float32(0.5))), comparison="ge", dtype="bool")])
    inputs = [np.array([0.5, 0.6], np.float32)]
    (bounded,) = run_with_bounds(program, inputs)
    assert bounded.error.tolist() == [1.0, 0.0]
    for first in (False, True):
        assert_close([np.array([first, True])], program, inputs)
    with pytest.raises(AssertionError):
        assert_close([np.array([True, False])], program, inputs)


@pytest.mark.parametrize("op", ["sum", "mm"])
def test_nothing_is_known_of_a_sum_whose_parts_overflow(op: str) -> None:
    """A device stays at the first infinity, of either sign; what is infinite from the start decides the others."""
    b = ProgramBuilder()
    x = b.input("x", (3, 4))
    program = b.build([b.op("sum", x, dims=(1,)) if op == "sum" else b.op("mm", x, b.input("y", (4, 1)))])
    large = np.float32(3e38)
    rows = np.array([[large, large, -large, -large], [np.inf, 1, 2, 3], [1e37, 1e37, 1e37, 1e37]], np.float32)
    (bounds,) = run_with_bounds(program, [rows] if op == "sum" else [rows, np.ones((4, 1), np.float32)])
    error = bounds.error.reshape(-1)
    assert np.isinf(error[0]) and error[1] == 0 and 0 < error[2] < 1e33
