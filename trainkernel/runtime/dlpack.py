"""Arrays of any framework seen as pointer, shape and strides.

``view`` reads NumPy, torch and CuPy arrays through their own attributes (exact, cheap, and free
of the limits of their DLPack exports: NumPy cannot export bfloat16, torch refuses a tensor of
another device than the current one), JAX arrays and all others through DLPack. Nothing here
imports a framework: an array can only be of one that the caller has imported.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from math import prod
from typing import Any, NamedTuple

import numpy as np

from trainkernel.dtypes import DTYPES
from trainkernel.errors import ArgumentError

# DLPack's DLDeviceType and DLDataTypeCode (dlpack.h, version 1.1).
CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13
_DEVICE_NAMES = {CPU: "cpu", CUDA_HOST: "cpu", CUDA: "cuda", CUDA_MANAGED: "cuda"}
_CODE_NAMES = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex"}
_BOOL_CODE = 6
READ_ONLY_FLAG = 1


class ArrayView(NamedTuple):
    """An array that someone lends. A tuple, since a call makes one for each of its arrays.

    Attributes
    ----------
    pointer : int
        Address of the first element; may be anything if there are no elements.
    shape, strides : tuple of int
        Strides in elements.
    dtype : str
        NumPy's name of the dtype; one that is not in the dtype table may be any text.
    itemsize_bytes : int
    device : tuple of str and int
        ``("cpu", 0)`` or ``("cuda", index)``.
    readonly : bool
        The owner does not allow writes. JAX arrays always are.
    framework : str
        ``"numpy"``, ``"torch"``, ``"cupy"``, ``"jax"`` or ``"other"``.
    owner : object
        Keeps the memory alive while it is referenced.
    managed : bool
        Managed memory, which every device can reach.
    pinned : bool
        Page-locked host memory; it counts as host memory.
    requires_grad : bool
        A torch tensor that autograd watches.
    """

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    itemsize_bytes: int
    device: tuple[str, int]
    readonly: bool
    framework: str
    owner: Any
    managed: bool = False
    pinned: bool = False
    requires_grad: bool = False

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    @property
    def end(self) -> int:
        """Address after the last byte touched; ``pointer`` if there are no elements."""
        if 0 in self.shape:
            return self.pointer
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        return self.pointer + (last + 1) * self.itemsize_bytes

    def __repr__(self) -> str:  # not the owner, whose text may be long, or may wait for a device
        return f"ArrayView({self} at {self.pointer:#x})"

    def __str__(self) -> str:
        where = self.device[0] if self.device[0] == "cpu" else f"cuda:{self.device[1]}"
        dims = ",".join(str(size) for size in self.shape)
        return f"{self.framework} {self.dtype}[{dims}] on {where}"


# The framework of each type of array seen; a type is of one framework for ever.
_frameworks: dict[type, str] = {np.ndarray: "numpy"}


def framework_of(obj: Any) -> str:
    """The framework of an array: ``"other"`` if it is none of those known."""
    known = _frameworks.get(type(obj))
    if known is not None:
        return known
    if isinstance(obj, np.ndarray):
        return "numpy"
    for name, type_name in (("torch", "Tensor"), ("cupy", "ndarray"), ("jax", "Array")):
        module = sys.modules.get(name)
        array_type = getattr(module, type_name, None) if module is not None else None
        if array_type is not None and isinstance(obj, array_type):
            _frameworks[type(obj)] = name
            return name
    return "other"


def view(obj: Any, *, stream: int | None = None) -> ArrayView:
    """See an array without copying it.

    Parameters
    ----------
    obj : array
        NumPy, torch, CuPy or JAX array, or any object with ``__dlpack__``.
    stream : int, optional
        Handle of the stream that the array will be used on, told to owners that can order it
        after their own work. None: the legacy default stream.

    Raises
    ------
    ArgumentError
        If the object is no array, or one whose memory cannot be lent.
    """
    framework = framework_of(obj)
    if framework == "numpy":
        return _view_numpy(obj)
    own = getattr(type(obj), "array_view", None)  # a DeviceArray, which needs no capsule
    if framework == "other" and own is not None:
        seen: ArrayView = own(obj, stream)
        return seen
    if framework == "torch":
        return _view_torch(obj)
    if framework == "cupy":
        return _view_cupy(obj)
    if framework == "jax":
        return _view_jax(obj)
    if isinstance(obj, np.generic):
        raise ArgumentError(f"got the NumPy scalar {obj!r}, needs an array; numpy.asarray(...) makes a 0-d one")
    if hasattr(obj, "__dlpack__") and hasattr(obj, "__dlpack_device__"):
        return _view_dlpack(obj, "other", stream)
    raise ArgumentError(f"got {type(obj).__name__}, needs a NumPy, torch, CuPy or JAX array, or one with __dlpack__")


def _element_strides(shape: tuple[int, ...], strides_bytes: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    for size, stride in zip(shape, strides_bytes, strict=True):
        if stride % itemsize and size > 1:
            raise ArgumentError(f"got a stride of {stride} bytes, needs a multiple of the element's {itemsize}")
    return tuple(stride // itemsize for stride in strides_bytes)


def _numpy_dtype_name(dtype: np.dtype[Any]) -> str:
    return dtype.name if dtype.isnative else f"byte-swapped {dtype.name}"


def _view_numpy(array: np.ndarray[Any, Any]) -> ArrayView:
    if isinstance(array, np.ma.MaskedArray):
        raise ArgumentError("got a masked array, whose mask the kernel would ignore; pass .data or .filled(value)")
    if array.dtype.hasobject or array.dtype.itemsize == 0:
        raise ArgumentError(f"got a NumPy array of dtype {array.dtype}, needs one of {', '.join(DTYPES)}")
    itemsize = array.dtype.itemsize
    return ArrayView(
        pointer=int(array.ctypes.data),
        shape=array.shape,
        strides=_element_strides(array.shape, array.strides, itemsize),
        dtype=_numpy_dtype_name(array.dtype),
        itemsize_bytes=itemsize,
        device=("cpu", 0),
        readonly=not array.flags.writeable,
        framework="numpy",
        owner=array,
    )


@cache
def _torch_device(device: Any) -> tuple[str, int] | None:
    """A torch device as in ``ArrayView``; None if it is neither the CPU nor a CUDA device."""
    if device.type == "cpu":
        return "cpu", 0
    return ("cuda", device.index) if device.type == "cuda" else None


@cache
def _torch_dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _view_torch(tensor: Any) -> ArrayView:
    torch = sys.modules["torch"]
    device = _torch_device(tensor.device)
    if device is None:
        raise ArgumentError(f"got a torch tensor on {tensor.device}, needs one on the CPU or a CUDA device")
    if tensor.layout != torch.strided:
        raise ArgumentError(f"got a torch tensor of layout {tensor.layout}, needs a strided one")
    if tensor.is_conj() or tensor.is_neg():
        raise ArgumentError("got a torch tensor with a pending conjugate or negation; .resolve_neg() makes it plain")
    try:
        pointer = tensor.data_ptr()
    except RuntimeError as error:  # a fake or functional tensor, met while torch traces
        raise ArgumentError(f"got a torch {type(tensor).__name__} without memory ({error})") from error
    return ArrayView(
        pointer=pointer,
        shape=tensor.shape,  # a tuple
        strides=tensor.stride(),
        dtype=_torch_dtype_name(tensor.dtype),
        itemsize_bytes=tensor.element_size(),
        device=device,
        readonly=False,
        framework="torch",
        owner=tensor,
        requires_grad=tensor.requires_grad,
    )


def _view_cupy(array: Any) -> ArrayView:
    itemsize = array.dtype.itemsize
    return ArrayView(
        pointer=array.data.ptr,
        shape=tuple(array.shape),
        strides=_element_strides(tuple(array.shape), tuple(array.strides), itemsize),
        dtype=_numpy_dtype_name(array.dtype),
        itemsize_bytes=itemsize,
        device=("cuda", int(array.device.id)),
        readonly=False,
        framework="cupy",
        owner=array,
    )


def _view_jax(array: Any) -> ArrayView:
    core = getattr(sys.modules["jax"], "core", None)
    if isinstance(array, getattr(core, "Tracer", ())):
        raise ArgumentError("got a JAX tracer, which has no memory: call the kernel outside jax.jit, grad and vmap")
    array.block_until_ready()  # so that no stream has to wait for JAX's own, which it does not show
    return _view_dlpack(array, "jax", None)


def _view_dlpack(obj: Any, framework: str, stream: int | None) -> ArrayView:
    try:
        capsule = _export(obj, framework, stream)
    except ArgumentError:
        raise
    except Exception as error:  # someone else's code: it may raise anything
        reason = str(error) or type(error).__name__
        raise ArgumentError(f"got an array of type {type(obj).__name__} that cannot be lent: {reason}") from error
    return view_capsule(capsule, framework, obj)


def _export(obj: Any, framework: str, stream: int | None) -> Any:
    # The device decides what may be asked: on the CPU a stream must not be given.
    device_type, _ = obj.__dlpack_device__()
    if int(device_type) not in _DEVICE_NAMES:
        raise ArgumentError(f"got an array on DLPack device type {int(device_type)}, needs the CPU or a CUDA device")
    arguments: dict[str, Any] = {"max_version": (1, 1)}
    if framework == "other" and _DEVICE_NAMES[int(device_type)] == "cuda":
        arguments["stream"] = stream or 1
    try:
        return obj.__dlpack__(**arguments)
    except TypeError:  # an owner older than max_version
        del arguments["max_version"]
        return obj.__dlpack__(**arguments)


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("dtype_code", ctypes.c_uint8),
        ("dtype_bits", ctypes.c_uint8),
        ("dtype_lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class DLManagedTensor(ctypes.Structure):
    """DLPack's struct before version 1."""

    _fields_ = [("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class DLManagedTensorVersioned(ctypes.Structure):
    """DLPack's struct from version 1 on."""

    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _DLTensor),
    ]


# Prototypes of our own: setting argtypes on ctypes.pythonapi would change it for the whole process.
_capsule_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)
_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def view_capsule(capsule: Any, framework: str, exporter: Any) -> ArrayView:
    """Read a DLPack capsule.

    The capsule is not consumed: the view's ``owner`` holds it, and its own destructor calls the
    deleter, once, when the view goes.

    Raises
    ------
    ArgumentError
        For a used or foreign capsule, a newer major version, or an element type of several lanes.
    """
    readonly = framework == "jax"
    # The name says what the capsule is, whatever version was asked for.
    if _capsule_is_valid(capsule, b"dltensor_versioned"):
        versioned = DLManagedTensorVersioned.from_address(_capsule_pointer(capsule, b"dltensor_versioned"))
        if versioned.major != 1:
            raise ArgumentError(f"got a DLPack capsule of version {versioned.major}.{versioned.minor}, needs 1.x")
        readonly = readonly or bool(versioned.flags & READ_ONLY_FLAG)
        tensor = versioned.tensor
    elif _capsule_is_valid(capsule, b"dltensor"):
        tensor = DLManagedTensor.from_address(_capsule_pointer(capsule, b"dltensor")).tensor
    else:
        raise ArgumentError(
            f"got {capsule!r} from {type(exporter).__name__}.__dlpack__, needs an unused DLPack capsule"
        )
    if tensor.dtype_lanes != 1 or tensor.dtype_bits % 8:
        raise ArgumentError(
            f"got elements of {tensor.dtype_bits} bits in {tensor.dtype_lanes} lanes, needs whole bytes in one lane"
        )
    device_name = _DEVICE_NAMES.get(tensor.device_type)
    if device_name is None:
        raise ArgumentError(f"got an array on DLPack device type {tensor.device_type}, needs the CPU or a CUDA device")
    if tensor.ndim < 0 or (tensor.ndim > 0 and not tensor.shape):
        raise ArgumentError(f"got a DLPack array of {tensor.ndim} dimensions without a shape")
    shape = tuple(tensor.shape[axis] for axis in range(tensor.ndim))
    if tensor.strides:
        strides = tuple(tensor.strides[axis] for axis in range(tensor.ndim))
    else:  # compact row-major, said by a null pointer
        strides = tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))
    return ArrayView(
        pointer=(tensor.data or 0) + tensor.byte_offset,
        shape=shape,
        strides=strides,
        dtype=_dlpack_dtype_name(tensor.dtype_code, tensor.dtype_bits),
        itemsize_bytes=tensor.dtype_bits // 8,
        device=(device_name, 0 if device_name == "cpu" else tensor.device_id),
        readonly=readonly,
        framework=framework,
        owner=(capsule, exporter),
        managed=tensor.device_type == CUDA_MANAGED,
        pinned=tensor.device_type == CUDA_HOST,
    )


def _dlpack_dtype_name(code: int, bits: int) -> str:
    if code == _BOOL_CODE:
        return "bool" if bits == 8 else f"bool{bits}"
    name = _CODE_NAMES.get(code)
    return f"DLPack type {code} of {bits} bits" if name is None else f"{name}{bits}"


def as_numpy(array: ArrayView) -> np.ndarray[Any, Any]:
    """A NumPy array over a host view's memory; it keeps the owner alive.

    Raises
    ------
    ArgumentError
        If the memory is not the host's or the dtype is not in the dtype table.
    """
    if isinstance(array.owner, np.ndarray):
        return array.owner
    if array.device[0] != "cpu":
        raise ArgumentError(f"got {array}, needs an array in host memory")
    entry = DTYPES.get(array.dtype)
    if entry is None:
        raise ArgumentError(f"got dtype {array.dtype}, needs one of {', '.join(DTYPES)}")
    if array.num_elements == 0:
        return np.empty(array.shape, entry.numpy)
    memory = (ctypes.c_char * (array.end - array.pointer)).from_address(array.pointer)
    memory._owner = array.owner  # type: ignore[attr-defined]  # the buffer outlives every array over it
    strides = tuple(stride * array.itemsize_bytes for stride in array.strides)
    result: np.ndarray[Any, Any] = np.ndarray(array.shape, entry.numpy, memoryview(memory), 0, strides)
    result.flags.writeable = not array.readonly
    return result
