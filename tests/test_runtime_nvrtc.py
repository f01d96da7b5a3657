"""NVRTC without a GPU, on a source that no generator wrote."""

from __future__ import annotations

import pytest
from runtime_support import COPY16_SOURCE, STEP_SOURCE, TABLE_SOURCE

from trainkernel.errors import CompileError
from trainkernel.runtime import nvrtc

ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_103", "sm_120")


@pytest.mark.parametrize("arch", ARCHS)
def test_compiles_for_every_architecture(arch: str) -> None:
    for source in (STEP_SOURCE, TABLE_SOURCE, COPY16_SOURCE.replace("COUNT", "7")):
        assert nvrtc.compile_cubin(source, arch).startswith(b"\x7fELF")


def test_same_source_gives_the_same_bytes() -> None:
    assert nvrtc.compile_cubin(STEP_SOURCE, "sm_90") == nvrtc.compile_cubin(STEP_SOURCE, "sm_90")


@pytest.mark.parametrize(
    "arch",
    [
        "compute_90",
        "sm90",
        "sm_",
        "sm_90b",
        "sm_90a ",
        "",
        "sm_90 -G",
        "sm_\uff19\uff10",
        pytest.param("sm_" + "9" * 5000, id="long"),
        None,
        90,
    ],
)
def test_text_that_is_no_architecture(arch: object) -> None:
    with pytest.raises(CompileError, match="arch must look like 'sm_90'"):
        nvrtc.compile_cubin(STEP_SOURCE, arch)  # type: ignore[arg-type]


@pytest.mark.parametrize("arch", ["sm_70", "sm_999", "sm_80a"])
def test_unknown_architecture_names_the_known_ones(arch: str) -> None:
    with pytest.raises(CompileError, match=rf"cannot compile for {arch}; it supports .*sm_90") as caught:
        nvrtc.compile_cubin(STEP_SOURCE, arch)
    assert "NVRTC 13" in str(caught.value)


def test_refused_source_shows_the_log() -> None:
    with pytest.raises(CompileError, match="refused the source for sm_90") as caught:
        nvrtc.compile_cubin("int broken(", "sm_90")
    assert "trainkernel.cu(1)" in str(caught.value)


def test_resource_statistics() -> None:
    statistics = nvrtc.resource_statistics(STEP_SOURCE, "sm_90")["trainkernel_step"]
    assert 8 <= statistics.registers <= 64
    assert statistics.spill_store_bytes == statistics.spill_load_bytes == 0
    assert statistics.shared_bytes >= 4


def test_spills_are_reported() -> None:
    loads = "".join(f"float v{i} = p[{i} * n];" for i in range(120))
    stores = "".join(f"p[{i} * n + 1] = v{119 - i} * v{i};" for i in range(120))
    source = f'extern "C" __global__ void __launch_bounds__(1024, 2) k(volatile float* p, int n) {{ {loads} {stores} }}'
    statistics = nvrtc.resource_statistics(source, "sm_90")["k"]
    assert statistics.registers == 32
    assert statistics.spill_store_bytes > 0
    assert statistics.stack_bytes > 0


def test_several_kernels_in_one_log() -> None:
    log = (
        "ptxas info    : Compiling entry function 'a' for 'sm_90'\n"
        "ptxas info    : Function properties for a\n"
        "    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads\n"
        "ptxas info    : Used 14 registers, used 1 barriers, 8 bytes cumulative stack size, 400 bytes smem\n"
        "ptxas info    : Compiling entry function 'b' for 'sm_90'\n"
        "ptxas info    : Used 255 registers, 368 bytes cmem[0]\n"
    )
    parsed = nvrtc.parse_ptxas_log(log)
    assert parsed["a"] == nvrtc.ResourceStatistics(14, 8, 4, 12, 400)
    assert parsed["b"] == nvrtc.ResourceStatistics(255, 0, 0, 0, 0)
