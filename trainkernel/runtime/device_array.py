"""Arrays in device memory of our own: what a user without a framework computes with on a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from math import prod
from typing import Any

import numpy as np

from trainkernel.dtypes import DTYPES, DType, name_of_numpy
from trainkernel.errors import ArgumentError
from trainkernel.runtime.dlpack import CUDA, ArrayView, DLManagedTensor, DLManagedTensorVersioned
from trainkernel.runtime.driver import check, using_device
from trainkernel.runtime.memory import DeviceMemory, destroy_event, record_event
from trainkernel.runtime.streams import LEGACY_STREAM

_CODES = {
    "float32": (2, 32),
    "float16": (2, 16),
    "bfloat16": (4, 16),
    "bool": (6, 8),
    "float64": (2, 64),
    "int32": (0, 32),
    "int64": (0, 64),
    "uint32": (1, 32),
    "uint8": (1, 8),
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

    ``numpy.asarray(x)`` waits for the work that writes it and copies it to the host; ``x[i]`` and
    ``float(x)`` read it by way of that. Kernels take it as an argument, in place too.

    Attributes
    ----------
    shape : tuple of int
    dtype : numpy.dtype
    device_index : int
    pointer : int
    """

    def __init__(self, shape: tuple[int, ...], dtype: str, device_index: int) -> None:
        self.shape = tuple(shape)
        self.device_index = device_index
        self._entry: DType = DTYPES[dtype]
        self.dtype = self._entry.numpy
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
        return f"DeviceArray({self._entry.name}[{dims}] on cuda:{self.device_index})"

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self._entry.itemsize_bytes

    # ------------------------------------------------------------------ to and from the host

    def write(self, values: np.ndarray[Any, Any]) -> None:
        """Copy a host array of the same shape and dtype here, and wait until that is done."""
        if values.shape != self.shape or values.dtype != self.dtype:
            raise ArgumentError(f"{self!r} cannot hold {values.dtype}{list(values.shape)}")
        if self.size:
            self._wait()
            self._memory.write(np.ascontiguousarray(values).tobytes())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        if copy is False:
            raise ValueError("an array on a device cannot be seen by NumPy without a copy")
        self._wait()
        data = self._memory.read(self.nbytes) if self.size else b""
        values = np.frombuffer(bytearray(data), dtype=self.dtype).reshape(self.shape)
        return values if dtype is None else values.astype(dtype)

    def item(self) -> Any:
        """The one element as a Python number."""
        return np.asarray(self).item()

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __bool__(self) -> bool:
        return bool(self.item())

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a 0-d array has no length")
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        return np.asarray(self)[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(np.asarray(self))

    # ------------------------------------------------------------------ to kernels and frameworks

    def array_view(self, stream: int | None) -> ArrayView:
        """What a launch on a stream sees of it; the stream waits for the work that writes it."""
        self._order(LEGACY_STREAM if stream is None else stream)
        strides = tuple(prod(self.shape[axis + 1 :]) for axis in range(self.ndim))
        return ArrayView(
            framework="other",
            owner=self,
            device=("cuda", self.device_index),
            pointer=self.pointer,
            shape=self.shape,
            strides=strides,
            dtype=self._entry.name,
            itemsize_bytes=self._entry.itemsize_bytes,
            readonly=False,
        )

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
        tensor.dtype_code, tensor.dtype_bits = _CODES[self._entry.name]
        tensor.dtype_lanes = 1
        tensor.shape = ctypes.cast(sizes, ctypes.POINTER(ctypes.c_int64))
        tensor.strides = ctypes.cast(steps, ctypes.POINTER(ctypes.c_int64))
        managed.deleter = ctypes.cast(_delete, ctypes.c_void_p).value
        address = ctypes.addressof(managed)
        _lent[address] = (managed, sizes, steps, self._memory)
        name = b"dltensor_versioned" if versioned else b"dltensor"
        return _new_capsule(address, name, ctypes.cast(_destroy_capsule, ctypes.c_void_p))


def device_put(array: Any, device_index: int) -> DeviceArray:
    """A copy of a host array in the memory of a GPU.

    Raises
    ------
    ArgumentError
        If its dtype is not of the table.
    """
    values = np.asarray(array)
    name = name_of_numpy(values.dtype)
    if name is None:
        raise ArgumentError(f"arrays of dtype {values.dtype} are not supported; known: {', '.join(DTYPES)}")
    result = DeviceArray(values.shape, name, device_index)
    result.write(values)
    return result
