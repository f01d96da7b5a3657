"""Output arrays in the caller's framework.

torch and CuPy allocate their own arrays. For JAX, whose arrays may never change once they exist,
and for frameworks not known, the memory is ours: fresh, written by one launch, and then lent by
DLPack, never to be written again.
"""

from __future__ import annotations

import sys
from math import prod
from typing import Any

import numpy as np

from trainkernel.dtypes import DTYPES
from trainkernel.errors import ArgumentError
from trainkernel.runtime.device_array import DeviceArray
from trainkernel.runtime.dlpack import as_numpy, view
from trainkernel.runtime.streams import LEGACY_STREAM, current_stream_getter


def allocate(
    framework: str, shape: tuple[int, ...], dtype: str, device: tuple[str, int], stream: int | None = None
) -> Any:
    """A new dense array of undefined contents.

    Parameters
    ----------
    framework : str
        As in ``ArrayView``. For ``"jax"`` and ``"other"`` on a GPU the result is a ``DeviceArray``,
        which ``deliver`` turns into the caller's kind once it has been written.
    shape, dtype, device
        As in ``ArrayView``.
    stream : int, optional
        The stream that will write it: caching allocators hand out memory that is free on the
        allocating stream only.
    """
    kind, index = device
    if kind == "cpu":
        return np.empty(shape, DTYPES[dtype].numpy) if framework != "torch" else _empty_torch(shape, dtype, "cpu")
    handle = LEGACY_STREAM if stream is None else stream
    if framework == "torch":
        current = current_stream_getter("torch", index)
        if current is not None and current() == handle:
            return _empty_torch(shape, dtype, f"cuda:{index}")
        with sys.modules["torch"].cuda.stream(_torch_stream(handle, index)):
            return _empty_torch(shape, dtype, f"cuda:{index}")
    if framework == "cupy":
        cupy = sys.modules["cupy"]
        with cupy.cuda.Device(index), _cupy_stream(handle, index):
            return cupy.empty(shape, DTYPES[dtype].numpy)
    return DeviceArray(shape, dtype, index)


def deliver(framework: str, array: Any, like: Any) -> Any:
    """The caller's kind of array over a written one that ``allocate`` made.

    Parameters
    ----------
    framework : str
    array : object
        What ``allocate`` returned.
    like : object or None
        One of the caller's arrays; its namespace imports arrays of frameworks not known here.
    """
    if framework == "jax":
        return _to_jax(array)
    if framework == "other":
        namespace = getattr(like, "__array_namespace__", None)
        from_dlpack = getattr(namespace(), "from_dlpack", None) if namespace is not None else None
        if from_dlpack is not None and isinstance(array, DeviceArray):
            return from_dlpack(array)
    return array


def record_use(view_owner: Any, stream: int, device_index: int) -> None:
    """Tell torch's allocator that a tensor is in use on a stream that is not its own."""
    view_owner.record_stream(_torch_stream(stream, device_index))


def _to_jax(array: Any) -> Any:
    jax = sys.modules["jax"]
    if not isinstance(array, DeviceArray):
        result = jax.device_put(array, jax.devices("cpu")[0])
        if result.dtype != array.dtype:
            raise ArgumentError(
                f"got {result.dtype} from JAX for an output of {array.dtype}, needs the same dtype; "
                'call jax.config.update("jax_enable_x64", True) first'
            )
        return result
    if prod(array.shape) == 0:
        device = next(d for d in jax.devices("gpu") if _local_id(d) == array.device_index)
        return jax.device_put(np.empty(array.shape, array._entry.numpy), device)
    return jax.dlpack.from_dlpack(array)


def _local_id(device: Any) -> int:
    number = getattr(device, "local_hardware_id", None)
    return int(device.id if number is None else number)


def _empty_torch(shape: tuple[int, ...], dtype: str, device: str) -> Any:
    torch = sys.modules["torch"]
    return torch.empty(shape, dtype=getattr(torch, dtype), device=device)


def _torch_stream(handle: int, device_index: int) -> Any:
    torch = sys.modules["torch"]
    if handle == LEGACY_STREAM:
        return torch.cuda.default_stream(device_index)
    return torch.cuda.ExternalStream(handle, device=device_index)


def _cupy_stream(handle: int, device_index: int) -> Any:
    cupy = sys.modules["cupy"]
    if handle == LEGACY_STREAM:
        return cupy.cuda.Stream.null
    if hasattr(cupy.cuda.Stream, "from_external"):
        with cupy.cuda.Device(device_index):
            return cupy.cuda.Stream.from_external(_ForeignStream(handle))
    return cupy.cuda.ExternalStream(handle, device_index)


class _ForeignStream:
    """A stream handle by the ``__cuda_stream__`` protocol."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


def copy_into(destination: Any, source: np.ndarray[Any, Any]) -> None:
    """Write a NumPy array into a host array of any framework."""
    np.copyto(as_numpy(view(destination)), source, casting="no")
