"""The runtime on a device, on sources that no generator wrote."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from runtime_support import STEP_SOURCE, copy_stub, step_stub, table_stub

from trainkernel.errors import ArgumentError, DeviceError, LaunchError
from trainkernel.kernel import GpuKernel
from trainkernel.runtime import driver, nvrtc
from trainkernel.runtime.build import build_cubin
from trainkernel.runtime.device_array import DeviceArray
from trainkernel.runtime.dlpack import view
from trainkernel.runtime.launch import BoundLaunch, LaunchPlan
from trainkernel.runtime.memory import DeviceMemory
from trainkernel.runtime.module import load
from trainkernel.runtime.scalars import ScalarField

pytestmark = pytest.mark.gpu
N = 4096
f32 = np.float32


def arch() -> str:
    return driver.device_facts(0).arch


def make_kernel(stub: Any, timeout_ns: int = 0) -> GpuKernel:
    return GpuKernel(stub.program, stub, 0, arch(), timeout_ns)


@pytest.fixture(scope="module")
def step() -> GpuKernel:
    return make_kernel(step_stub())


@pytest.fixture
def torch() -> Iterator[Any]:
    module = pytest.importorskip("torch")
    if not module.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    yield module
    module.cuda.synchronize()


@pytest.fixture
def cupy() -> Iterator[Any]:
    module = pytest.importorskip("cupy")
    yield module
    module.cuda.runtime.deviceSynchronize()


@pytest.fixture
def jax(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    module = pytest.importorskip("jax")
    try:
        module.devices("gpu")
    except RuntimeError:
        pytest.skip("this JAX has no GPU")
    return module


def host_step(x: Any, w: Any, lr: float, repeat: int) -> tuple[Any, Any]:
    for _ in range(repeat):
        w = w - f32(lr) * x
    return w, w[::-1]


X = np.linspace(-1, 1, N, dtype=f32)
W = np.linspace(2, 3, N, dtype=f32)


def current_context() -> int:
    return int(driver.check(driver.require_driver().cuCtxGetCurrent(), "cuCtxGetCurrent"))


# Without Programs and without a framework.


def test_source_sizes_and_pointers_are_enough() -> None:
    cubin = build_cubin(STEP_SOURCE, arch())
    kernel = load(cubin, "trainkernel_step", 0, threads_per_block=256, params_bytes=56, arch=arch())
    assert kernel.usage.resident_blocks_per_sm >= 1
    assert 0 < kernel.usage.registers <= 255
    x, w, flipped = (DeviceMemory(0, 4 * N) for _ in range(3))
    x.write(X.tobytes())
    w.write(W.tobytes())
    scalars = (
        ScalarField(0, "lr", "float32", 40),
        ScalarField(1, "repeat", "int32", 44),
        ScalarField(2, "skip", "int32", 48),
    )
    plan = LaunchPlan("step", kernel.grid_blocks(1, 16, None), 256, 0, 256, 56, 3, scalars=scalars)
    bound = BoundLaunch(kernel, plan, (x.pointer, w.pointer, flipped.pointer), {0: 0.5, 1: 1, 2: 0})
    for _ in range(3):
        bound.launch()
    bound.check()
    want_w, want_flipped = host_step(X, W, 0.5, 3)
    assert np.array_equal(np.frombuffer(w.read(4 * N), f32), want_w)
    assert np.array_equal(np.frombuffer(flipped.read(4 * N), f32), want_flipped)


def test_registers_agree_with_ptxas(step: GpuKernel) -> None:
    usage = step.resource_usage()
    statistics = nvrtc.resource_statistics(STEP_SOURCE, arch())["trainkernel_step"]
    assert usage.registers == statistics.registers
    assert usage.static_shared_bytes >= statistics.shared_bytes
    assert usage.num_sms == driver.device_facts(0).num_sms


def test_load_errors() -> None:
    cubin = build_cubin(STEP_SOURCE, arch())
    with pytest.raises(LaunchError, match="symbol no_such"):
        load(cubin, "no_such", 0, threads_per_block=256)
    with pytest.raises(LaunchError, match="parameter block of 56 bytes, but 64"):
        load(cubin, "trainkernel_step", 0, threads_per_block=256, params_bytes=64)
    with pytest.raises(LaunchError, match="bytes of shared memory per block of"):
        load(cubin, "trainkernel_step", 0, threads_per_block=256, dynamic_shared_bytes=10**6)
    with pytest.raises(LaunchError, match=r"at most 256\. Pass threads_per_block=256"):
        load(cubin, "trainkernel_step", 0, threads_per_block=512)
    with pytest.raises(DeviceError, match="no device cuda:99"):
        load(cubin, "trainkernel_step", 99, threads_per_block=256)
    other = "sm_80" if arch() != "sm_80" else "sm_90"
    with pytest.raises(DeviceError, match=f"its cubin is for {other}, device 0 .* is {arch()}"):
        load(build_cubin(STEP_SOURCE, other), "trainkernel_step", 0, threads_per_block=256, arch=other)
    with pytest.raises(DeviceError, match="cannot be loaded"):
        load(b"no cubin at all\0", "trainkernel_step", 0, threads_per_block=256)


def test_dynamic_shared_memory_above_48_kib(torch: Any) -> None:
    kernel = make_kernel(step_stub(shared_bytes=96 * 1024))
    assert kernel.resource_usage().shared_bytes >= 96 * 1024
    _, flipped = kernel(torch.tensor(X, device="cuda"), torch.tensor(W, device="cuda"), 0.5, 1, 0)
    assert np.array_equal(flipped.cpu().numpy(), host_step(X, W, 0.5, 1)[1])


# Frameworks, both ways.


def test_torch(step: GpuKernel, torch: Any) -> None:
    x, w = torch.tensor(X, device="cuda"), torch.tensor(W, device="cuda")
    new_w, flipped = step(x, w, 0.25, 2, 0)
    assert new_w is w
    assert isinstance(flipped, torch.Tensor)
    want_w, want_flipped = host_step(X, W, 0.25, 2)
    assert np.array_equal(w.cpu().numpy(), want_w)
    assert np.array_equal(flipped.cpu().numpy(), want_flipped)


def test_torch_parameters(step: GpuKernel, torch: Any) -> None:
    x = torch.tensor(X, device="cuda")
    parameter = torch.nn.Parameter(torch.tensor(W, device="cuda"))
    with pytest.raises(ArgumentError, match=r"input 1 'w': .* requires grad"):
        step(x, parameter, 0.5, 1, 0)
    step(x, parameter.detach(), 0.5, 1, 0)
    assert np.array_equal(parameter.detach().cpu().numpy(), host_step(X, W, 0.5, 1)[0])


def test_cupy(step: GpuKernel, cupy: Any) -> None:
    x, w = cupy.asarray(X), cupy.asarray(W)
    new_w, flipped = step(x, w, 0.25, 2, 0)
    assert new_w is w
    assert isinstance(flipped, cupy.ndarray)
    want_w, want_flipped = host_step(X, W, 0.25, 2)
    assert np.array_equal(cupy.asnumpy(w), want_w)
    assert np.array_equal(cupy.asnumpy(flipped), want_flipped)


def test_jax_arrays_are_never_changed(step: GpuKernel, jax: Any) -> None:
    x, w = jax.device_put(X, jax.devices("gpu")[0]), jax.device_put(W, jax.devices("gpu")[0])
    with pytest.raises(ArgumentError, match=r"input 1 'w': got a JAX array, which may never be changed"):
        step(x, w, 0.25, 2, 0)
    assert np.array_equal(np.asarray(w), W)


def test_jax_in_and_out(jax: Any) -> None:
    kernel = make_kernel(copy_stub((5, 7), "bfloat16"))
    for turn in range(20):  # fresh outputs each time: the earlier ones keep their values
        x = jax.numpy.arange(35, dtype=jax.numpy.bfloat16).reshape(5, 7) + turn
        (y,) = kernel(x)
        assert isinstance(y, jax.Array)
        assert y.dtype == jax.numpy.bfloat16
        assert np.array_equal(np.asarray(y + 1), np.asarray(x + 1))
    del x, y
    gc.collect()


def test_jax_input_for_an_array_in_place_elsewhere(step: GpuKernel, jax: Any, torch: Any) -> None:
    x, w = jax.device_put(X, jax.devices("gpu")[0]), torch.tensor(W, device="cuda")
    step(x, w, 0.25, 2, 0)
    torch.cuda.synchronize()
    assert np.array_equal(w.cpu().numpy(), host_step(X, W, 0.25, 2)[0])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 5), (2, 0, 3)])
def test_sixteen_bit_empty_and_scalar_arrays(torch: Any, dtype: str, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, device="cuda").to(getattr(torch, dtype))
    (y,) = make_kernel(copy_stub(shape, dtype))(x)
    assert y.shape == x.shape
    assert y.dtype == x.dtype
    assert torch.equal(x, y)


def test_cupy_float16(cupy: Any) -> None:
    x = cupy.arange(12, dtype=np.float16).reshape(3, 4)
    (y,) = make_kernel(copy_stub((3, 4), "float16"))(x)
    assert cupy.array_equal(x, y)


def test_other_frameworks_by_dlpack(torch: Any) -> None:
    class Lender:
        def __init__(self, tensor: Any) -> None:
            self.tensor = tensor

        def __dlpack_device__(self) -> Any:
            return self.tensor.__dlpack_device__()

        def __dlpack__(self, **arguments: Any) -> Any:
            return self.tensor.__dlpack__(**arguments)

    x = torch.randn(33, device="cuda").to(torch.bfloat16)[3:]  # with an offset
    lent = view(Lender(x))
    assert (lent.pointer, lent.strides, lent.dtype) == (x.data_ptr(), (1,), "bfloat16")
    (y,) = make_kernel(copy_stub((30,), "bfloat16"))(Lender(x))
    assert isinstance(y, DeviceArray)
    assert torch.equal(torch.from_dlpack(y), x)


def test_our_memory_lives_as_long_as_its_borrower(torch: Any) -> None:
    array = DeviceArray((8,), "float32", 0)
    array._memory.write(np.arange(8, dtype=f32).tobytes())
    borrowed = torch.from_dlpack(array)
    del array
    gc.collect()
    other = DeviceArray((8,), "float32", 0)
    other._memory.zero(32)
    assert borrowed.tolist() == list(range(8))
    for _ in range(3):  # capsules that nobody consumes
        other.__dlpack__()
        other.__dlpack__(max_version=(1, 0))


def test_pinned_memory_is_host_memory(step: GpuKernel, torch: Any) -> None:
    with pytest.raises(ArgumentError, match="host memory"):
        step(torch.tensor(X).pin_memory(), torch.tensor(W, device="cuda"), 0.5, 1, 0)
    with pytest.raises(ArgumentError, match=r"input 0 'x': got numpy .* needs an array on cuda:0"):
        step(X, torch.tensor(W, device="cuda"), 0.5, 1, 0)


def test_nothing_is_written_when_an_argument_is_refused(step: GpuKernel, torch: Any) -> None:
    x, w = torch.tensor(X, device="cuda"), torch.tensor(W, device="cuda")
    for arguments in ((x, w, 0.5, 1.5, 0), (x, w, 1e39, 1, 0), (w, w, 0.5, 1, 0), (x[:-1], w, 0.5, 1, 0)):
        with pytest.raises(ArgumentError):
            step(*arguments)
    with pytest.raises(ArgumentError, match="share memory"):
        step.bind([x, w, 0.5, 1, 0], [None, x])
    assert np.array_equal(w.cpu().numpy(), W)


def test_six_hundred_tensors(torch: Any) -> None:
    kernel = make_kernel(table_stub())
    arrays = [torch.full((32,), float(i), device="cuda") for i in range(600)]
    for _ in range(2):
        assert kernel(*arrays)[0].tolist() == [600 * 599 / 2] * 32
    arrays[0] = torch.ones(32, device="cuda")
    assert kernel(*arrays)[0].tolist() == [600 * 599 / 2 + 1] * 32
    total = torch.empty(32, device="cuda")
    bound = kernel.bind(arrays, [total])
    bound.launch()
    assert total.tolist() == [600 * 599 / 2 + 1] * 32


# Bound launches, streams, capture.


def bind_step(step: GpuKernel, torch: Any, **changes: Any) -> tuple[Any, Any, Any, BoundLaunch]:
    x, w = torch.tensor(X, device="cuda"), torch.tensor(W, device="cuda")
    flipped = torch.empty_like(w)
    scalars = {"lr": 0.25, "repeat": 1, "skip": 0, **changes}
    return x, w, flipped, step.bind([x, w, *scalars.values()], [None, flipped])


def test_scalars_change_between_launches(step: GpuKernel, torch: Any) -> None:
    _, w, flipped, bound = bind_step(step, torch)
    bound.launch()
    bound.set_scalar("lr", 0.5)
    bound.set_scalar(3, 2)
    bound.launch()
    want, _ = host_step(X, W, 0.25, 1)
    want, want_flipped = host_step(X, want, 0.5, 2)
    assert np.array_equal(w.cpu().numpy(), want)
    assert np.array_equal(flipped.cpu().numpy(), want_flipped)


def test_a_bound_launch_allocates_nothing(step: GpuKernel, torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, _, bound = bind_step(step, torch)
    bound.launch()
    torch.cuda.synchronize()
    blocks = torch.cuda.memory_stats()["allocation.all.allocated"]

    # Seen by this process alone: the device's free memory changes with what others do on it.
    def refuse(*_: Any) -> Any:
        raise AssertionError("a launch made something in the driver")

    cuda = driver.require_driver()
    for name in dir(cuda):
        if name.startswith(("cuMem", "cuArrayCreate", "cuEventCreate", "cuStreamCreate")):
            monkeypatch.setattr(cuda, name, refuse)
    for _ in range(1000):
        bound.launch()
    torch.cuda.synchronize()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == blocks


def test_torch_streams(step: GpuKernel, torch: Any) -> None:
    _, w, flipped, bound = bind_step(step, torch)
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    for turn in range(50):  # each launch reads what the one on the other stream wrote
        bound.launch((first, second)[turn % 2])
    with torch.cuda.stream(first):
        bound.launch()  # the current stream
        assert bound._order_handle == first.cuda_stream
    bound.launch(second.cuda_stream)
    torch.cuda.synchronize()
    want_w, want_flipped = host_step(X, W, 0.25, 52)
    assert np.array_equal(w.cpu().numpy(), want_w)
    assert np.array_equal(flipped.cpu().numpy(), want_flipped)


def test_calls_on_other_streams(step: GpuKernel, torch: Any, cupy: Any) -> None:
    side = torch.cuda.Stream()
    x, w = torch.tensor(X, device="cuda"), torch.tensor(W, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    before = torch.cuda.current_stream()
    _, flipped = step(x, w, 0.25, 1, 0, stream=side)
    assert torch.cuda.current_stream() == before
    side.synchronize()
    assert np.array_equal(flipped.cpu().numpy(), host_step(X, W, 0.25, 1)[1])
    with cupy.cuda.Stream(non_blocking=True) as stream:
        _, flipped = step(cupy.asarray(X), cupy.asarray(W), 0.25, 1, 0)
        stream.synchronize()
        assert np.array_equal(cupy.asnumpy(flipped), host_step(X, W, 0.25, 1)[1])


def test_two_kernels_interleaved_from_two_threads(torch: Any) -> None:
    kernels = [make_kernel(step_stub()), make_kernel(step_stub(max_work_blocks=8))]
    results: dict[int, Any] = {}

    def work(index: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            _, w, flipped, bound = bind_step(kernels[index], torch)
            for _ in range(200):
                bound.launch()
            torch.cuda.current_stream().synchronize()
            results[index] = (w.cpu().numpy(), flipped.cpu().numpy())

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    want_w, want_flipped = host_step(X, W, 0.25, 200)
    for index in range(2):
        assert np.array_equal(results[index][0], want_w)
        assert np.array_equal(results[index][1], want_flipped)


def test_torch_graph(step: GpuKernel, torch: Any) -> None:
    _, w, flipped, bound = bind_step(step, torch)
    bound.launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        bound.launch()
        bound.launch()
    for _ in range(5):
        graph.replay()
    torch.cuda.synchronize()
    bound.launch()  # after the capture the bound launch is as it was
    bound.check()
    want_w, want_flipped = host_step(X, W, 0.25, 12)
    assert np.array_equal(w.cpu().numpy(), want_w)
    assert np.array_equal(flipped.cpu().numpy(), want_flipped)


def test_call_in_a_torch_graph(step: GpuKernel, torch: Any) -> None:
    x, w = torch.tensor(X, device="cuda"), torch.tensor(W, device="cuda")
    table = make_kernel(table_stub())
    arrays = [torch.full((32,), float(i), device="cuda") for i in range(600)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, flipped = step(x, w, 0.25, 1, 0)
        (total,) = table(*arrays)
    table([torch.zeros(32, device="cuda") for _ in range(600)].pop(), *arrays[1:])  # moves the pointers elsewhere
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert np.array_equal(flipped.cpu().numpy(), host_step(X, W, 0.25, 3)[1])
    assert total.tolist() == [600 * 599 / 2] * 32


def test_a_kernel_made_and_dropped_during_a_capture(step: GpuKernel, torch: Any) -> None:
    _, w, _, bound = bind_step(step, torch)
    graph = torch.cuda.CUDAGraph()
    x2, w2, flipped2 = (torch.zeros(N, device="cuda") for _ in range(3))
    with torch.cuda.graph(graph):
        bound.launch()
        other = step.bind([x2, w2, 0.5, 1, 0], [None, flipped2])
        del other
        gc.collect()
    graph.replay()
    torch.cuda.synchronize()
    assert np.array_equal(w.cpu().numpy(), host_step(X, W, 0.25, 1)[0])


def test_cupy_graph(step: GpuKernel, cupy: Any) -> None:
    x, w, flipped = cupy.asarray(X), cupy.asarray(W), cupy.empty(N, f32)
    bound = step.bind([x, w, 0.25, 1, 0], [None, flipped])
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.runtime.deviceSynchronize()
    with stream:
        bound.launch(stream)
        stream.synchronize()
        stream.begin_capture()
        bound.launch(stream)
        graph = stream.end_capture()
        for _ in range(4):
            graph.launch(stream)
        stream.synchronize()
    want_w, want_flipped = host_step(X, W, 0.25, 5)
    assert np.array_equal(cupy.asnumpy(w), want_w)
    assert np.array_equal(cupy.asnumpy(flipped), want_flipped)


def test_context_and_device_are_left_as_they_were(step: GpuKernel, torch: Any) -> None:
    x, w, _, bound = bind_step(step, torch)
    before = current_context(), torch.cuda.current_device()
    step(x, w, 0.5, 1, 0)
    bound.launch()
    bound.check()
    step.resource_usage()
    assert (current_context(), torch.cuda.current_device()) == before

    seen = []

    def bare_thread() -> None:  # no context is current in a new thread
        seen.append(current_context())
        bound.launch(1)
        bound.check()
        seen.append(current_context())

    thread = threading.Thread(target=bare_thread)
    thread.start()
    thread.join()
    assert seen == [0, 0]


def test_second_device(torch: Any) -> None:
    if driver.num_devices() < 2:
        pytest.skip("one device")
    stub = step_stub()
    kernel = GpuKernel(stub.program, stub, 1, driver.device_facts(1).arch, 0)
    x, w = torch.tensor(X, device="cuda:1"), torch.tensor(W, device="cuda:1")
    before = current_context(), torch.cuda.current_device()
    _, flipped = kernel(x, w, 0.25, 1, 0)
    assert (current_context(), torch.cuda.current_device()) == before
    assert flipped.device.index == 1
    assert np.array_equal(flipped.cpu().numpy(), host_step(X, W, 0.25, 1)[1])
    with pytest.raises(ArgumentError, match="needs one on cuda:1"):
        kernel(x.to("cuda:0"), w, 0.25, 1, 0)


def test_arrays_of_calls_may_be_dropped_at_once(step: GpuKernel, torch: Any, cupy: Any) -> None:
    side = torch.cuda.Stream()
    for make in (torch.tensor, cupy.asarray):
        results = []
        for _ in range(50):
            arguments = {"device": "cuda"} if make is torch.tensor else {}
            x, w = make(X, **arguments), make(W, **arguments)
            torch.cuda.synchronize()
            results.append(step(x, w, 0.25, 100, 0, stream=side)[1])
            del x, w
        side.synchronize()
        want = host_step(X, W, 0.25, 100)[1]
        for flipped in results:
            got = flipped.cpu().numpy() if make is torch.tensor else cupy.asnumpy(flipped)
            assert np.array_equal(got, want)


# A lost barrier.


def test_a_lost_barrier_is_reported_and_the_device_goes_on(torch: Any) -> None:
    kernel = make_kernel(step_stub(), timeout_ns=20_000_000)
    x, w, _, bound = bind_step(kernel, torch, skip=1)
    bound.launch()
    message = r"barrier of stage 0 \(update\) was not passed by all \d+ blocks within 20 ms; its outputs are undefined"
    with pytest.raises(LaunchError, match=message):
        bound.check()
    w.copy_(torch.tensor(W))
    bound.set_scalar("skip", 0)
    bound.launch()
    bound.check()
    assert np.array_equal(w.cpu().numpy(), host_step(X, W, 0.25, 1)[0])

    with pytest.raises(LaunchError, match=r"stage 0 \(update\)"):
        kernel(x, w, 0.25, 1, 1)
    w.copy_(torch.tensor(W))
    _, flipped = kernel(x, w, 0.25, 1, 0)
    assert np.array_equal(flipped.cpu().numpy(), host_step(X, W, 0.25, 1)[1])


def test_a_grid_too_large_is_refused_and_the_next_launch_works(step: GpuKernel, torch: Any) -> None:
    x, w = torch.tensor(X, device="cuda"), torch.tensor(W, device="cuda")
    usage = step.resource_usage()
    blocks = usage.num_sms * usage.resident_blocks_per_sm + 1
    flipped = torch.empty(N, device="cuda")
    pointers = (x.data_ptr(), w.data_ptr(), flipped.data_ptr())
    plan = LaunchPlan("step", blocks, 256, 0, 256, 56, 3, scalars=step._signature.scalars)
    bound = BoundLaunch(step._loaded, plan, pointers, {2: 0.25, 3: 1, 4: 0})
    with pytest.raises(LaunchError, match="Pass max_blocks below"):
        bound.launch()
    _, flipped = step(x, w, 0.25, 1, 0)
    assert np.array_equal(flipped.cpu().numpy(), host_step(X, W, 0.25, 1)[1])


def test_bfloat16_from_the_host_and_back(torch: Any) -> None:
    x = np.arange(16).astype(ml_dtypes.bfloat16)
    on_device = torch.tensor(x.astype(f32), device="cuda").to(torch.bfloat16)
    (y,) = make_kernel(copy_stub((16,), "bfloat16"))(on_device)
    assert np.array_equal(y.float().cpu().numpy(), x.astype(f32))
