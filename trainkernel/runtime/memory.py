"""Device memory of our own: workspaces, pointer tables, outputs for frameworks that lend none.

Everything runs in relaxed capture mode and on a private stream, so that making or dropping a
kernel never breaks a stream capture elsewhere in the process.
"""

from __future__ import annotations

import weakref
from contextlib import suppress
from functools import cache
from typing import Any

from trainkernel.errors import LaunchError
from trainkernel.runtime.driver import check, describe_status, relaxed_capture, require_driver, using_device


@cache
def _private_stream(device_index: int) -> Any:
    """A non-blocking stream of a device, for fills and copies that the host waits for."""
    with using_device(device_index) as driver:
        flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        return check(driver.cuStreamCreate(int(flags)), "cuStreamCreate")


def _free(device_index: int, pointer: int, keep: Any) -> None:
    try:
        with using_device(device_index) as driver, relaxed_capture(driver):
            driver.cuMemFree(pointer)  # waits for the work that may still use it
    except Exception:  # a destructor: the device may be gone, and nobody can be told
        pass


class DeviceMemory:
    """A block of device memory, freed with the object; freeing waits for running kernels.

    Parameters
    ----------
    device_index : int
    size_bytes : int
        0 is allowed and gives a null pointer.
    keep : object, optional
        Held until the memory has been freed: what running kernels that use it also need.

    Raises
    ------
    LaunchError
        If the device has not that much memory left.
    """

    def __init__(self, device_index: int, size_bytes: int, keep: Any = None) -> None:
        self.device_index = device_index
        self.size_bytes = size_bytes
        self.pointer = 0
        if size_bytes == 0:
            return
        with using_device(device_index) as driver, relaxed_capture(driver):
            status, pointer = driver.cuMemAlloc(size_bytes)
            if int(status) != 0:
                raise LaunchError(
                    f"device {device_index} cannot give {size_bytes:,} bytes: {describe_status(status)}. "
                    "Free memory held by a framework's cache, or use a smaller batch."
                )
        self.pointer = int(pointer)
        # Not at exit: the driver gives all memory back then, and may already be gone.
        weakref.finalize(self, _free, device_index, self.pointer, keep).atexit = False

    def zero(self, size_bytes: int) -> None:
        """Fill the first bytes with zeros and wait until that is done."""
        with using_device(self.device_index) as driver, relaxed_capture(driver):
            stream = _private_stream(self.device_index)
            check(driver.cuMemsetD8Async(self.pointer, 0, size_bytes, stream), "cuMemsetD8Async")
            check(driver.cuStreamSynchronize(stream), "cuStreamSynchronize")

    def write(self, data: bytes) -> None:
        """Copy host bytes to the start and wait until that is done."""
        with using_device(self.device_index) as driver, relaxed_capture(driver):
            stream = _private_stream(self.device_index)
            check(driver.cuMemcpyHtoDAsync(self.pointer, data, len(data), stream), "cuMemcpyHtoDAsync")
            check(driver.cuStreamSynchronize(stream), "cuStreamSynchronize")

    def read(self, size_bytes: int, offset_bytes: int = 0) -> bytes:
        """So many bytes from an offset on, once the copy is done; the caller has waited for whoever writes them."""
        data = bytearray(size_bytes)
        with using_device(self.device_index) as driver, relaxed_capture(driver):
            stream = _private_stream(self.device_index)
            check(driver.cuMemcpyDtoHAsync(data, self.pointer + offset_bytes, size_bytes, stream), "cuMemcpyDtoHAsync")
            check(driver.cuStreamSynchronize(stream), "cuStreamSynchronize")
        return bytes(data)


def record_event(device_index: int, stream: int) -> Any:
    """A new event recorded on a stream."""
    with using_device(device_index) as driver:
        flags = int(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)
        event = check(driver.cuEventCreate(flags), "cuEventCreate")
        check(driver.cuEventRecord(event, stream), "cuEventRecord")
    return event


def destroy_event(event: Any) -> None:
    """Destroy an event; the driver keeps what still needs it."""
    require_driver().cuEventDestroy(event)


def forget_event(event: Any) -> None:
    """``destroy_event`` for a destructor: the device may be gone, and nobody can be told."""
    with suppress(Exception):
        destroy_event(event)
