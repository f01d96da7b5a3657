"""Arena, outputs and in-place state, row by row, on the emitted source."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from error_bounds import assert_close
from harness import bits, check, emulate
from numpy.typing import NDArray

from trainkernel import reference
from trainkernel.builder import ProgramBuilder
from trainkernel.codegen import generate
from trainkernel.codegen.generated import GeneratedKernel
from trainkernel.dtypes import DTYPES
from trainkernel.errors import ArgumentError, OptionError, ProgramError
from trainkernel.ir import Loop, Program, ScalarSpec, TensorSpec

OFF: dict[str, Any] = {"fuse_pointwise": False, "fuse_epilogues": False, "inline_input_casts": False}


def inputs_of(program: Program) -> list[Any]:
    rng = np.random.default_rng(5)
    return [
        0.25 if isinstance(spec, ScalarSpec) else rng.standard_normal(spec.shape).astype(DTYPES[spec.dtype].numpy)
        for spec in program.inputs
    ]


def check_in_place(program: Program, inplace: Mapping[int, int], **options: Any) -> GeneratedKernel:
    """The kernel is right in every order and grid, fused or not: as if all inputs were read first."""
    kernels = []
    for switches in ({}, OFF):
        generated = check(program, inputs_of(program), inplace_outputs=inplace, **switches, **options)
        kernels.append(generated)
        for order, num_blocks in (("forward", 1), ("reverse", 2), (1, 4), (2, 4)):
            result = emulate(generated, inputs_of(program), order=order, num_blocks=num_blocks)
            assert_close(result.outputs, program, inputs_of(program))
    return kernels[0]


# ---------------------------------------------------------------------------- arena


def test_space_is_reused_after_the_last_reader() -> None:
    b = ProgramBuilder()
    value = b.input("x", (1000,))
    for _ in range(8):
        value = b.op("neg", value)
    program = b.build([value])
    generated = check(program, inputs_of(program), **OFF)
    assert generated.workspace_bytes == 256 + 2 * 4096
    assert generated.grid_barriers == 7


def test_sizes_are_typed() -> None:
    sizes = {}
    for dtype in ("float32", "float16", "bfloat16", "bool"):
        b = ProgramBuilder()
        program = b.build([b.op("neg", b.op("cast", b.input("x", (2048,)), dtype=dtype), dtype="float32")])
        sizes[dtype] = check(program, inputs_of(program), **OFF).workspace_bytes - 256
    assert sizes == {"float32": 8192, "float16": 4096, "bfloat16": 4096, "bool": 2048}


def test_best_fit_takes_the_smallest_gap() -> None:
    b = ProgramBuilder()
    x = b.input("x", (4096,))
    small, large = b.op("neg", TensorSpec("x", (512,), (1,))), b.op("exp", x)
    total = b.op("sum", b.op("add", large, 1))
    tail = b.op("mul", small, b.op("add", total, 1))
    program = b.build([b.op("sum", b.op("relu", tail))])
    generated = check(program, inputs_of(program), **OFF)
    assert generated.workspace_bytes <= 256 + 2 * 16384 + 2 * 2048 + 3 * 256


def test_regions_alive_together_do_not_overlap() -> None:
    b = ProgramBuilder()
    x = b.input("x", (40, 30))
    values = [b.op("exp", x), b.op("tanh", x)]
    for step in range(6):
        values.append(b.op("add", values[-1], values[-2 - step % 2]))
    program = b.build([b.op("sum", values[-1], dims=(0,)), values[3]])
    generated = check(program, inputs_of(program), **OFF)
    regions = generated.regions
    assert regions
    for position, first in enumerate(regions):
        for second in regions[position + 1 :]:
            together = first.first_stage <= second.last_stage and second.first_stage <= first.last_stage
            apart = (
                first.offset_bytes + first.size_bytes <= second.offset_bytes
                or second.offset_bytes + second.size_bytes <= first.offset_bytes
            )
            assert apart or not together, (first, second)
        assert first.offset_bytes % 256 == 0


# ---------------------------------------------------------------------------- outputs


def test_returned_arrays_are_dense_and_their_own() -> None:
    b = ProgramBuilder()
    x = b.input("x", (6, 10))
    h = b.op("exp", x)
    sliced = TensorSpec(h.buffer, (3, 5), (20, 2), 1)
    spread = TensorSpec(h.buffer, (4, 10), (0, 1), 10)
    low = TensorSpec(h.buffer, (6, 10), (10, 1), 0, "bfloat16")
    program = b.build([h, h, h.T, sliced, spread, low, x, x.T, TensorSpec("x", (0, 3), (3, 1))])
    generated = check(program, inputs_of(program))
    assert generated.direct_outputs == 1
    outputs = emulate(generated, inputs_of(program)).outputs
    for position, (array, spec) in enumerate(zip(outputs, program.outputs, strict=True)):
        assert array.shape == spec.shape and array.flags.c_contiguous
        assert not any(np.shares_memory(array, other) for other in outputs[position + 1 :])
    assert outputs[5].dtype == ml_dtypes.bfloat16
    assert bits(outputs[0]) == bits(outputs[1])


def test_direct_outputs_are_read_back_by_later_operations() -> None:
    b = ProgramBuilder()
    first = b.op("neg", b.input("x", (500,)))
    second = b.op("exp", first)
    program = b.build([second, first, b.op("sum", second)])
    generated = check(program, inputs_of(program), **OFF)
    assert generated.direct_outputs == 3 and generated.workspace_bytes == 256 and generated.grid_barriers == 2


def test_a_reshaped_output_is_direct() -> None:
    b = ProgramBuilder()
    h = b.op("exp", b.input("x", (6, 10)))
    program = b.build([h.reshape((3, 20))])
    generated = check(program, inputs_of(program))
    assert generated.direct_outputs == 1 and generated.workspace_bytes == 256


def test_programs_without_operations_copy_their_inputs() -> None:
    b = ProgramBuilder()
    x = b.input("x", (33, 70))
    rate = b.scalar("rate")
    low = TensorSpec("x", (33, 70), (70, 1), 0, "float16")
    flags = TensorSpec("x", (33, 70), (70, 1), 0, "bool")
    program = b.build([x, x.T, low, flags, rate, x.reshape((70, 33))])
    generated = check(program, inputs_of(program))
    assert (generated.materialized_operations, generated.direct_outputs, generated.grid_barriers) == (0, 0, 0)


def test_a_program_of_nothing() -> None:
    generated = check(Program((), (), ()), [])
    assert generated.workspace_bytes == 256 and generated.max_work_blocks == 1


def test_empty_outputs() -> None:
    b = ProgramBuilder()
    x = b.input("x", (0, 4))
    program = b.build([b.op("neg", x), x, b.op("sum", x, dims=(1,)), b.op("sum", x, dims=(0,)), b.op("mm", x, x.T)])
    check(program, inputs_of(program))


# ---------------------------------------------------------------------------- in place: direct


def sgd(**options: Any) -> Program:
    b = ProgramBuilder()
    w, g, rate = b.input("w", (40, 30)), b.input("g", (40, 30)), b.scalar("rate")
    return b.build([b.op("sub", w, b.op("mul", g, rate), name="fresh")])


def test_a_final_elementwise_use_is_direct() -> None:
    generated = check_in_place(sgd(), {0: 0})
    assert generated.direct_state_commits == 1 and generated.direct_outputs == 1
    assert generated.workspace_bytes == 256 and generated.grid_barriers == 0


def test_adam_updates_three_states() -> None:
    b = ProgramBuilder()
    w, m, v, g = (b.input(name, (33, 20)) for name in ("w", "m", "v", "g"))
    m_new = b.op("add", b.op("mul", m, 0.9), b.op("mul", g, 0.1))
    v_new = b.op("add", b.op("mul", v, 0.99), b.op("mul", b.op("mul", g, g), 0.01))
    step = b.op("div", m_new, b.op("add", b.op("sqrt", v_new), 1e-8))
    program = b.build([b.op("sub", w, b.op("mul", step, 0.001)), m_new, v_new])
    generated = check_in_place(program, {0: 0, 1: 1, 2: 2})
    assert generated.direct_state_commits == 3 and generated.grid_barriers == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_epilogue_of_a_product_that_does_not_read_the_state(dtype: str) -> None:
    b = ProgramBuilder()
    x, g, w = b.input("x", (33, 20), dtype), b.input("g", (33, 40), dtype), b.input("w", (20, 40))
    program = b.build([b.op("sub", w, b.op("mul", b.op("mm", x.T, g, dtype="float32"), 0.1))])
    generated = check_in_place(program, {0: 2})
    assert generated.direct_state_commits == 1


def test_readers_of_the_old_value_run_before() -> None:
    b = ProgramBuilder()
    w, g = b.input("w", (40, 30)), b.input("g", (40, 30))
    fresh = b.op("sub", w, g)
    program = b.build([b.op("sum", w, dims=(0,)), fresh, b.op("mm", w, w.T), b.op("exp", w)])
    check_in_place(program, {1: 0})


# ---------------------------------------------------------------------------- in place: staged


def staged_programs() -> dict[str, tuple[Program, dict[int, int]]]:
    programs: dict[str, tuple[Program, dict[int, int]]] = {}

    b = ProgramBuilder()
    w = b.input("w", (40, 40))
    programs["transposed access"] = (b.build([b.op("sub", w, w.T)]), {0: 0})

    b = ProgramBuilder()
    w = b.input("w", (40, 40))
    programs["a product reads it"] = (b.build([b.op("sub", w, b.op("mm", w, b.input("x", (40, 40))))]), {0: 0})

    b = ProgramBuilder()
    w, g = b.input("w", (40, 30)), b.input("g", (40, 30))
    programs["the old value is returned"] = (b.build([b.op("sub", w, g), w, w.T]), {0: 0})

    b = ProgramBuilder()
    w, g = b.input("w", (40, 30)), b.input("g", (40, 30))
    fresh = b.op("sub", w, g)
    programs["returned twice"] = (b.build([fresh, fresh]), {0: 0})

    b = ProgramBuilder()
    w, g = b.input("w", (40, 30)), b.input("g", (40, 30))
    fresh = b.op("sub", w, g)
    programs["old value later"] = (b.build([fresh, b.op("mul", b.op("sum", fresh), w)]), {0: 0})

    b = ProgramBuilder()
    w, g = b.input("w", (40, 40)), b.input("g", (40, 40))
    programs["a view of the result"] = (b.build([b.op("sub", w, g).T]), {0: 0})

    b = ProgramBuilder()
    w = b.input("w", (400,))
    shifted = TensorSpec("w", (400,), (0,), 7)
    programs["broadcast element"] = (b.build([b.op("mul", w, shifted)]), {0: 0})
    return programs


@pytest.mark.parametrize("case", list(staged_programs()))
def test_staged_and_committed_after_every_reader(case: str) -> None:
    program, inplace = staged_programs()[case]
    assert check_in_place(program, inplace).direct_state_commits == 0


def test_states_that_swap() -> None:
    b = ProgramBuilder()
    first, second = b.input("first", (700,)), b.input("second", (700,))
    program = b.build([b.op("neg", second), b.op("exp", first), b.op("add", first, second)])
    assert check_in_place(program, {0: 0, 1: 1}).direct_state_commits <= 1


def test_a_ring_of_three_states() -> None:
    b = ProgramBuilder()
    states = [b.input(name, (12, 33)) for name in ("a", "b", "c")]
    outputs = [b.op("add", states[(at + 1) % 3], 1) for at in range(3)]
    check_in_place(b.build(outputs), {0: 0, 1: 1, 2: 2})
    check_in_place(b.build([states[0], *outputs, states[1].T]), {1: 0, 2: 1, 3: 2})


def test_in_place_of_another_dtype_of_the_value() -> None:
    b = ProgramBuilder()
    w, g = b.input("w", (40, 30), "bfloat16"), b.input("g", (40, 30))
    fresh = b.op("sub", w, g, dtype="float32")
    low = TensorSpec(fresh.buffer, fresh.shape, fresh.strides, 0, "bfloat16")
    check_in_place(b.build([low, fresh]), {0: 0})


def test_states_that_the_writer_does_not_read() -> None:
    b = ProgramBuilder()
    w, g = b.input("w", (40, 30)), b.input("g", (40, 30))
    check_in_place(b.build([b.op("exp", g), b.op("sum", w)]), {0: 0})
    b = ProgramBuilder()
    w = b.input("w", (40, 30))
    check_in_place(b.build([b.op("full", shape=(40, 30), value=2)]), {0: 0})
    b = ProgramBuilder()
    total, g = b.input("total", (1,)), b.input("g", (9, 5000))
    program = b.build([b.op("add", total, b.op("sum", g, shape=(1,)))])
    check_in_place(program, {0: 0})


def test_in_place_through_an_input_with_an_offset() -> None:
    w = TensorSpec("w", (30, 20), (20, 1), 17)
    b = ProgramBuilder()
    b.input_view(w)
    program = b.build([b.op("mul", w, 2), b.op("sum", w, dims=(1,))])
    generated = check_in_place(program, {0: 0})
    assert generated.inplace_outputs == {0: 0}


def test_empty_state() -> None:
    b = ProgramBuilder()
    check_in_place(b.build([b.op("neg", b.input("w", (0, 3)))]), {0: 0})


def test_a_loop_in_place() -> None:
    body = ProgramBuilder()
    g, carry = body.input("g", (20, 30)), body.input("carry", (20, 30))
    step = body.build([body.op("sub", carry, body.op("mul", g, 0.1))])
    b = ProgramBuilder()
    operands = [b.input("g", (20, 30)), b.input("w", (20, 30))]
    program = b.build(b.loop(step, operands, num_carry=1, length=5))
    generated = check_in_place(program, {0: 1})
    assert generated.direct_state_commits == 1
    assert isinstance(program.operations[0], Loop)


def test_a_loop_whose_state_is_read_later() -> None:
    """Refused in place, the carry lies elsewhere and needs its initial value there."""
    body = ProgramBuilder()
    step = body.build([body.op("mul", body.input("carry", (20, 30)), 0.5)])
    b = ProgramBuilder()
    w = b.input("w", (20, 30))
    (after,) = b.loop(step, [w], num_carry=1, length=2)
    program = b.build([b.op("add", after, w), after])
    assert check_in_place(program, {1: 0}).direct_state_commits == 0


def test_the_same_result_as_without() -> None:
    program = sgd()
    in_place = emulate(generate(program, inplace_outputs={0: 0}), inputs_of(program)).outputs[0]
    fresh = emulate(generate(program), inputs_of(program)).outputs[0]
    assert bits(in_place) == bits(fresh)
    assert bits(reference.run(program, inputs_of(program))[0]) == bits(fresh)


def test_one_array_for_two_inputs_one_in_place_is_refused() -> None:
    import trainkernel as tk

    kernel = tk.compile(sgd(), device="emulator", inplace_outputs={0: 0})
    shared: NDArray[Any] = np.ones((40, 30), np.float32)
    with pytest.raises(ArgumentError):
        kernel(shared, shared, 0.1)
    assert np.all(shared == 1)
    kernel(np.ones((40, 30), np.float32), shared, 0.1)
    unaliased = tk.compile(sgd(), device="emulator")
    assert np.allclose(unaliased(shared, shared, 0.5)[0], 0.5)


# ---------------------------------------------------------------------------- refusals


def refusals() -> dict[str, tuple[Any, str]]:
    return {
        "not a mapping": ([(0, 0)], "must map"),
        "output range": ({9: 0}, "9"),
        "negative output": ({-1: 0}, "-1"),
        "input range": ({0: 9}, "9"),
        "negative input": ({0: -1}, "-1"),
        "bool": ({True: 0}, "True"),
        "float": ({0: 0.0}, "0.0"),
        "targets": ({0: 0, 1: 0}, "already"),
        "shape": ({2: 0}, "differ in shape or dtype"),
        "dtype": ({3: 0}, "differ in shape or dtype"),
        "strided": ({0: 1}, "not contiguous"),
        "input's view": ({4: 0}, "not computed"),
        "scalar": ({0: 2}, "scalar"),
    }


@pytest.mark.parametrize("case", list(refusals()))
def test_refused(case: str) -> None:
    inplace, message = refusals()[case]
    b = ProgramBuilder()
    w = b.input("w", (4, 5))
    strided = b.input_view(TensorSpec("strided", (4, 5), (1, 4)))
    b.scalar("rate")
    fresh = b.op("sub", w, strided)
    low = TensorSpec(fresh.buffer, (4, 5), (5, 1), 0, "float16")
    program = b.build([fresh, b.op("neg", w), fresh.T, low, w])
    with pytest.raises(OptionError) as caught:
        generate(program, inplace_outputs=inplace)
    assert isinstance(caught.value, ValueError)
    assert message in str(caught.value) and "inplace_outputs" in str(caught.value)


def test_more_pieces_than_an_int_counts_are_refused() -> None:
    b = ProgramBuilder()
    x = b.input("x", (256,)).broadcast_to((2**40, 256))
    program = b.build([b.op("sum", x, dims=(1,), dtype="bool")])
    with pytest.raises(
        ProgramError, match=r"(?s)more than .* pieces.*in operation: sum: bool\[1099511627776\] = sum x"
    ):
        generate(program)
