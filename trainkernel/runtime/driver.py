"""The CUDA driver: one sticky probe, error checks, device facts and the primary context.

Every other module of the runtime gets the driver through ``require_driver``. The probe (cuInit,
then a device count above zero) runs once in a process. Where it failed, every later call raises
the same ``DeviceError`` and nothing touches the driver again: some loading paths of the CUDA
Python packages do not return when they are entered a second time without a driver.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

from trainkernel.errors import DeviceError, LaunchError


@dataclass(frozen=True)
class DeviceFacts:
    """What the runtime needs to know of one device.

    Attributes
    ----------
    index : int
    name : str
    compute_capability : tuple of int
        Major and minor.
    num_sms : int
    cooperative_launch : bool
    registers_per_sm : int
    shared_bytes_per_block : int
        The opt-in limit of static and dynamic shared memory together.
    shared_bytes_per_sm : int
    threads_per_sm : int
    driver_version : int
        As the driver reports it: 13000 for CUDA 13.0.
    """

    index: int
    name: str
    compute_capability: tuple[int, int]
    num_sms: int
    cooperative_launch: bool
    registers_per_sm: int
    shared_bytes_per_block: int
    shared_bytes_per_sm: int
    threads_per_sm: int
    driver_version: int

    @property
    def arch(self) -> str:
        """The architecture to compile for, for example ``"sm_80"``.

        A Hopper's has the suffix of its own instructions (``"sm_90a"``): the code is for this device alone.
        """
        major, minor = self.compute_capability
        return "sm_90a" if (major, minor) == (9, 0) else f"sm_{major}{minor}"


@dataclass(frozen=True)
class _Probe:
    driver: Any
    num_devices: int
    failure: str | None
    process_id: int


_probe: _Probe | None = None
_probe_lock = threading.Lock()


def _run_probe() -> _Probe:
    def failed(reason: str) -> _Probe:
        return _Probe(None, 0, reason, os.getpid())

    advice = (
        "Compile with device='emulator' or device='reference', or give arch= to get the source and the cubin alone."
    )
    try:
        from cuda.bindings import driver
    except ImportError as error:
        return failed(
            f"no CUDA device: cuda-bindings cannot be imported ({error}). "
            f"Install it with: pip install 'cuda-bindings>=13,<14'. {advice}"
        )
    try:
        (status,) = driver.cuInit(0)
    except Exception as error:  # the loader's own error classes differ between versions
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return failed(f"no CUDA device: the driver library cannot be loaded ({reason}). {advice}")
    if int(status) != 0:
        return failed(f"no CUDA device: cuInit returned {status.name}. {advice}")
    status, count = driver.cuDeviceGetCount()
    if int(status) != 0:
        return failed(f"no CUDA device: cuDeviceGetCount returned {status.name}. {advice}")
    if count == 0:
        return failed(f"no CUDA device: the driver sees 0 devices (is CUDA_VISIBLE_DEVICES empty?). {advice}")
    return _Probe(driver, int(count), None, os.getpid())


def _probed() -> _Probe:
    global _probe
    if _probe is None:
        with _probe_lock:
            if _probe is None:
                _probe = _run_probe()
    return _probe


def require_driver() -> Any:
    """The module ``cuda.bindings.driver``, initialised and with at least one device.

    Raises
    ------
    DeviceError
        Where the probe failed, the same each time; or in a process forked after a probe that
        succeeded, since CUDA does not survive a fork.
    """
    probe = _probed()
    if probe.failure is not None:
        raise DeviceError(probe.failure)
    if probe.process_id != os.getpid():
        raise DeviceError(
            f"process {os.getpid()} was forked from {probe.process_id} after CUDA had been initialised there, "
            "and CUDA does not survive a fork. Start processes by the 'spawn' method."
        )
    return probe.driver


def is_available() -> bool:
    """Whether there is a driver with at least one device. Never raises, never hangs."""
    return _probed().failure is None


def num_devices() -> int:
    """How many devices the driver sees; 0 where there is none."""
    return _probed().num_devices


def check(result: Any, what: str) -> Any:
    """The values of a driver call's result tuple.

    Parameters
    ----------
    result : tuple
        What a function of ``cuda.bindings.driver`` returned: the status, then its values.
    what : str
        What was being done, for the message.

    Returns
    -------
    object
        None, the only value, or a tuple of the values.

    Raises
    ------
    LaunchError
        If the status is not success.
    """
    status = result[0]
    if int(status) != 0:
        raise LaunchError(f"{what} failed: {describe_status(status)}")
    values = result[1:]
    if not values:
        return None
    return values[0] if len(values) == 1 else values


def describe_status(status: Any) -> str:
    """A status's name and the driver's own words for it."""
    name = getattr(status, "name", str(status))
    driver = _probed().driver
    if driver is None:
        return str(name)
    error, text = driver.cuGetErrorString(status)
    return f"{name} ({text.decode()})" if int(error) == 0 and text else str(name)


@cache
def device_facts(index: int) -> DeviceFacts:
    """The facts of device ``index``.

    Raises
    ------
    DeviceError
        Without a driver, or if there is no such device.
    """
    driver = require_driver()
    count = num_devices()
    if not 0 <= index < count:
        raise DeviceError(f"no device cuda:{index}: the driver sees {count} ({', '.join(_device_names())})")
    device = check(driver.cuDeviceGet(index), f"cuDeviceGet({index})")
    attribute = driver.CUdevice_attribute

    def get(name: str) -> int:
        return int(check(driver.cuDeviceGetAttribute(getattr(attribute, name), device), f"cuDeviceGetAttribute {name}"))

    name = check(driver.cuDeviceGetName(128, device), "cuDeviceGetName")
    return DeviceFacts(
        index=index,
        name=name.split(b"\0")[0].decode(errors="replace"),
        compute_capability=(
            get("CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR"),
            get("CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR"),
        ),
        num_sms=get("CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT"),
        cooperative_launch=bool(get("CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH")),
        registers_per_sm=get("CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR"),
        shared_bytes_per_block=get("CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        shared_bytes_per_sm=get("CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR"),
        threads_per_sm=get("CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR"),
        driver_version=int(check(driver.cuDriverGetVersion(), "cuDriverGetVersion")),
    )


def _device_names() -> list[str]:
    return [f"cuda:{index} {device_facts(index).name}" for index in range(num_devices())]


@cache
def primary_context(index: int) -> tuple[Any, int]:
    """Device ``index``'s primary context, retained for the process: the handle and its integer."""
    driver = require_driver()
    device_facts(index)
    device = check(driver.cuDeviceGet(index), f"cuDeviceGet({index})")
    context = check(driver.cuDevicePrimaryCtxRetain(device), f"cuDevicePrimaryCtxRetain({index})")
    return context, int(context)


def current_device_index() -> int:
    """The device whose context is current in this thread; 0 if none is."""
    driver = require_driver()
    if int(check(driver.cuCtxGetCurrent(), "cuCtxGetCurrent")) == 0:
        return 0
    return int(check(driver.cuCtxGetDevice(), "cuCtxGetDevice"))


@contextmanager
def using_device(index: int) -> Iterator[Any]:
    """Make the device's primary context current for the block and leave the caller's as it was.

    Yields
    ------
    module
        ``cuda.bindings.driver``.
    """
    driver = require_driver()
    context, handle = primary_context(index)
    current = check(driver.cuCtxGetCurrent(), "cuCtxGetCurrent")
    if int(current) == handle:
        yield driver
        return
    check(driver.cuCtxPushCurrent(context), "cuCtxPushCurrent")
    try:
        yield driver
    finally:
        check(driver.cuCtxPopCurrent(), "cuCtxPopCurrent")


@contextmanager
def relaxed_capture(driver: Any) -> Iterator[None]:
    """Let this thread allocate, free and copy while some stream is being captured.

    Such calls are refused, and break the capture, in its default mode, although they do not touch
    the captured streams. A destructor cannot know what the program is doing when it runs.
    """
    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    before = check(driver.cuThreadExchangeStreamCaptureMode(relaxed), "cuThreadExchangeStreamCaptureMode")
    try:
        yield
    finally:
        check(driver.cuThreadExchangeStreamCaptureMode(before), "cuThreadExchangeStreamCaptureMode")
