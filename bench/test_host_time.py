"""Host time per launch: ``pytest bench/test_host_time.py --benchmark-json=out.json``.

One kernel is launched through a bound launch, by a bare cuLaunchCooperativeKernel with its
arguments packed beforehand, and through the convenience call with its 20 tensors. A round is
``LAUNCHES`` launches, fewer than the driver queues, and the device is idle before each round, so
what is timed is the host's work only. Microseconds per launch are in ``extra_info``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

import trainkernel
from trainkernel.mlp import MlpStep, mlp_step
from trainkernel.runtime import driver

LAUNCHES = 100
ROUNDS = 50

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not driver.is_available(), reason="no GPU, or no driver"),
    pytest.mark.benchmark(group="host time of 100 launches"),
]


class Setting:
    """A small Adam step on a GPU: 2 + 18 tensors, in place, and two scalars."""

    def __init__(self) -> None:
        import torch

        self.torch = torch
        self.mlp: MlpStep = mlp_step((8, 32, 32, 1), 32, optimizer="adam")
        program = self.mlp.program
        assert len(program.tensor_inputs) == 20
        self.kernel = trainkernel.compile(program, device="cuda:0", inplace_outputs=self.mlp.inplace_outputs)
        self.stream = torch.cuda.Stream()
        with torch.cuda.stream(self.stream):
            self.inputs = [
                torch.from_numpy(value).to("cuda:0") if getattr(value, "ndim", 0) else float(value)
                for value in self.mlp.initial_inputs(learning_rate=1e-3)
            ]
            self.loss = torch.zeros((), device="cuda:0")
            outputs = [
                None if index in self.mlp.inplace_outputs else self.loss for index in range(len(program.outputs))
            ]
            self.bound = self.kernel.bind(self.inputs, outputs)
        self.bound.launch(self.stream)
        self.bound.check()


@pytest.fixture(scope="module")
def setting() -> Iterator[Setting]:
    pytest.importorskip("torch", reason="the arrays are torch's")
    made = Setting()
    yield made
    made.torch.cuda.synchronize()


def run(benchmark: Any, setting: Setting, launch: Callable[[], object]) -> None:
    """Time rounds of ``LAUNCHES`` calls, with an idle device before each."""

    def launch_many() -> None:
        for _ in range(LAUNCHES):
            launch()

    def wait() -> None:
        setting.torch.cuda.synchronize()

    benchmark.pedantic(launch_many, setup=wait, rounds=ROUNDS, warmup_rounds=5, iterations=1)
    stats = benchmark.stats.stats
    benchmark.extra_info["us_per_launch"] = 1e6 * stats.median / LAUNCHES
    benchmark.extra_info["us_per_launch_least"] = 1e6 * stats.min / LAUNCHES


def bare_launch(setting: Setting) -> tuple[Callable[[], object], list[Any]]:
    """The driver call alone on the same kernel and tensors, and what must outlive it."""
    stats, kernel = setting.kernel.stats, setting.kernel
    cuda = driver.require_driver()
    torch = setting.torch
    if stats.uses_tensor_table:
        pytest.skip("the kernel reads a pointer table")
    workspace = torch.zeros(stats.workspace_bytes, dtype=torch.uint8, device="cuda:0")
    torch.cuda.synchronize()
    params = (ctypes.c_ubyte * stats.params_bytes)()
    pointers = [workspace.data_ptr(), 0]
    for slot in stats.slots:
        pointers.append((setting.inputs[slot.index] if slot.kind == "input" else setting.loss).data_ptr())
    ctypes.memmove(params, (ctypes.c_uint64 * len(pointers))(*pointers), 8 * len(pointers))
    for scalar in stats.scalars:
        number = ctypes.c_float(setting.inputs[scalar.index])
        ctypes.memmove(ctypes.addressof(params) + scalar.offset_bytes, ctypes.byref(number), 4)
    packed = (ctypes.c_void_p * 1)(ctypes.addressof(params))
    module = driver.check(cuda.cuModuleLoadData(kernel.cubin), "cuModuleLoadData")
    function = driver.check(cuda.cuModuleGetFunction(module, stats.entry.encode()), "cuModuleGetFunction")
    if stats.shared_bytes:
        attribute = cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        driver.check(cuda.cuFuncSetAttribute(function, attribute, stats.shared_bytes), "cuFuncSetAttribute")
    usage = kernel.resource_usage()
    blocks = usage.num_sms * min(usage.resident_blocks_per_sm, stats.blocks_per_sm)
    blocks = max(1, min(blocks, stats.max_work_blocks, stats.max_blocks or blocks))
    launch = partial(
        cuda.cuLaunchCooperativeKernel,
        function,
        blocks,
        1,
        1,
        stats.threads_per_block,
        1,
        1,
        stats.shared_bytes,
        cuda.CUstream(setting.stream.cuda_stream),
        ctypes.addressof(packed),
    )
    driver.check(launch(), "cuLaunchCooperativeKernel")
    torch.cuda.synchronize()
    return launch, [workspace, params, packed, module]


def test_bare_driver_call(benchmark: Any, setting: Setting) -> None:
    launch, owners = bare_launch(setting)
    run(benchmark, setting, launch)
    assert owners


def test_bound_launch(benchmark: Any, setting: Setting) -> None:
    run(benchmark, setting, partial(setting.bound.launch, setting.stream))
    setting.bound.check()


def test_bound_launch_on_the_current_stream(benchmark: Any, setting: Setting) -> None:
    with setting.torch.cuda.stream(setting.stream):
        run(benchmark, setting, setting.bound.launch)
    setting.bound.check()


def test_bound_launch_with_a_new_scalar(benchmark: Any, setting: Setting) -> None:
    def launch() -> None:
        setting.bound.set_scalar("step", 2.0)
        setting.bound.launch(setting.stream)

    run(benchmark, setting, launch)
    setting.bound.check()


def test_convenience_call_with_20_tensors(benchmark: Any, setting: Setting) -> None:
    with setting.torch.cuda.stream(setting.stream):
        run(benchmark, setting, partial(setting.kernel, *setting.inputs))
