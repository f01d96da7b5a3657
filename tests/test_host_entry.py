"""The C host entry: compiled as C and C++, and run against a mock driver."""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from host_entry_support import (
    ARGUMENT,
    C99,
    CUBIN,
    CXX17,
    DRIVER,
    FAKE_CUBIN,
    HOSTILE,
    MEMORY,
    NO_DEVICE,
    NO_DRIVER,
    NOT_RESIDENT,
    OK,
    TABLE,
    TESTS,
    TIMEOUT,
    TINY,
    UNSUPPORTED,
    WARNINGS,
    Info,
    Step,
    Tensors,
    build,
    full_source,
    initial_file,
)

from trainkernel.codegen.host_entry import HostEntryDescription, HostScalar, c_string, emit_host_entry
from trainkernel.errors import VerificationError


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("host_entry")
    mock = folder / "libmock.so"
    build(
        ("gcc", "-std=gnu99", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"),
        TESTS / "host_entry_mock_driver.c",
        "-o",
        mock,
    )
    found = {"mock": mock, "folder": folder}
    for name, description, command in (("plain", TINY, C99), ("table", TABLE, CXX17)):
        source = folder / f"{name}.cu"
        source.write_text(full_source(description))
        found[name] = folder / f"lib{name}.so"
        build(command, "-shared", "-fPIC", f'-DTRAINKERNEL_DRIVER_LIBRARY="{mock}"', source, "-o", found[name])
    return found


@pytest.fixture
def plain(libraries: dict[str, Path]) -> Iterator[Step]:
    step = Step(libraries["plain"], libraries["mock"]).opened()
    yield step
    assert step.call("destroy") == OK
    assert (step.mock.mock_live_allocations(), step.mock.mock_live_modules()) == (0, 0)
    assert step.mock.mock_primary_retains() == 0
    assert step.mock.mock_current() is None


@pytest.mark.parametrize("command", [C99, CXX17, ("gcc", "-x", "c", "-std=c11", "-O3", *WARNINGS)])
@pytest.mark.parametrize(
    "description",
    [
        TINY,
        TABLE,
        HostEntryDescription((), (), 16, False, 128, 0, 256, 1, 1),
        replace(TINY, workspace_bytes=2**40, max_work_blocks=2**40, max_blocks=7, stage_names=()),
    ],
)
def test_compiles_without_warnings(command: tuple[str, ...], description: HostEntryDescription, tmp_path: Path) -> None:
    source = tmp_path / "step.cu"
    source.write_text(full_source(description))
    build(command, "-c", source, "-o", tmp_path / "step.o")


def test_text_is_deterministic_and_plain_ascii() -> None:
    text = emit_host_entry(TINY)
    assert text == emit_host_entry(replace(TINY))
    assert text.isascii()
    assert "evil\\042\\052/\\012\\077\\077/\\134\\303\\251" in text


def test_scalar_bounds() -> None:
    assert HostScalar("length", "int32", 0, 0, 2**40).bounds == (0, 2**31 - 1)
    assert HostScalar("flag", "bool", 0).bounds == (0, 1)
    assert HostScalar("rate", "bfloat16", 0).bounds == (0, 0)


def test_c_string_is_cut_and_escaped() -> None:
    assert c_string('a"b\\\n1') == '"a\\042b\\134\\0121"'
    assert c_string("abcdef", 3) == '"abc"'


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"params_bytes": 40}, "its fields need 48"),
        ({"uses_tensor_table": True}, "scalar rate lies at byte 40"),
        ({"workspace_bytes": 128}, "does not hold the header"),
        ({"tensors": TINY.tensors[::-1]}, "the inputs, then the outputs"),
    ],
)
def test_contradictory_descriptions_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(VerificationError, match=message):
        emit_host_entry(replace(TINY, **changes))  # type: ignore[arg-type]


def test_description_needs_no_driver(tmp_path: Path) -> None:
    (tmp_path / "step.cu").write_text(full_source(TINY))
    build(C99, "-shared", "-fPIC", tmp_path / "step.cu", "-o", tmp_path / "step.so", "-ldl")
    library = ctypes.CDLL(str(tmp_path / "step.so"))

    class Tensor(ctypes.Structure):
        _fields_ = [
            ("name", ctypes.c_char_p),
            ("dtype", ctypes.c_char_p),
            ("bytes", ctypes.c_uint64),
            ("alignment", ctypes.c_uint32),
            ("in_place", ctypes.c_int),
        ]

    count = ctypes.c_int()
    for kind in ("input", "output"):
        function = library[f"trainkernel_{kind}s"]
        function.restype = ctypes.POINTER(Tensor)
        rows = function(ctypes.byref(count))
        expected = [tensor for tensor in TINY.tensors if tensor.kind == kind]
        assert count.value == len(expected)
        for got, want in zip(rows[: count.value], expected, strict=True):
            assert (got.name.decode(), got.dtype.decode()) == (want.name, want.dtype)
            assert (got.bytes, got.alignment, bool(got.in_place)) == (
                want.size_bytes,
                want.alignment_bytes,
                want.in_place,
            )


def test_no_driver_is_an_error_with_a_message(tmp_path: Path) -> None:
    (tmp_path / "step.cu").write_text(full_source(TINY))
    missing = '-DTRAINKERNEL_DRIVER_LIBRARY="libno-such-driver.so"'
    build(C99, "-shared", "-fPIC", missing, tmp_path / "step.cu", "-o", tmp_path / "step.so", "-ldl")
    library = ctypes.CDLL(str(tmp_path / "step.so"))
    handle, message = ctypes.c_void_p(1), ctypes.create_string_buffer(512)
    code = library.trainkernel_init(ctypes.byref(handle), FAKE_CUBIN, ctypes.c_size_t(64), message, 512)
    assert code == NO_DRIVER
    assert not handle.value
    assert b"libno-such-driver.so cannot be opened; install the NVIDIA driver" in message.value
    assert library.trainkernel_init(ctypes.byref(handle), FAKE_CUBIN, ctypes.c_size_t(64), None, 0) == NO_DRIVER


def test_init_query_launch_check(plain: Step) -> None:
    info = Info()
    assert plain.call("query", ctypes.byref(info)) == OK
    assert (info.sms, info.resident, info.grid, info.threads, info.registers) == (3, 4, 6, 128, 32)
    assert (info.inputs, info.outputs, info.scalars, info.workspace) == (2, 1, 2, 1024)
    assert (info.capability, info.driver, info.dynamic_shared) == (90, 13000, 65536)
    assert plain.mock.mock_shared_attribute() == 65536
    plain.calls()
    tensors = Tensors()
    assert plain.launch(tensors.inputs, tensors.outputs) == OK
    assert plain.calls() == ["cuCtxPushCurrent", "cuLaunchCooperativeKernel", "cuCtxPopCurrent"]
    assert plain.mock.mock_last_grid() == 6
    assert tensors.loss[0] == 240
    expected = 2 - 0.5 * np.arange(16, dtype=np.float32)
    expected[0] += 3
    np.testing.assert_array_equal(tensors.w, expected)
    assert plain.call("check") == OK
    assert plain.mock.mock_current() is None


@pytest.mark.parametrize(("changes", "grid"), [({"max_work_blocks": 5}, 5), ({"max_blocks": 4}, 4)])
def test_grid_bounds(changes: dict[str, int], grid: int, libraries: dict[str, Path], tmp_path: Path) -> None:
    source = tmp_path / "step.cu"
    source.write_text(full_source(replace(TINY, **changes)))  # type: ignore[arg-type]
    override = f'-DTRAINKERNEL_DRIVER_LIBRARY="{libraries["mock"]}"'
    names = "-DTRAINKERNEL_PREFIX=my_step"
    build(C99, "-shared", "-fPIC", override, names, source, "-o", tmp_path / "step.so")
    step = Step(tmp_path / "step.so", libraries["mock"], prefix="my_step").opened()
    info = Info()
    assert step.call("query", ctypes.byref(info)) == OK
    assert info.grid == grid
    assert step.call("destroy") == OK


@pytest.mark.parametrize(
    ("settings", "code", "message"),
    [
        ("no_device", NO_DEVICE, "cuInit failed with CUDA_ERROR_NO_DEVICE (100): mock error"),
        ("no_cooperative", UNSUPPORTED, "device 0 does not support cooperative launch"),
        ("zero_residency", NOT_RESIDENT, "128 threads x 32 registers and 65536 + 0 bytes of shared memory"),
        ("bad_image", CUBIN, "error 209; device 0 needs one compiled for sm_90"),
        ("no_symbol", CUBIN, "the cubin has no kernel trainkernel_step"),
        ("wrong_params", CUBIN, "its first parameter has 40 bytes, and no other; this source's kernel has one of 48"),
        ("few_threads", CUBIN, "it allows 64 threads per block, this source's kernel has 128"),
        ("fail:cuMemAlloc", MEMORY, "cuMemAlloc (workspace) failed with CUDA_ERROR_OUT_OF_MEMORY"),
        ("fail:cuCtxPushCurrent", DRIVER, "cuCtxPushCurrent failed with CUDA_ERROR_UNKNOWN (999)"),
        ("fail:cuMemsetD8Async", DRIVER, "cuMemsetD8Async (workspace header) failed"),
        ("fail:cuOccupancy", DRIVER, "cuOccupancyMaxActiveBlocksPerMultiprocessor failed"),
        ("fail:cuFuncSetAttribute", DRIVER, "cuFuncSetAttribute failed"),
    ],
)
def test_failing_init_reports_and_frees_everything(
    settings: str, code: int, message: str, libraries: dict[str, Path]
) -> None:
    step = Step(libraries["plain"], libraries["mock"], settings)
    got_code, got_message = step.init()
    assert got_code == code
    assert message in got_message
    assert not step.handle.value
    assert (step.mock.mock_live_allocations(), step.mock.mock_live_modules()) == (0, 0)
    assert step.mock.mock_primary_retains() == 0


@pytest.mark.parametrize(
    ("cubin", "message"),
    [
        (b"PTX", "the 3 bytes given are not a cubin"),
        (bytes(64), "the 64 bytes given are not a cubin"),
        (b"\x7fELF\x02" + bytes(35) + b"\xff" * 8 + bytes(16), "the cubin is cut off"),
    ],
)
def test_not_a_cubin(cubin: bytes, message: str, libraries: dict[str, Path]) -> None:
    code, got = Step(libraries["plain"], libraries["mock"]).init(cubin)
    assert code == CUBIN
    assert message in got


def test_a_real_cubin_passes_and_a_cut_one_does_not(libraries: dict[str, Path]) -> None:
    core = pytest.importorskip("cuda.core")
    options = core.ProgramOptions(arch="sm_90")
    try:
        cubin = core.Program(full_source(TINY), "c++", options).compile("cubin").code
    except Exception as error:  # NVRTC is an optional part of the installation
        pytest.skip(f"NVRTC does not work here: {error}")
    step = Step(libraries["plain"], libraries["mock"])
    assert step.init(bytes(cubin)) == (OK, "")
    assert step.call("destroy") == OK
    for cut_bytes in (1, 100, len(cubin) // 2):
        code, message = step.init(bytes(cubin)[:-cut_bytes])
        assert code == CUBIN
        assert "cut off" in message


def test_a_current_context_is_used_and_left(libraries: dict[str, Path]) -> None:
    step = Step(libraries["plain"], libraries["mock"])
    step.mock.mock_make_current(ctypes.c_void_p(0x77))
    step.opened()
    assert step.mock.mock_primary_retains() == 0
    assert step.mock.mock_current() == 0x77
    step.calls()
    tensors = Tensors()
    assert step.launch(tensors.inputs, tensors.outputs) == OK
    assert step.calls() == ["cuLaunchCooperativeKernel"]
    step.mock.mock_make_current(ctypes.c_void_p(0x88))
    assert step.launch(tensors.inputs, tensors.outputs) == OK
    assert step.calls() == ["cuCtxPushCurrent", "cuLaunchCooperativeKernel", "cuCtxPopCurrent"]
    assert step.mock.mock_current() == 0x88
    assert step.call("destroy") == OK
    assert step.mock.mock_current() == 0x88
    assert step.mock.mock_live_allocations() == 0


def test_wrong_arguments_are_refused(plain: Step) -> None:
    tensors = Tensors()
    x, w = tensors.inputs
    (loss,) = tensors.outputs
    for inputs, outputs, message in (
        ([x], [loss], "takes 2 inputs, 1 outputs and 2 scalars; got 1, 1 and 2"),
        ([x, w], [loss, loss], "got 2, 2 and 2"),
        ([x, 0], [loss], "w: the pointer is null, 64 bytes are needed"),
        ([x, w + 4], [loss], "w: the address 0x"),
        ([w, w], [loss], "w is written by the launch and shares memory with x"),
        ([x, w], [x + 60], "loss is written by the launch and shares memory with x"),
    ):
        assert plain.launch(inputs, outputs) == ARGUMENT
        assert message in plain.error()
    assert plain.launch([x, w], [loss], step=101) == ARGUMENT
    assert "step: got 101, needs an integer from -2147483647 to 100" in plain.error()
    null = ctypes.c_void_p()
    assert plain.call("launch", null, 2, null, 1, null, 2, null) == ARGUMENT
    assert "null array" in plain.error()
    assert plain.function("launch")(null, null, 0, null, 0, null, 0, null) == ARGUMENT
    assert plain.function("last_error")(null) == b"no handle"
    plain.calls()
    assert plain.launch([x, w], [loss]) == OK  # a refused launch leaves the handle usable


def test_failed_launch_zeroes_the_header_before_the_next(plain: Step) -> None:
    tensors = Tensors()
    flags = (ctypes.c_char * 256).in_dll(plain.mock, "mock_settings")
    flags.value = b"launch_fails;"
    assert plain.launch(tensors.inputs, tensors.outputs) == DRIVER
    assert "cuLaunchCooperativeKernel failed with CUDA_ERROR_UNKNOWN (720)" in plain.error()
    flags.value = b";"
    plain.calls()
    assert plain.launch(tensors.inputs, tensors.outputs) == OK
    assert "cuMemsetD8Async" in plain.calls()
    assert plain.launch(tensors.inputs, tensors.outputs) == OK
    assert "cuMemsetD8Async" not in plain.calls()


def test_barrier_timeout_names_the_stage(plain: Step) -> None:
    tensors = Tensors()
    flags = (ctypes.c_char * 256).in_dll(plain.mock, "mock_settings")
    flags.value = b"barrier_timeout;"
    assert plain.call("set_barrier_timeout", ctypes.c_uint64(1000)) == OK
    assert plain.launch(tensors.inputs, tensors.outputs) == OK
    assert plain.call("check") == TIMEOUT
    assert f"a grid barrier timed out at stage 1, {HOSTILE}: not all 6 blocks" in plain.error()
    flags.value = b";"
    assert plain.launch(tensors.inputs, tensors.outputs) == OK
    assert plain.call("check") == OK


def test_another_stream_waits(plain: Step) -> None:
    tensors = Tensors()
    assert plain.launch(tensors.inputs, tensors.outputs, stream=8) == OK
    plain.calls()
    assert plain.launch(tensors.inputs, tensors.outputs, stream=8) == OK
    assert "cuCtxSynchronize" not in plain.calls()
    assert plain.launch(tensors.inputs, tensors.outputs, stream=16) == OK
    assert "cuCtxSynchronize" in plain.calls()


def test_table_is_rewritten_only_when_pointers_change(libraries: dict[str, Path]) -> None:
    step = Step(libraries["table"], libraries["mock"], "table").opened()
    tensors, others = Tensors(), Tensors()
    step.calls()
    counts = []
    for each in (tensors, tensors, others, others, tensors):
        assert step.launch(each.inputs, each.outputs) == OK
        counts.append(step.calls().count("cuMemcpyHtoDAsync"))
    assert counts == [1, 0, 1, 0, 1]
    assert tensors.loss[0] != 0
    assert others.loss[0] != 0
    assert step.call("destroy") == OK
    assert step.mock.mock_live_allocations() == 0


@pytest.mark.parametrize(("command", "name"), [(C99, "plain"), (CXX17, "plain"), (C99, "table")])
def test_c_program_trains(command: tuple[str, ...], name: str, libraries: dict[str, Path], tmp_path: Path) -> None:
    source = libraries["folder"] / f"{name}.cu"
    defines = (
        f'-DTRAINKERNEL_STEP_SOURCE="{source}"',
        f'-DTRAINKERNEL_DRIVER_LIBRARY="{libraries["mock"]}"',
    )
    program = tmp_path / "main"
    build(command, *defines, TESTS / "host_entry_main.c", source, "-o", program, "-ldl")
    (tmp_path / "step.cubin").write_bytes(FAKE_CUBIN)
    x, w = np.arange(16, dtype=np.float32), np.full(16, 2, np.float32)
    (tmp_path / "initial.bin").write_bytes(initial_file(3, [x, w], 1, [(0.5, -0.25), (1, 1)]))
    arguments = [str(program), *(str(tmp_path / file) for file in ("step.cubin", "initial.bin", "final.bin"))]
    environment = {**os.environ, "MOCK_DRIVER": name}
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == OK, done.stderr
    for step in range(3):
        loss = np.float32(np.dot(x, w))
        w = w - np.float32(0.5 - 0.25 * step) * x
        w[0] += 1 + step
    final = (tmp_path / "final.bin").read_bytes()
    rows = b"".join(struct.pack("<Q", a.nbytes) + a.tobytes() for a in (x, w, np.array([loss], np.float32)))
    assert final == b"TKFINAL1" + rows
    environment["MOCK_DRIVER"] = "no_device"
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == NO_DEVICE
    assert "CUDA_ERROR_NO_DEVICE" in done.stderr


def test_two_kernels_in_one_program(libraries: dict[str, Path], tmp_path: Path) -> None:
    source = libraries["folder"] / "plain.cu"
    includes = "".join(
        f'#define TRAINKERNEL_PREFIX {name}\n#include "{source}"\n#undef TRAINKERNEL_PREFIX\n' for name in "ab"
    )
    (tmp_path / "both.c").write_text(includes + "int main(void) { return a_destroy(0) + b_destroy(0); }\n")
    build(C99, tmp_path / "both.c", "-o", tmp_path / "both", "-ldl")
    assert subprocess.run([tmp_path / "both"], check=False).returncode == 0
