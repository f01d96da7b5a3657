"""A cubin loaded on a device, and how many of its blocks can be resident."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

from trainkernel.errors import DeviceError, LaunchError
from trainkernel.runtime.driver import (
    DeviceFacts,
    check,
    describe_status,
    device_facts,
    relaxed_capture,
    using_device,
)

# What a driver answers to a cubin that is not for it or not for the device.
_MISMATCH = frozenset(
    {
        "CUDA_ERROR_INVALID_IMAGE",
        "CUDA_ERROR_NO_BINARY_FOR_GPU",
        "CUDA_ERROR_INVALID_PTX",
        "CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
        "CUDA_ERROR_INVALID_SOURCE",
        "CUDA_ERROR_NOT_SUPPORTED",
        "CUDA_ERROR_SHARED_OBJECT_INIT_FAILED",
    }
)


@dataclass(frozen=True)
class ResourceUsage:
    """What a kernel takes of its device.

    Attributes
    ----------
    registers : int
        Per thread.
    local_bytes : int
        Per thread: stack and spills.
    static_shared_bytes, dynamic_shared_bytes : int
        Per block.
    threads_per_block : int
    max_threads_per_block : int
        The most that the kernel could be launched with.
    resident_blocks_per_sm : int
    num_sms : int
    """

    registers: int
    local_bytes: int
    static_shared_bytes: int
    dynamic_shared_bytes: int
    threads_per_block: int
    max_threads_per_block: int
    resident_blocks_per_sm: int
    num_sms: int

    @property
    def shared_bytes(self) -> int:
        return self.static_shared_bytes + self.dynamic_shared_bytes

    def __str__(self) -> str:
        return (
            f"{self.registers} registers and {self.local_bytes} bytes of local memory per thread, "
            f"{self.threads_per_block} threads and {self.shared_bytes:,} bytes of shared memory per block, "
            f"{self.resident_blocks_per_sm} blocks per SM on {self.num_sms} SMs"
        )


class LoadedKernel:
    """One kernel of a cubin, loaded in a device's primary context. Make it by ``load``.

    Attributes
    ----------
    entry : str
    facts : DeviceFacts
    function : CUfunction
    usage : ResourceUsage
    """

    def __init__(self, entry: str, facts: DeviceFacts, module: Any, function: Any, usage: ResourceUsage) -> None:
        self.entry = entry
        self.facts = facts
        self.function = function
        self.usage = usage
        # Workspaces hold this object and are freed first, which waits for running kernels.
        weakref.finalize(self, _unload, facts.index, module).atexit = False

    def grid_blocks(self, blocks_per_sm: int, max_work_blocks: int, max_blocks: int | None) -> int:
        """The number of blocks to launch: all resident at once, and no more than can be used.

        Parameters
        ----------
        blocks_per_sm : int
            Upper bound.
        max_work_blocks : int
            The most blocks that any part of the kernel can use.
        max_blocks : int or None
            The user's bound.
        """
        resident = self.usage.num_sms * min(self.usage.resident_blocks_per_sm, blocks_per_sm)
        bounds = [resident, max_work_blocks] + ([] if max_blocks is None else [max_blocks])
        return max(1, min(bounds))


def _unload(device_index: int, module: Any) -> None:
    try:
        with using_device(device_index) as driver, relaxed_capture(driver):
            driver.cuModuleUnload(module)
    except Exception:  # a destructor: nobody can be told
        pass


def load(
    cubin: bytes,
    entry: str,
    device_index: int,
    *,
    threads_per_block: int,
    dynamic_shared_bytes: int = 0,
    params_bytes: int | None = None,
    arch: str = "unknown",
    name: str | None = None,
) -> LoadedKernel:
    """Load a cubin's kernel on a device, completely: nothing is left to its first launch.

    Parameters
    ----------
    cubin : bytes
    entry : str
        The kernel's symbol.
    device_index : int
    threads_per_block, dynamic_shared_bytes : int
        With which it will be launched.
    params_bytes : int, optional
        The size of its only parameter; checked against the kernel's own.
    arch : str
        What the cubin was compiled for, for the messages.
    name : str, optional
        What the messages call the kernel; the entry if left out.

    Raises
    ------
    DeviceError
        If the device has no cooperative launch, or cannot run this cubin.
    LaunchError
        If not even one block can be resident on an SM; the message has the numbers.
    """
    facts = device_facts(device_index)
    label = f"kernel '{entry if name is None else name}'"
    if not facts.cooperative_launch:
        raise DeviceError(f"{label} needs cooperative launch, which device {device_index} ({facts.name}) does not have")
    with using_device(device_index) as driver, relaxed_capture(driver):
        status, module = driver.cuModuleLoadData(cubin)
        if int(status) != 0:
            raise _load_error(label, status, facts, arch)
        try:
            status, function = driver.cuModuleGetFunction(module, entry.encode())
            if int(status) != 0:
                raise _load_error(f"{label} (symbol {entry})", status, facts, arch)
            _force_load(driver, function)
            if params_bytes is not None:
                _check_params(driver, function, label, params_bytes)
            usage = _usage(driver, function, facts, label, threads_per_block, dynamic_shared_bytes)
        except BaseException:
            driver.cuModuleUnload(module)
            raise
    return LoadedKernel(entry, facts, module, function, usage)


def _load_error(label: str, status: Any, facts: DeviceFacts, arch: str) -> Exception:
    text = describe_status(status)
    major, minor = divmod(facts.driver_version // 10, 100)
    if getattr(status, "name", "") not in _MISMATCH:
        return LaunchError(f"{label} cannot be loaded on device {facts.index} ({facts.name}): {text}")
    return DeviceError(
        f"{label} cannot be loaded: its cubin is for {arch}, device {facts.index} ({facts.name}) is {facts.arch} and "
        f"its driver supports CUDA {major}.{minor}: {text}. Compile with arch='{facts.arch}', or, if that is what it "
        "is for, update the driver to the CUDA version of NVRTC or later."
    )


def _force_load(driver: Any, function: Any) -> None:
    """Load now what CUDA would load lazily: a first launch may find the device busy or capturing."""
    try:
        check(driver.cuFuncLoad(function), "cuFuncLoad")
    except RuntimeError as error:
        if isinstance(error, LaunchError):
            raise
        # A driver older than CUDA 12.4 has no cuFuncLoad; asking for an attribute loads there.


def _check_params(driver: Any, function: Any, label: str, params_bytes: int) -> None:
    try:
        status, _, size = driver.cuFuncGetParamInfo(function, 0)
    except RuntimeError:  # a driver older than CUDA 12.4
        return
    if int(status) == 0 and size != params_bytes:
        raise LaunchError(f"{label} takes a parameter block of {size} bytes, but {params_bytes} would be passed")


def _usage(
    driver: Any, function: Any, facts: DeviceFacts, label: str, threads: int, dynamic_bytes: int
) -> ResourceUsage:
    attribute = driver.CUfunction_attribute

    def get(name: str) -> int:
        return int(check(driver.cuFuncGetAttribute(getattr(attribute, name), function), f"cuFuncGetAttribute {name}"))

    registers = get("CU_FUNC_ATTRIBUTE_NUM_REGS")
    static_bytes = get("CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES")
    max_threads = get("CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK")
    reason = residency_refusal(facts, threads, registers, max_threads, static_bytes, dynamic_bytes)
    if reason is not None:
        raise LaunchError(f"{label} cannot be resident on device {facts.index}: {reason}")
    if dynamic_bytes:
        check(
            driver.cuFuncSetAttribute(
                function, attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, dynamic_bytes
            ),
            f"{label}: asking for {dynamic_bytes:,} bytes of dynamic shared memory",
        )
    resident = int(
        check(
            driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, threads, dynamic_bytes),
            "cuOccupancyMaxActiveBlocksPerMultiprocessor",
        )
    )
    if resident == 0:
        raise LaunchError(
            f"{label} cannot be resident on device {facts.index}: no block of {threads} threads × {registers} "
            f"registers and {static_bytes + dynamic_bytes:,} bytes of shared memory fits an SM, which has "
            f"{facts.registers_per_sm:,} registers and {facts.shared_bytes_per_sm:,} bytes. "
            f"Pass threads_per_block={max(threads // 2, 1)}."
        )
    return ResourceUsage(
        registers=registers,
        local_bytes=get("CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES"),
        static_shared_bytes=static_bytes,
        dynamic_shared_bytes=dynamic_bytes,
        threads_per_block=threads,
        max_threads_per_block=max_threads,
        resident_blocks_per_sm=resident,
        num_sms=facts.num_sms,
    )


def residency_refusal(
    facts: DeviceFacts, threads: int, registers: int, max_threads: int, static_bytes: int, dynamic_bytes: int
) -> str | None:
    """Why not one block can be resident, with the numbers and what to do; None if one can."""
    needed = threads * registers
    if needed > facts.registers_per_sm:
        fits = threads
        while fits > 32 and fits * registers > facts.registers_per_sm:
            fits //= 2
        return (
            f"{threads} threads × {registers} registers = {needed:,} of {facts.registers_per_sm:,} per SM. "
            f"Pass threads_per_block={fits}."
        )
    if threads > max_threads:
        fits = threads
        while fits > 32 and fits > max_threads:
            fits //= 2
        return f"{threads} threads per block of at most {max_threads}. Pass threads_per_block={fits}."
    if static_bytes + dynamic_bytes > facts.shared_bytes_per_block:
        return (
            f"{static_bytes:,} static + {dynamic_bytes:,} dynamic = {static_bytes + dynamic_bytes:,} bytes of shared "
            f"memory per block of {facts.shared_bytes_per_block:,}. Pass the target preset of {facts.arch}, or the "
            "portable one."
        )
    return None
