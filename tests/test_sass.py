"""What NVRTC makes of functions that several tasks call, and of products: descriptors behind calls, no local memory."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from region_programs import plain_and_fused
from sass import Function, descriptors_from_registers, disassemble, find_nvdisasm, parse, undefined_descriptors

import trainkernel as tk
from trainkernel import Program, ProgramBuilder
from trainkernel.codegen import generate
from trainkernel.runtime.nvrtc import compile_cubin

LISTING = """
kernel:
        /*0000*/                   LDC.64 R10, c[0x0][0x208] ;
        /*0010*/                   CALL.REL.NOINC `(callee) ;
        /*0020*/               @P0 BRA `(.L_x_0) ;
        /*0030*/                   MOV R3, 0x1 ;
.L_x_0:
        /*0040*/                   R2UR UR4, R10 ;
        /*0050*/                   R2UR UR5, R11 ;
        /*0060*/                   STG.E desc[UR4][R2.64], R0 ;
        /*0070*/                   EXIT ;
callee:
        /*0080*/                   FFMA R8, R6.reuse, R10, R3 ;
        /*0090*/                   RET.REL.NODEC R20 `(kernel) ;
"""


def test_a_descriptor_survives_a_call_that_leaves_its_registers() -> None:
    functions = parse(LISTING)
    assert [register for _, register in descriptors_from_registers(functions["kernel"])] == [10, 11]
    assert undefined_descriptors(functions) == []


@pytest.mark.parametrize(
    "change",
    [
        ("LDC.64 R10, c[0x0][0x208]", "NOP"),  # nobody writes it
        ("FFMA R8, R6", "FFMA R11, R6"),  # the call overwrites a half
        ("LDC.64 R10, c[0x0][0x208]", "@P0 BRA `(.L_x_0)"),  # one path goes around
    ],
)
def test_an_undefined_descriptor_is_found(change: tuple[str, str]) -> None:
    assert change[0] in LISTING
    found = undefined_descriptors(parse(LISTING.replace(*change)))
    assert found and all(line.startswith("kernel: R2UR") for line in found)


def _layers(count: int, rows: int, width: int, op: str) -> Program:
    b = ProgramBuilder()
    x = b.input("x", (rows, width))
    for n in range(count):
        x = b.op(op, b.op("mm", x, b.input(f"w{n}", (width, width))))
    return b.build([x])


def _attention() -> Program:
    """Gradients of two layers of attention: many functions, most of them called from two stages."""

    def loss(params: list[dict[str, np.ndarray]], x: np.ndarray) -> np.ndarray:
        for layer in params:
            q, k, v = (x @ layer[name] for name in "qkv")
            x = x + tk.nn.softmax(q @ tk.numpy.swapaxes(k, -1, -2), axis=-1) @ v
            x = x + tk.nn.gelu(tk.nn.layer_norm(x) @ layer["up"]) @ layer["down"]
        return tk.numpy.mean(x**2)

    shapes = {"q": (64, 64), "k": (64, 64), "v": (64, 64), "up": (64, 128), "down": (128, 64)}
    params = [{name: np.zeros(shape, np.float32) for name, shape in shapes.items()} for _ in range(2)]
    return tk.jit(tk.value_and_grad(loss)).lower(params, np.zeros((4, 64, 64), np.float32)).program


@pytest.mark.parametrize(
    "program",
    [_layers(3, 1024, 64, "neg"), _layers(4, 40, 24, "tanh"), _attention()],
    ids=["plain", "tanh", "attention"],
)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
def test_descriptors_behind_calls_are_defined(
    program: Program, arch: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    source = generate(program, region_pieces=0).source
    assert "__device__ TK_NOINLINE void" in source
    assert undefined_descriptors(_compiled(source, arch, tmp_path, request)) == []


def _compiled(source: str, arch: str, folder: Path, request: pytest.FixtureRequest) -> dict[str, Function]:
    """The functions of a source's cubin; skips the test where nobody can disassemble it."""
    nvdisasm = find_nvdisasm()
    if nvdisasm is None:
        message = "install nvidia-cuda-nvdisasm"
        pytest.fail(message) if request.config.getoption("--require-packages") else pytest.skip(message)
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(compile_cubin(source, arch))
    return disassemble(nvdisasm, cubin)


@pytest.mark.parametrize("shape", [(64, 64, 64), (32, 32, 32), (16, 48, 100), (8, 2, 128)])
def test_sums_of_products_near_a_block_stay_in_registers(
    shape: tuple[int, int, int], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Also while the lanes of a warp share them out: an index that the compiler does not know would send them away."""
    for layout in ("nn", "tt"):
        source = generate(plain_and_fused(shape, layout), region_pieces=1, target="sm_90a").source
        functions = _compiled(source, "sm_90a", tmp_path, request)
        found = [line for each in functions.values() for line in each.instructions if re.search(r"\b(LDL|STL)\b", line)]
        assert "tk_block_product<" in source and found == []
