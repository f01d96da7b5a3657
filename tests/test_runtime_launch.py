"""Loading and launching against a stand-in driver that records every call.

What a GPU does with these calls is tested in tests/gpu; this shows which calls are made, in which
order, and with which parameter block.
"""

from __future__ import annotations

import ctypes
import gc
import struct
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from trainkernel.errors import ArgumentError, DeviceError, LaunchError
from trainkernel.runtime import driver, memory
from trainkernel.runtime.launch import BoundLaunch, LaunchPlan
from trainkernel.runtime.module import LoadedKernel, load
from trainkernel.runtime.scalars import ScalarField

STATUS_NAMES = {
    0: "CUDA_SUCCESS",
    209: "CUDA_ERROR_NO_BINARY_FOR_GPU",
    600: "CUDA_ERROR_NOT_READY",
    719: "CUDA_ERROR_LAUNCH_FAILED",
    720: "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE",
}


class Status(int):
    """A CUresult."""

    @property
    def name(self) -> str:
        return STATUS_NAMES.get(int(self), "CUDA_ERROR_UNKNOWN")


OK = Status(0)


class Enumeration:
    """An enum of the bindings: any name, with itself or a number as its value."""

    def __init__(self, **values: int) -> None:
        self.__dict__.update(values)

    def __getattr__(self, name: str) -> Any:
        return name


class FakeDriver:
    """The functions of cuda.bindings.driver that the runtime calls, for one device."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=OK, CUDA_ERROR_NOT_READY=Status(600))
    CUdevice_attribute = Enumeration()
    CUfunction_attribute = Enumeration()
    CUstream_flags = Enumeration(CU_STREAM_NON_BLOCKING=1)
    CUevent_flags = Enumeration(CU_EVENT_DISABLE_TIMING=2)
    CUstreamCaptureMode = Enumeration()
    CUstream = staticmethod(int)
    context = 1000

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.current = 1000
        self.capturing: set[int] = set()
        self.attributes = {
            "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR": 9,
            "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR": 0,
            "CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT": 132,
            "CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH": 1,
            "CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR": 65536,
            "CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 232448,
            "CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR": 233472,
            "CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR": 2048,
            "CU_FUNC_ATTRIBUTE_NUM_REGS": 40,
            "CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK": 1024,
        }
        self.results: dict[str, tuple[Any, ...]] = {
            "cuDeviceGet": (OK, 0),
            "cuDeviceGetName": (OK, b"H200\0\0"),
            "cuDriverGetVersion": (OK, 13000),
            "cuDevicePrimaryCtxRetain": (OK, 1000),
            "cuThreadExchangeStreamCaptureMode": (OK, "global"),
            "cuStreamCreate": (OK, 555),
            "cuModuleLoadData": (OK, "module"),
            "cuModuleGetFunction": (OK, "function"),
            "cuFuncGetParamInfo": (OK, 0, 56),
            "cuOccupancyMaxActiveBlocksPerMultiprocessor": (OK, 2),
            "cuGetErrorString": (OK, b"in words"),
            "cuEventQuery": (Status(600),),
        }
        self.memory = 0x10000
        self.events = 0
        self.header = struct.pack("<II", 0, 0)
        self.params: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append((name, *arguments))
            return self.results.get(name, (OK,))

        return call

    def cuDeviceGetAttribute(self, name: str, _: Any) -> Any:  # noqa: N802
        return OK, self.attributes[name]

    def cuFuncGetAttribute(self, name: str, _: Any) -> Any:  # noqa: N802
        return OK, self.attributes.get(name, 0)

    def cuCtxGetCurrent(self) -> Any:  # noqa: N802
        return OK, self.current

    def cuCtxPushCurrent(self, context: int) -> Any:  # noqa: N802
        self.calls.append(("push", context))
        self.before, self.current = self.current, context
        return (OK,)

    def cuCtxPopCurrent(self) -> Any:  # noqa: N802
        self.calls.append(("pop",))
        self.current = self.before
        return OK, 1000

    def cuStreamIsCapturing(self, stream: int) -> Any:  # noqa: N802
        self.calls.append(("cuStreamIsCapturing", stream))
        return OK, int(stream in self.capturing)

    def cuMemAlloc(self, size: int) -> Any:  # noqa: N802
        self.memory += 0x1000
        self.calls.append(("cuMemAlloc", size, self.memory))
        return OK, self.memory

    def cuEventCreate(self, flags: int) -> Any:  # noqa: N802
        self.events += 1
        return OK, f"event {self.events}"

    def cuMemcpyDtoHAsync(self, data: bytearray, *_: Any) -> Any:  # noqa: N802
        data[:] = self.header
        return (OK,)

    def cuLaunchCooperativeKernel(self, *arguments: Any) -> Any:  # noqa: N802
        self.calls.append(("launch", *arguments[:-1]))
        params = ctypes.c_void_p.from_address(arguments[-1]).value
        assert params is not None
        self.params.append(ctypes.string_at(params, 56))
        return self.results.get("launch", (OK,))

    def names(self) -> list[str]:
        names = [call[0] for call in self.calls]
        self.calls.clear()
        return [name for name in names if name != "cuThreadExchangeStreamCaptureMode"]


def clear_caches() -> None:
    for function in (driver.device_facts, driver.primary_context, memory._private_stream):
        function.cache_clear()


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    import os

    clear_caches()
    fake = FakeDriver()
    monkeypatch.setattr(driver, "_probe", driver._Probe(fake, 1, None, os.getpid()))
    yield fake
    gc.collect()
    clear_caches()


LR = ScalarField(2, "lr", "float32", 40)
STEPS = ScalarField(3, "steps", "int32", 44)


def load_kernel(**changes: Any) -> LoadedKernel:
    values: dict[str, Any] = {"threads_per_block": 256, "params_bytes": 56, "arch": "sm_90", **changes}
    return load(b"cubin", "trainkernel_step", 0, **values)


def make_plan(**changes: Any) -> LaunchPlan:
    values = {
        "name": "step",
        "blocks": 16,
        "threads_per_block": 256,
        "dynamic_shared_bytes": 0,
        "workspace_bytes": 1000,
    }
    values |= {"params_bytes": 56, "num_pointers": 3, "scalars": (LR, STEPS), "barrier_timeout_ns": 7, **changes}
    return LaunchPlan(**values)


def make_bound(**changes: Any) -> BoundLaunch:
    return BoundLaunch(load_kernel(), make_plan(**changes), (11, 12, 13), {2: 0.5, 3: 4}, framework="numpy")


def test_load(fake: FakeDriver) -> None:
    kernel = load_kernel(dynamic_shared_bytes=100_000)
    assert kernel.usage.resident_blocks_per_sm == 2
    assert kernel.facts.arch == "sm_90a"
    names = fake.names()
    assert names.index("cuFuncLoad") > names.index("cuModuleGetFunction")
    assert "cuFuncSetAttribute" in names
    assert kernel.grid_blocks(8, 1000, None) == 264
    del kernel
    gc.collect()
    assert fake.names() == ["cuModuleUnload"]


def test_load_refusals(fake: FakeDriver) -> None:
    fake.results["cuModuleLoadData"] = (Status(209), None)
    message = (
        r"cubin is for sm_100, device 0 \(H200\) is sm_90a and its driver supports CUDA 13.0: .*NO_BINARY.*in words"
    )
    with pytest.raises(DeviceError, match=message):
        load_kernel(arch="sm_100")
    fake.results["cuModuleLoadData"] = (OK, "module")
    with pytest.raises(LaunchError, match="parameter block of 56 bytes, but 64 would be passed"):
        load_kernel(params_bytes=64)
    fake.attributes["CU_FUNC_ATTRIBUTE_NUM_REGS"] = 80
    message = "cannot be resident on device 0: 1024 threads × 80 registers = 81,920 of 65,536 per SM"
    with pytest.raises(LaunchError, match=message):
        load_kernel(threads_per_block=1024)
    fake.results["cuOccupancyMaxActiveBlocksPerMultiprocessor"] = (OK, 0)
    with pytest.raises(LaunchError, match="no block of 256 threads × 80 registers"):
        load_kernel()
    assert fake.names().count("cuModuleUnload") == 3
    fake.attributes["CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH"] = 0
    driver.device_facts.cache_clear()
    with pytest.raises(DeviceError, match="needs cooperative launch"):
        load_kernel()


def test_launch_is_one_call(fake: FakeDriver) -> None:
    bound = make_bound()
    workspace = bound._workspace.pointer
    fake.names()
    bound.launch()
    assert fake.names() == ["launch"]
    bound.launch()
    assert fake.calls == [("launch", "function", 16, 1, 1, 256, 1, 1, 0, 1)]
    assert fake.params[-1] == struct.pack("<QQQQQfi8x", workspace, 7, 11, 12, 13, 0.5, 4)
    bound.set_scalar("lr", 2)
    bound.set_scalar(3, 9)
    bound.launch()
    assert struct.unpack_from("<fi", fake.params[-1], 40) == (2.0, 9)
    with pytest.raises(ArgumentError, match="no scalar input 0"):
        bound.set_scalar(0, 1)


def test_another_stream_waits_for_the_last_one(fake: FakeDriver) -> None:
    bound = make_bound()
    stream = SimpleNamespace(cuda_stream=70)
    bound.launch(stream)
    fake.names()
    bound.launch(stream)
    bound.launch(70)
    assert fake.names() == ["launch", "launch"]
    bound.launch(80)
    assert [call[:2] for call in fake.calls if call[0] != "launch"] == [
        ("cuStreamIsCapturing", 80),
        ("cuStreamIsCapturing", 70),
        ("cuEventRecord", "event 1"),
        ("cuStreamWaitEvent", 80),
    ]
    fake.names()
    bound.launch(stream)
    assert fake.names()[-3:] == ["cuEventRecord", "cuStreamWaitEvent", "launch"]


def test_capture(fake: FakeDriver) -> None:
    bound = make_bound()
    bound.launch()
    fake.capturing.add(70)
    fake.names()
    bound.launch(70)
    bound.launch(70)
    assert fake.names() == ["cuStreamIsCapturing", "launch"] * 2
    with pytest.raises(LaunchError, match="cannot"):
        bound.check()
    fake.capturing.clear()
    fake.names()
    bound.launch(70)  # not captured: ordered after the launch on the legacy stream
    assert fake.names() == ["cuStreamIsCapturing", "cuEventRecord", "cuStreamWaitEvent", "launch"]
    fake.capturing.add(70)
    bound.launch(70)
    with pytest.raises(LaunchError, match="is being captured now, so stream 0x50 cannot wait for it"):
        bound.launch(80)


def test_context_is_restored(fake: FakeDriver) -> None:
    bound = make_bound()
    fake.current = 2000
    fake.names()
    bound.launch()
    assert fake.names() == ["push", "launch", "pop"]
    assert fake.current == 2000
    fake.results["launch"] = (Status(719),)
    with pytest.raises(LaunchError):
        bound.launch()
    assert fake.current == 2000


def test_a_launch_in_a_forked_process_is_refused(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    bound = make_bound()
    bound.launch(70)
    bound.launch(80)
    monkeypatch.setattr(driver, "_probe", driver._Probe(fake, 1, None, -1))
    bound._get_context = lambda: (Status(3), None)
    with pytest.raises(DeviceError, match="CUDA does not survive a fork"):
        bound.launch()
    with pytest.raises(DeviceError, match="CUDA does not survive a fork"):
        bound.check()
    with pytest.raises(DeviceError, match="CUDA does not survive a fork"):
        call_on(bound, (1, 2, 3))
    del bound
    gc.collect()  # its event cannot be destroyed here, which is no error


def test_refused_launch(fake: FakeDriver) -> None:
    bound = make_bound()
    fake.results["launch"] = (Status(720),)
    with pytest.raises(
        LaunchError, match=r"not launched on device 0 with 16 blocks of 256 .* Pass max_blocks below 16"
    ):
        bound.launch()
    assert fake.names()[-4:-1] == ["cuStreamSynchronize", "cuMemsetD8Async", "cuStreamSynchronize"]


def test_lost_barrier(fake: FakeDriver) -> None:
    bound = make_bound(barrier_timeout_ns=5_000_000, describe_stage="stage {} (update)".format)
    bound.check()
    bound.launch()
    bound.check()
    fake.header = struct.pack("<II", 5, 3)
    fake.names()
    with pytest.raises(LaunchError, match=r"barrier of stage 2 \(update\) was not passed by all 16 blocks within 5 ms"):
        bound.check()
    assert "cuMemsetD8Async" in fake.names()


def test_table(fake: FakeDriver) -> None:
    bound = make_bound(uses_table=True)
    bound.launch()
    table = bound._table
    assert table is not None
    assert struct.unpack_from("<Q", fake.params[-1], 16) == (table.pointer,)
    copy = next(call for call in fake.calls if call[0] == "cuMemcpyHtoDAsync")
    assert copy[1:] == (table.pointer, struct.pack("<3Q", 11, 12, 13), 24, 555)


def call_on(bound: BoundLaunch, pointers: tuple[int, ...], stream: int = 70, owners: Any = None) -> bool:
    return bound.launch_with(pointers, {2: 1.0, 3: 1}, stream, None, owners)


def test_calls_with_other_arrays(fake: FakeDriver) -> None:
    bound = make_bound()
    assert not call_on(bound, (21, 22, 23))
    assert struct.unpack_from("<QQQ", fake.params[-1], 16) == (21, 22, 23)
    with pytest.raises(LaunchError, match="needs 3 pointers, got 2"):
        call_on(bound, (1, 2))


def test_calls_through_a_table(fake: FakeDriver) -> None:
    bound = make_bound(uses_table=True)
    call_on(bound, (21, 22, 23))
    fake.names()
    call_on(bound, (21, 22, 23))
    assert "cuMemcpyHtoDAsync" not in fake.names()
    call_on(bound, (31, 32, 33))
    assert ("cuMemcpyHtoDAsync", struct.pack("<3Q", 31, 32, 33), 70) in [(c[0], *c[2::2]) for c in fake.calls]
    fake.capturing.add(70)
    assert call_on(bound, (31, 32, 33))
    table = bound._table
    assert table is not None
    captured_table = struct.unpack_from("<Q", fake.params[-1], 16)[0]
    assert captured_table != table.pointer  # a graph reads its own table at each replay
    fake.capturing.clear()
    call_on(bound, (31, 32, 33))
    assert struct.unpack_from("<Q", fake.params[-1], 16)[0] == table.pointer


class Owner:
    pass


def test_owners_live_until_the_call_is_done(fake: FakeDriver) -> None:
    bound = make_bound()
    owner = Owner()
    alive = weakref.ref(owner)
    call_on(bound, (1, 2, 3), owners=[owner])
    del owner
    call_on(bound, (1, 2, 3))
    assert alive() is not None
    fake.results["cuEventQuery"] = (OK,)
    call_on(bound, (1, 2, 3))
    assert alive() is None


def test_a_bounded_number_of_calls_is_held(fake: FakeDriver) -> None:
    bound = make_bound()
    for _ in range(40):
        call_on(bound, (1, 2, 3), owners=[Owner()])
    assert len(bound._pending) <= 17
    assert "cuEventSynchronize" in fake.names()


def test_memory_is_freed_before_the_owners_and_the_module(fake: FakeDriver) -> None:
    owner = Owner()
    weakref.finalize(owner, lambda: fake.calls.append(("owner",)))
    bound = BoundLaunch(load_kernel(), make_plan(), (1, 2, 3), {}, [owner])
    del owner
    bound.launch()
    gc.collect()
    fake.names()
    del bound
    gc.collect()
    names = fake.names()
    assert names.index("cuMemFree") < names.index("owner")
    assert names.index("cuMemFree") < names.index("cuModuleUnload")


def test_out_of_memory(fake: FakeDriver) -> None:
    kernel = load_kernel()
    fake.cuMemAlloc = lambda size: (Status(2), 0)  # type: ignore[method-assign]
    with pytest.raises(LaunchError, match="device 0 cannot give 1,000 bytes"):
        BoundLaunch(kernel, make_plan(), (1, 2, 3), {})
