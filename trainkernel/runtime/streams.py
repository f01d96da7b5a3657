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
    if isinstance(stream, int) and not isinstance(stream, bool):
        if stream < 0:
            raise ArgumentError(f"stream: got {stream}, needs a stream handle, which is not negative")
        return stream or LEGACY_STREAM
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        answer = protocol() if callable(protocol) else protocol
        version, handle = answer
        if version != 0:
            raise ArgumentError(f"stream: {type(stream).__name__} speaks version {version} of __cuda_stream__, needs 0")
        return int(handle) or LEGACY_STREAM
    for attribute in ("cuda_stream", "ptr"):
        handle = getattr(stream, attribute, None)
        if isinstance(handle, int):
            return handle or LEGACY_STREAM
    raise ArgumentError(
        f"stream: got {type(stream).__name__}, needs None, an integer handle, or an object with __cuda_stream__, "
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
