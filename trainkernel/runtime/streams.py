"""What a caller may give as a stream, as an integer handle.

The legacy default stream is handle 1 throughout: 0 would mean the per-thread default stream in
a process that asked the CUDA Python bindings for it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from trainkernel.errors import ArgumentError

LEGACY_STREAM = 1
PER_THREAD_STREAM = 2


def stream_handle(stream: Any) -> int:
    """The handle of None (legacy default), an integer, or a stream object of any framework.

    Objects are read by ``__cuda_stream__``, then ``cuda_stream`` (torch), then ``ptr`` (CuPy).

    Raises
    ------
    ArgumentError
        For anything else.
    """
    if stream is None:
        return LEGACY_STREAM
    handle = stream if isinstance(stream, int) and not isinstance(stream, bool) else _handle_of_object(stream)
    if not 0 <= handle < 1 << 64:
        raise ArgumentError(f"stream: got the handle {handle:#x}, needs one that is not negative and has 64 bits")
    return handle or LEGACY_STREAM


def _handle_of_object(stream: Any) -> int:
    kind = type(stream).__name__
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        try:
            version, handle = protocol() if callable(protocol) else protocol
            version, handle = int(version), int(handle)
        except Exception as error:  # someone else's code: it may raise anything
            raise ArgumentError(f"stream: __cuda_stream__ of {kind} gives no version and handle ({error})") from error
        if version != 0:
            raise ArgumentError(f"stream: {kind} speaks version {version} of __cuda_stream__, needs 0")
        return handle
    for attribute in ("cuda_stream", "ptr"):
        handle = getattr(stream, attribute, None)
        if isinstance(handle, int):
            return handle
    raise ArgumentError(
        f"stream: got {kind}, needs None, an integer handle, or an object with __cuda_stream__, "
        "such as a torch, CuPy or cuda.core stream"
    )


def current_stream_getter(framework: str, device_index: int) -> Callable[[], int] | None:
    """A function that gives the framework's current stream on a device; None: it has none.

    JAX keeps its streams to itself: its arrays are complete when they are exported, so the legacy
    default stream does.
    """
    if framework == "torch":
        torch = sys.modules["torch"]
        raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
        if raw is not None:  # a plain integer, without making a Stream object
            return lambda: int(raw(device_index)) or LEGACY_STREAM
        return lambda: int(torch.cuda.current_stream(device_index).cuda_stream) or LEGACY_STREAM
    if framework == "cupy":
        cupy = sys.modules["cupy"]
        get_current_stream = cupy.cuda.get_current_stream

        def current() -> int:
            try:
                stream = get_current_stream(device_index)
            except TypeError:  # older than CuPy 12: of the current device only
                stream = get_current_stream()
            return int(stream.ptr) or LEGACY_STREAM

        return current
    return None


def current_stream_owner(framework: str, device_index: int) -> Any:
    """The framework's current stream as an object that keeps the stream alive; None: none is needed.

    torch never destroys a stream of its pool.
    """
    if framework == "cupy":
        get_current_stream = sys.modules["cupy"].cuda.get_current_stream
        try:
            return get_current_stream(device_index)
        except TypeError:
            return get_current_stream()
    return None
