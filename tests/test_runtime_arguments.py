"""What a kernel may be given, on host arrays."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from trainkernel.arguments import check_arguments, signature_of
from trainkernel.builder import ProgramBuilder
from trainkernel.errors import ArgumentError
from trainkernel.ir import Loop, Program, ScalarSpec, TensorSpec

CPU = ("cpu", 0)
f32 = np.float32

X = TensorSpec("x", (4, 3), (1, 4), 0, "float32")  # column-major
W = TensorSpec.dense("w", (4,))
HALF = TensorSpec.dense("half", (2,), "bfloat16")
PROGRAM = Program((X, W, ScalarSpec("lr"), HALF), (), (TensorSpec.dense("y", (3,)), TensorSpec.dense("new_w", (4,))))
SIGNATURE = signature_of(PROGRAM, {1: 1})


def good() -> list[Any]:
    return [np.zeros((3, 4), f32).T, np.zeros(4, f32), 0.5, np.zeros(2, ml_dtypes.bfloat16)]


def test_good_arguments() -> None:
    inputs = good()
    checked = check_arguments(SIGNATURE, inputs, device=CPU)
    assert set(checked.inputs) == {0, 1, 3}
    assert checked.scalars == {2: 0.5}
    assert checked.outputs[1].owner is inputs[1]
    out = np.zeros(3, f32)
    for second in (None, inputs[1], inputs[1][:]):
        assert check_arguments(SIGNATURE, inputs, [out, second], device=CPU).outputs[0].owner is out


def read_only(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("index", "value", "message"),
    [
        (0, np.zeros((3, 4), f32), r"input 0 'x': got shape \[3, 4\], needs \[4, 3\]"),
        (0, np.zeros((4, 3), f32), r"input 0 'x': got strides \[3, 1\] .* needs \[1, 4\]"),
        (0, np.zeros((3, 4)).T, r"input 0 'x': got dtype float64, needs float32"),
        (0, np.zeros((3, 4), ">f4").T, r"got dtype byte-swapped float32, needs float32"),
        (0, [[0.0]], r"input 0 'x': got list, needs a NumPy"),
        (1, np.zeros(8, f32)[::2], r"input 1 'w': got strides \[2\]"),
        (1, np.zeros(8, f32)[3::-1], r"input 1 'w': got strides \[-1\]"),
        (1, read_only(np.zeros(4, f32)), r"input 1 'w': got a read-only array for one that is written"),
        (1, np.zeros(20, np.uint8)[1:17].view(f32), r"input 1 'w': got data at address .* needs a multiple of 4"),
        (2, "fast", r"input 2 'lr': got 'fast'"),
        (3, np.zeros(2, np.float16), r"input 3 'half': got dtype float16, needs bfloat16"),
        (3, np.zeros(2, np.uint16), r"input 3 'half': got dtype uint16, needs bfloat16"),
    ],
)
def test_refused_inputs(index: int, value: Any, message: str) -> None:
    inputs = good()
    inputs[index] = value
    with pytest.raises(ArgumentError, match=message):
        check_arguments(SIGNATURE, inputs, device=CPU)


def test_read_only_is_fine_where_nothing_is_written() -> None:
    inputs = good()
    inputs[0] = read_only(inputs[0])
    check_arguments(SIGNATURE, inputs, device=CPU)


def test_counts() -> None:
    with pytest.raises(ArgumentError, match=r"got 3 inputs, needs 4: input 0 'x', input 1 'w', input 2 'lr'"):
        check_arguments(SIGNATURE, good()[:3], device=CPU)
    with pytest.raises(ArgumentError, match=r"got 1 outputs, needs 2: output 0 'y', output 1 'new_w'"):
        check_arguments(SIGNATURE, good(), [None], device=CPU)


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ([np.zeros((3, 1), f32), None], r"output 0 'y': got shape \[3, 1\]"),
        ([np.zeros(3), None], r"output 0 'y': got dtype float64"),
        ([np.zeros(6, f32)[::2], None], r"output 0 'y': got strides \[2\]"),
        ([read_only(np.zeros(3, f32)), None], r"output 0 'y': got a read-only array"),
        ([None, None], r"output 0 'y': got NoneType"),
        ([np.zeros(3, f32), np.zeros(4)], r"output 1 'new_w': got dtype float64, needs float32"),
        ([np.zeros(3, f32), np.zeros(4, f32)], r"output 1 'new_w' is in place: got another array than input 1's"),
    ],
)
def test_refused_outputs(outputs: list[Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        check_arguments(SIGNATURE, good(), outputs, device=CPU)


def test_overlaps() -> None:
    base = np.zeros(40, f32)
    x = base[:12].reshape(3, 4).T
    cases: list[tuple[list[Any], Any]] = [
        ([x, base[8:12], 0.5, good()[3]], None),  # in place and read
        ([x, good()[1], 0.5, good()[3]], base[11:14]),  # an output over an input
        ([good()[0], base[:4], 0.5, good()[3]], base[1:4]),  # an output over an array in place
    ]
    for inputs, output in cases:
        outputs = None if output is None else [output, None]
        with pytest.raises(ArgumentError, match="share memory, and one of them is written"):
            check_arguments(SIGNATURE, inputs, outputs, device=CPU)
    check_arguments(SIGNATURE, [x, base[12:16], 0.5, good()[3]], [base[16:19], None], device=CPU)


def test_overlap_of_outputs_and_of_the_same_array() -> None:
    two = Program((W, TensorSpec.dense("v", (4,))), (), (TensorSpec.dense("a", (4,)), TensorSpec.dense("b", (4,))))
    array, base = np.zeros(4, f32), np.zeros(6, f32)
    check_arguments(signature_of(two, {}), [array, array], device=CPU)
    with pytest.raises(ArgumentError, match=r"input 1 'v' and input 0 'w' share memory"):
        check_arguments(signature_of(two, {0: 1}), [array, array], device=CPU)
    with pytest.raises(ArgumentError, match=r"output 1 'b' and output 0 'a' share memory"):
        check_arguments(signature_of(two, {}), [array, array], [base[:4], base[2:]], device=CPU)


def test_a_long_written_array_hides_no_overlap() -> None:
    # The sweep must remember the array that reaches farthest, not the last one.
    specs = tuple(TensorSpec.dense(name, (size,)) for name, size in (("long", 30), ("short", 2), ("late", 2)))
    signature = signature_of(Program(specs, (), (TensorSpec.dense("o", (30,)),)), {0: 0})
    base, apart = np.zeros(40, f32), np.zeros(2, f32)
    with pytest.raises(ArgumentError, match=r"'late' and input 0 'long'"):
        check_arguments(signature, [base[:30], apart, base[20:22]], device=CPU)


def test_size_one_dims_and_empty_arrays() -> None:
    spec = TensorSpec("x", (1, 3, 1), (99, 1, 77), 0, "float32")
    empty = TensorSpec("e", (0, 3), (1, 5), 0, "float32")
    scalar = TensorSpec.dense("s", ())
    program = Program((spec, empty, scalar), (), (TensorSpec.dense("y", ()), TensorSpec.dense("z", (0,))))
    inputs = [np.zeros((1, 3, 1), f32), read_only(np.zeros((0, 3), f32)), np.zeros((), f32)]
    checked = check_arguments(signature_of(program, {}), inputs, [np.zeros((), f32), np.zeros(0, f32)], device=CPU)
    assert checked.inputs[1].num_elements == 0
    with pytest.raises(ArgumentError, match="NumPy scalar"):
        check_arguments(signature_of(program, {}), [*inputs[:2], f32(1.0)], device=CPU)


def test_host_array_for_a_gpu_kernel() -> None:
    with pytest.raises(
        ArgumentError, match=r"input 0 'x': got numpy float32\[4,3\] on cpu \(host memory\), needs .*cuda:1"
    ):
        check_arguments(SIGNATURE, good(), device=("cuda", 1))


def test_alignment() -> None:
    signature = signature_of(PROGRAM, {1: 1}, {("input", 1): 16})
    base = np.zeros(16, f32)
    offset = (-base.ctypes.data // 4) % 4
    inputs = good()
    inputs[1] = base[offset : offset + 4]
    check_arguments(signature, inputs, device=CPU)
    inputs[1] = base[offset + 1 : offset + 5]
    with pytest.raises(ArgumentError, match="needs a multiple of 16"):
        check_arguments(signature, inputs, device=CPU)


def test_the_length_of_a_nested_loop_is_bounded_by_its_stacked_arrays() -> None:
    """The scalar reaches the inner loop under another name."""
    step = ProgramBuilder()
    carry = step.input("c", (3,))
    inner_body = step.build([carry, carry])
    body = ProgramBuilder()
    length, start = body.scalar("n", "int32"), body.input("start", (3,))
    outer_body = body.build(body.loop(inner_body, [start], num_carry=1, length=length, room=5))
    b = ProgramBuilder()
    steps = b.scalar("steps", "int32")
    outputs = b.loop(outer_body, [steps, b.input("x", (3,))], num_carry=1, length=2)
    signature = signature_of(b.build(outputs), {})
    check_arguments(signature, [5, np.zeros(3, f32)], device=CPU)
    for wrong in (-1, 6):
        with pytest.raises(ArgumentError, match=r"input 0 'steps': .* needs an integer from 0 to 5"):
            check_arguments(signature, [wrong, np.zeros(3, f32)], device=CPU)


def test_loop_length_is_bounded_by_the_stacked_arrays() -> None:
    x = TensorSpec.dense("xs", (10, 3))
    carry = TensorSpec.dense("c", (3,))
    body = Program((carry, TensorSpec.dense("row", (3,))), (), (carry, carry))
    loop = Loop("l", body, (carry, x), (TensorSpec.dense("d", (3,)), TensorSpec.dense("ys", (10, 3))), 1, 1, "steps")
    signature = signature_of(Program((carry, x, ScalarSpec("steps", "int32")), (loop,), (loop.outputs[0],)), {})
    arrays = [np.zeros(3, f32), np.zeros((10, 3), f32)]
    for steps in (0, 10):
        check_arguments(signature, [*arrays, steps], device=CPU)
    for steps in (-1, 11):
        with pytest.raises(ArgumentError, match="needs an integer from 0 to 10"):
            check_arguments(signature, [*arrays, steps], device=CPU)
