"""Training from C, with no Python in the process, gives the bits of the Python path."""

from __future__ import annotations

import struct
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from host_entry_support import C99, CXX17, TESTS, build, initial_file

import trainkernel
from trainkernel.mlp import MlpStep, mlp_step

pytestmark = pytest.mark.gpu

NUM_STEPS = 25
LEARNING_RATE = 1e-2


def train_in_python(kernel: Any, mlp: MlpStep, initial: list[Any]) -> list[np.ndarray]:
    """All tensor inputs after ``NUM_STEPS`` steps, then the outputs that are not in place."""
    torch = pytest.importorskip("torch", reason="the arrays are torch's")
    inputs = [torch.from_numpy(value).cuda() if np.ndim(value) else float(value) for value in initial]
    outputs = [
        None if index in mlp.inplace_outputs else torch.zeros(spec.shape, device="cuda")
        for index, spec in enumerate(mlp.program.outputs)
    ]
    bound = kernel.bind(inputs, outputs)
    for step in range(NUM_STEPS):
        bound.set_scalar("step", float(1 + step))
        bound.launch()
    bound.check()
    tensors = [value for value in (*inputs, *outputs) if isinstance(value, torch.Tensor)]
    return [tensor.cpu().numpy() for tensor in tensors]


def read_final(path: Path) -> list[bytes]:
    content = path.read_bytes()
    assert content[:8] == b"TKFINAL1"
    tensors, at = [], 8
    while at < len(content):
        (size,) = struct.unpack_from("<Q", content, at)
        tensors.append(content[at + 8 : at + 8 + size])
        at += 8 + size
    return tensors


@pytest.mark.parametrize(("command", "dtype"), [(C99, "float32"), (CXX17, "bfloat16")], ids=["c-f32", "cxx-bf16"])
def test_c_program_gives_the_bits_of_python(command: tuple[str, ...], dtype: str, tmp_path: Path) -> None:
    mlp = mlp_step((8, 64, 32, 4), 96, activation="tanh", optimizer="adam", dtype=dtype)
    kernel = trainkernel.compile(mlp.program, device="cuda", inplace_outputs=mlp.inplace_outputs)
    initial = mlp.initial_inputs(seed=3, learning_rate=LEARNING_RATE)
    arrays = [value for value in initial if np.ndim(value)]

    source = tmp_path / "step.cu"
    source.write_text(kernel.source)
    (tmp_path / "step.cubin").write_bytes(kernel.cubin)
    rules = {"learning_rate": (float(np.float32(LEARNING_RATE)), 0.0), "step": (1.0, 1.0)}
    scalars = [rules[spec.buffer] for spec in mlp.program.scalar_inputs]
    num_outputs = len(mlp.program.outputs) - len(mlp.inplace_outputs)
    (tmp_path / "initial.bin").write_bytes(initial_file(NUM_STEPS, arrays, num_outputs, scalars))
    define = f'-DTRAINKERNEL_STEP_SOURCE="{source}"'
    build(command, define, TESTS / "host_entry_main.c", source, "-o", tmp_path / "main", "-ldl")
    files = [str(tmp_path / name) for name in ("main", "step.cubin", "initial.bin", "final.bin")]
    done = subprocess.run(files, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert f"{kernel.resource_usage().registers} registers" in done.stdout

    expected = train_in_python(kernel, mlp, initial)
    got = read_final(tmp_path / "final.bin")
    assert [len(content) for content in got] == [array.nbytes for array in expected]
    for content, array in zip(got, expected, strict=True):
        assert content == array.tobytes()
    assert np.isfinite(np.frombuffer(got[-1], np.float32)).all()
