"""Shared by the tests of the C host entry: compiling it, and driving it over the mock driver."""

from __future__ import annotations

import ctypes
import shutil
import struct
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from trainkernel.codegen.host_entry import HostEntryDescription, HostScalar, HostTensor, emit_host_entry

TESTS = Path(__file__).parent
WARNINGS = ("-Wall", "-Wextra", "-Wpedantic", "-Werror")
C99 = ("gcc", "-x", "c", "-std=c99", *WARNINGS)
CXX17 = ("g++", "-x", "c++", "-std=c++17", *WARNINGS)
FAKE_CUBIN = b"\x7fELF\x02" + bytes(59)
HOSTILE = 'evil"*/\n??/\\é'

OK, ARGUMENT, NO_DRIVER, NO_DEVICE, UNSUPPORTED, CUBIN, NOT_RESIDENT, MEMORY, DRIVER, TIMEOUT = range(10)

TINY = HostEntryDescription(
    tensors=(
        HostTensor("input", "x", "float32", 64, 4),
        HostTensor("input", "w", "float32", 64, 16, in_place=True),
        HostTensor("output", "loss", "float32", 4, 4),
    ),
    scalars=(HostScalar("rate", "float32", 40), HostScalar("step", "int32", 44, maximum=100)),
    params_bytes=48,
    uses_tensor_table=False,
    threads_per_block=128,
    shared_bytes=65536,
    workspace_bytes=1024,
    blocks_per_sm=2,
    max_work_blocks=100,
    stage_names=("forward", HOSTILE),
)
TABLE = replace(
    TINY,
    scalars=(HostScalar("rate", "float32", 24), HostScalar("step", "int32", 28)),
    params_bytes=32,
    uses_tensor_table=True,
)

# The device side that the host entry of TINY belongs to; the mock driver computes the same.
TINY_KERNEL = r"""
struct TkParams {
    unsigned char* workspace;
    unsigned long long barrier_timeout_ns;
    const float* x;
    float* w;
    float* loss;
    float rate;
    int step;
};
extern "C" __global__ void __launch_bounds__(128) trainkernel_step(const __grid_constant__ TkParams p) {
    if (blockIdx.x != 0 || threadIdx.x != 0) return;
    float loss = 0.0f;
    for (int i = 0; i < 16; ++i) loss = __fadd_rn(loss, __fmul_rn(p.x[i], p.w[i]));
    for (int i = 0; i < 16; ++i) p.w[i] = __fadd_rn(p.w[i], -__fmul_rn(p.rate, p.x[i]));
    p.w[0] += (float)p.step;
    *p.loss = loss;
}
"""


def full_source(description: HostEntryDescription) -> str:
    guard = "#if defined(__CUDACC_RTC__) || defined(TRAINKERNEL_EMULATOR)\n"
    return guard + TINY_KERNEL + "#else\n" + emit_host_entry(description) + "#endif\n"


def build(command: tuple[str, ...], *arguments: str | Path) -> None:
    if shutil.which(command[0]) is None:
        pytest.skip(f"no host compiler {command[0]}")
    done = subprocess.run([*command, *map(str, arguments)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


class Info(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int) for name in ("registers", "local", "static_shared", "dynamic_shared", "threads")),
        *((name, ctypes.c_int) for name in ("resident", "sms", "grid", "inputs", "outputs", "scalars", "device")),
        ("capability", ctypes.c_int),
        ("driver", ctypes.c_int),
        ("workspace", ctypes.c_uint64),
    ]


class Scalar(ctypes.Union):
    _fields_ = [("float32", ctypes.c_float), ("int32", ctypes.c_int32)]


class Step:
    """The compiled host entry over a mock driver with some settings."""

    def __init__(self, step_library: Path, mock_library: Path, settings: str = "", prefix: str = "trainkernel") -> None:
        self.library = ctypes.CDLL(str(step_library))
        self.mock = ctypes.CDLL(str(mock_library))
        self.mock.mock_reset(settings.encode())
        self.mock.mock_calls.restype = ctypes.c_char_p
        self.mock.mock_current.restype = ctypes.c_void_p
        self.prefix = prefix
        self.function("last_error").restype = ctypes.c_char_p
        self.handle = ctypes.c_void_p()

    def function(self, name: str) -> ctypes._NamedFuncPointer:  # type: ignore[name-defined]
        return getattr(self.library, f"{self.prefix}_{name}")

    def init(self, cubin: bytes = FAKE_CUBIN) -> tuple[int, str]:
        message = ctypes.create_string_buffer(512)
        code = self.function("init")(ctypes.byref(self.handle), cubin, ctypes.c_size_t(len(cubin)), message, 512)
        return code, message.value.decode()

    def opened(self) -> Step:
        assert self.init() == (OK, "")
        return self

    def call(self, name: str, *arguments: object) -> int:
        return int(self.function(name)(self.handle, *arguments))

    def error(self) -> str:
        return str(self.function("last_error")(self.handle).decode("utf-8", "replace"))

    def launch(self, inputs: list[int], outputs: list[int], rate: float = 0.5, step: int = 3, stream: int = 0) -> int:
        scalars = (Scalar * 2)(Scalar(float32=rate), Scalar(int32=step))
        ins = (ctypes.c_void_p * len(inputs))(*inputs)
        outs = (ctypes.c_void_p * len(outputs))(*outputs)
        return self.call("launch", ins, len(inputs), outs, len(outputs), scalars, 2, ctypes.c_void_p(stream))

    def calls(self) -> list[str]:
        """The driver calls since the last time this was asked."""
        made = self.mock.mock_calls().decode().split()
        self.mock.mock_clear_calls()
        return [name for name in made if name != "cuCtxGetCurrent"]


class Tensors:
    """x, w and loss in host memory, which is the mock's device memory."""

    def __init__(self) -> None:
        store = np.zeros(64, np.float32)
        start = -(store.ctypes.data // 4) % 4
        self.x, self.w = store[start : start + 16], store[start + 16 : start + 32]
        self.loss = store[start + 32 : start + 33]
        self.x[:] = np.arange(16)
        self.w[:] = 2
        self.inputs = [self.x.ctypes.data, self.w.ctypes.data]
        self.outputs = [self.loss.ctypes.data]


def initial_file(
    num_steps: int, inputs: list[np.ndarray], num_outputs: int, scalars: list[tuple[float, float]]
) -> bytes:
    """The initial file of host_entry_main.c; a scalar is its base and its increment per step."""
    body = b"".join(struct.pack("<Q", array.nbytes) + array.tobytes() for array in inputs)
    rules = b"".join(struct.pack("<dd", *rule) for rule in scalars)
    return b"TKSTART1" + struct.pack("<4I", num_steps, len(inputs), num_outputs, len(scalars)) + body + rules
