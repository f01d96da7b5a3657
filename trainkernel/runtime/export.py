"""Output arrays in the caller's framework.

torch and CuPy allocate their own arrays. For JAX, whose arrays may never change once they exist,
and for frameworks not known, the memory is ours: fresh, written by one launch, and then lent by
DLPack, never to be written again.
"""

from __future__ import annotations

import ctypes
import sys
from math import prod
from typing import Any

import numpy as np

from trainkernel.dtypes import DTYPES, DType
from trainkernel.errors import ArgumentError
from trainkernel.runtime.dlpack import CUDA, DLManagedTensor, DLManagedTensorVersioned, as_numpy, view
from trainkernel.runtime.driver import check, using_device
from trainkernel.runtime.memory import DeviceMemory, destroy_event, record_event
from trainkernel.runtime.streams import LEGACY_STREAM, current_stream_getter

# DLPack's type code of each dtype.
_CODES = {
    "float64": 2,
    "float32": 2,
    "float16": 2,
    "bfloat16": 4,
    "bool": 6,
    "int32": 0,
    "int64": 0,
    "uint32": 1,
    "uint8": 1,
}

# Structures lent to consumers, by address: alive until the deleter is called.
_lent: dict[int, tuple[Any, ...]] = {}

_DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_CAPSULE_DESTRUCTOR = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def _forget(address: int) -> None:
    _lent.pop(address, None)


def _forget_unused(capsule: int) -> None:
    # A consumed capsule was renamed, and its consumer calls the deleter.
    for name in (b"dltensor", b"dltensor_versioned"):
        if _is_valid(capsule, name):
            _lent.pop(_pointer(capsule, name), None)


# What C calls: they must live as long as anyone holds an array, so as long as the process.
_delete = _DELETER(_forget)
_destroy_capsule = _CAPSULE_DESTRUCTOR(_forget_unused)


class DeviceArray:
    """A dense array in device memory of our own, for anyone who speaks DLPack.

    Attributes
    ----------
    shape : tuple of int
    dtype : str
    device_index : int
    pointer : int
    """

    def __init__(self, shape: tuple[int, ...], dtype: str, device_index: int) -> None:
        self.shape = shape
        self.dtype = dtype
        self.device_index = device_index
        self._entry: DType = DTYPES[dtype]
        self._memory = DeviceMemory(device_index, prod(shape) * self._entry.itemsize_bytes)
        self._stream = LEGACY_STREAM
        self._stream_owner: Any = None

    @property
    def pointer(self) -> int:
        return self._memory.pointer

    def written_on(self, stream: int, stream_owner: Any) -> None:
        """Remember the stream whose work fills the array: consumers are made to wait for it."""
        self._stream = stream
        self._stream_owner = stream_owner

    def __repr__(self) -> str:
        dims = ",".join(str(size) for size in self.shape)
        return f"DeviceArray({self.dtype}[{dims}] on cuda:{self.device_index})"

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA, self.device_index

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        if copy:
            raise BufferError("DeviceArray lends its memory and makes no copies")
        if dl_device is not None and tuple(dl_device) != self.__dlpack_device__():
            raise BufferError(f"DeviceArray is on {self.__dlpack_device__()} and cannot be lent on {tuple(dl_device)}")
        if stream is None:  # consumers mean different streams by it, so none of them has to wait
            self._wait()
        elif stream != -1:
            self._order(int(stream) or LEGACY_STREAM)
        return self._capsule(versioned=max_version is not None and max_version[0] >= 1)

    def _wait(self) -> None:
        with using_device(self.device_index) as driver:
            check(driver.cuStreamSynchronize(self._stream), f"{self!r}: waiting for the kernel that writes it")

    def _order(self, stream: int) -> None:
        if stream == self._stream:
            return
        event = record_event(self.device_index, self._stream)
        with using_device(self.device_index) as driver:
            check(driver.cuStreamWaitEvent(stream, event, 0), "cuStreamWaitEvent")
        destroy_event(event)

    def _capsule(self, versioned: bool) -> Any:
        managed = DLManagedTensorVersioned() if versioned else DLManagedTensor()
        if isinstance(managed, DLManagedTensorVersioned):
            managed.major, managed.minor = 1, 0
        ndim = len(self.shape)
        sizes = (ctypes.c_int64 * max(ndim, 1))(*self.shape)
        steps = (ctypes.c_int64 * max(ndim, 1))(*(prod(self.shape[axis + 1 :]) for axis in range(ndim)))
        tensor = managed.tensor
        tensor.data = self.pointer or None
        tensor.device_type, tensor.device_id = CUDA, self.device_index
        tensor.ndim = ndim
        tensor.dtype_code, tensor.dtype_bits = _CODES[self.dtype], 8 * self._entry.itemsize_bytes
        tensor.dtype_lanes = 1
        tensor.shape = ctypes.cast(sizes, ctypes.POINTER(ctypes.c_int64))
        tensor.strides = ctypes.cast(steps, ctypes.POINTER(ctypes.c_int64))
        managed.deleter = ctypes.cast(_delete, ctypes.c_void_p).value
        address = ctypes.addressof(managed)
        _lent[address] = (managed, sizes, steps, self._memory)
        name = b"dltensor_versioned" if versioned else b"dltensor"
        return _new_capsule(address, name, ctypes.cast(_destroy_capsule, ctypes.c_void_p))


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
