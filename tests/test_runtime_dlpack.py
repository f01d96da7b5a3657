"""Arrays as pointer, shape and strides, and scalars by value."""

from __future__ import annotations

import ctypes
import gc
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from trainkernel.dtypes import DTYPES
from trainkernel.errors import ArgumentError
from trainkernel.runtime import dlpack
from trainkernel.runtime.device_array import _CODES
from trainkernel.runtime.dlpack import ArrayView, as_numpy, framework_of, view, view_capsule
from trainkernel.runtime.scalars import ScalarField
from trainkernel.runtime.streams import LEGACY_STREAM, current_stream_getter, stream_handle


class Wrapped:
    """An array of no known framework: NumPy's memory behind DLPack alone."""

    def __init__(self, array: np.ndarray[Any, Any], old: bool = False) -> None:
        self.array = array
        self.old = old

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    def __dlpack__(self, **arguments: Any) -> Any:
        if self.old and arguments:
            raise TypeError("unexpected keyword argument 'max_version'")
        return self.array.__dlpack__(**arguments)


@pytest.mark.parametrize("dtype", [name for name in DTYPES if name != "bfloat16"])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (2, 0, 3), (2, 1, 4)])
def test_numpy_and_dlpack_agree(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.zeros(shape, dtype)
    direct = view(array)
    assert direct.dtype == dtype
    assert direct.shape == shape
    assert direct.device == ("cpu", 0)
    assert direct.framework == "numpy"
    for old in (False, True):
        lent = view(Wrapped(array, old))
        assert lent.framework == "other"
        assert (lent.dtype, lent.shape, lent.itemsize_bytes) == (direct.dtype, direct.shape, direct.itemsize_bytes)
        if array.size:
            assert (lent.pointer, lent.strides, lent.end) == (direct.pointer, direct.strides, direct.end)


def test_views_and_offsets() -> None:
    base = np.arange(24, dtype=np.float32).reshape(4, 6)
    array = base[1:, ::2].T
    for lent in (view(array), view(Wrapped(array))):
        assert lent.pointer == base.ctypes.data + 24
        assert lent.shape == (3, 3)
        assert lent.strides == (2, 6)
        assert lent.end == base.ctypes.data + 4 * (6 + 4 + 12 + 1)
        assert np.array_equal(as_numpy(lent), array)


def test_bfloat16() -> None:
    array = np.arange(4, dtype=ml_dtypes.bfloat16)
    lent = view(array)
    assert lent.dtype == "bfloat16"
    assert as_numpy(lent) is array


def test_read_only() -> None:
    array = np.zeros(3, np.float32)
    array.flags.writeable = False
    assert view(array).readonly
    lent = view(Wrapped(array))
    assert lent.readonly
    assert not as_numpy(lent).flags.writeable
    with pytest.raises(ArgumentError, match="cannot be lent"):
        view(Wrapped(array, old=True))  # NumPy does not lend it where read-only cannot be said


def test_memory_outlives_the_exporter() -> None:
    lent = view(Wrapped(np.arange(1000, dtype=np.float32)))
    array = as_numpy(lent)
    del lent
    gc.collect()
    np.zeros(1000, np.float32)
    assert array[999] == 999


@pytest.mark.parametrize("value", [1.0, [1.0], None, "text", object()])
def test_what_is_no_array(value: object) -> None:
    with pytest.raises(ArgumentError, match="needs a NumPy, torch, CuPy or JAX array"):
        view(value)


def test_numpy_scalar_and_object_arrays() -> None:
    with pytest.raises(ArgumentError, match="NumPy scalar"):
        view(np.float32(1.0))
    with pytest.raises(ArgumentError, match="dtype object"):
        view(np.array([None]))
    assert view(np.zeros(2, ">f4")).dtype == "byte-swapped float32"
    record = np.zeros(4, np.dtype([("a", np.int8), ("b", np.float32)]))
    with pytest.raises(ArgumentError, match="stride of 5 bytes"):
        view(record["b"])


def make_capsule(name: bytes, *, major: int = 1, flags: int = 0, **fields: Any) -> tuple[Any, Any]:
    """A capsule over 6 floats with the given fields, and what must be kept."""
    data = (ctypes.c_float * 6)(*range(6))
    shape = (ctypes.c_int64 * 2)(2, 2)
    managed: Any = dlpack.DLManagedTensorVersioned() if name == b"dltensor_versioned" else dlpack.DLManagedTensor()
    if name == b"dltensor_versioned":
        managed.major, managed.flags = major, flags
    tensor = managed.tensor
    tensor.data, tensor.device_type, tensor.ndim = ctypes.addressof(data), 1, 2
    tensor.dtype_code, tensor.dtype_bits, tensor.dtype_lanes = 2, 32, 1
    tensor.shape = ctypes.cast(shape, ctypes.POINTER(ctypes.c_int64))
    for key, value in fields.items():
        setattr(tensor, key, value)
    make = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
        ("PyCapsule_New", ctypes.pythonapi)
    )
    return make(ctypes.addressof(managed), name, None), (data, shape, managed, name)


@pytest.mark.parametrize("name", [b"dltensor", b"dltensor_versioned"])
def test_null_strides_and_byte_offset(name: bytes) -> None:
    capsule, keep = make_capsule(name, byte_offset=8)
    lent = view_capsule(capsule, "other", None)
    assert lent.strides == (2, 1)
    assert lent.pointer == ctypes.addressof(keep[0]) + 8
    assert as_numpy(lent).tolist() == [[2, 3], [4, 5]]


def test_capsule_name_decides_not_the_request() -> None:
    capsule, _keep = make_capsule(b"dltensor_versioned", flags=1)
    assert view_capsule(capsule, "other", None).readonly
    capsule, _keep = make_capsule(b"used_dltensor")
    with pytest.raises(ArgumentError, match="needs an unused DLPack capsule"):
        view_capsule(capsule, "other", None)
    capsule, _keep = make_capsule(b"dltensor_versioned", major=2)
    with pytest.raises(ArgumentError, match=r"needs 1\.x"):
        view_capsule(capsule, "other", None)


class Hostile:
    """An exporter with whatever answers; exceptions are raised."""

    def __init__(self, device: Any = (1, 0), capsule: Any = None) -> None:
        self.device, self.capsule = device, capsule

    def __dlpack_device__(self) -> Any:
        if isinstance(self.device, Exception):
            raise self.device
        return self.device

    def __dlpack__(self, **_: Any) -> Any:
        if isinstance(self.capsule, Exception):
            raise self.capsule
        return self.capsule


@pytest.mark.parametrize("device", [None, "cpu", (1, 0, 0), ("cpu", 0), (1 << 70, 0), KeyError("device")])
@pytest.mark.parametrize("capsule", [None, 5, TypeError("no"), KeyError("lost"), OSError(5, "io"), MemoryError()])
def test_hostile_exporters(device: Any, capsule: Any) -> None:
    for exporter in (Hostile(device), Hostile(capsule=capsule)):
        with pytest.raises(ArgumentError, match=r"Hostile|device type"):
            view(exporter)


@pytest.mark.parametrize("fields", [{"ndim": -1}, {"shape": None}, {"dtype_bits": 0, "dtype_lanes": 0}])
def test_hostile_capsules(fields: dict[str, Any]) -> None:
    capsule, _keep = make_capsule(b"dltensor", **fields)
    with pytest.raises(ArgumentError, match="got"):
        view_capsule(capsule, "other", None)


def test_masked_arrays_are_refused() -> None:
    with pytest.raises(ArgumentError, match="masked array, whose mask the kernel would ignore"):
        view(np.ma.masked_array(np.zeros(2, np.float32), [True, False]))


def test_element_types() -> None:
    cases = [((4, 16), "bfloat16"), ((6, 8), "bool"), ((1, 8), "uint8"), ((10, 8), "DLPack type 10 of 8 bits")]
    for (code, bits), name in cases:
        capsule, _keep = make_capsule(b"dltensor", dtype_code=code, dtype_bits=bits)
        assert view_capsule(capsule, "other", None).dtype == name
    for bits, lanes in ((32, 4), (4, 1)):
        capsule, _keep = make_capsule(b"dltensor", dtype_bits=bits, dtype_lanes=lanes)
        with pytest.raises(ArgumentError, match="whole bytes in one lane"):
            view_capsule(capsule, "other", None)


def test_devices() -> None:
    found = {}
    for device_type in (2, 3, 13):
        capsule, _keep = make_capsule(b"dltensor", device_type=device_type, device_id=1)
        lent = view_capsule(capsule, "other", None)
        found[device_type] = (lent.device, lent.managed, lent.pinned)
    assert found == {2: (("cuda", 1), False, False), 3: (("cpu", 0), False, True), 13: (("cuda", 1), True, False)}

    class Elsewhere(Wrapped):
        def __dlpack_device__(self) -> tuple[int, int]:
            return (10, 0)

    with pytest.raises(ArgumentError, match="DLPack device type 10"):
        view(Elsewhere(np.zeros(1)))


def test_cuda_exporter_is_told_the_stream() -> None:
    told = []

    class OnGpu:
        def __dlpack_device__(self) -> tuple[int, int]:
            return (2, 0)

        def __dlpack__(self, *, stream: int | None = None, max_version: tuple[int, int] | None = None) -> Any:
            told.append((stream, max_version))
            capsule, self.keep = make_capsule(b"dltensor", device_type=2)
            return capsule

    assert view(OnGpu(), stream=7).device == ("cuda", 0)
    view(OnGpu())
    assert told == [(7, (1, 1)), (1, (1, 1))]


def test_frameworks_are_not_imported() -> None:
    assert framework_of(np.zeros(1)) == "numpy"
    assert framework_of(1.0) == "other"
    assert current_stream_getter("numpy", 0) is None


def test_view_prints() -> None:
    array = ArrayView(0, (2, 3), (3, 1), "float32", 4, ("cuda", 1), False, "torch", None)
    assert str(array) == "torch float32[2,3] on cuda:1"
    assert repr(array) == "ArrayView(torch float32[2,3] on cuda:1 at 0x0)"  # the owner is not printed


# Scalars by value.


@pytest.mark.parametrize(
    ("dtype", "value", "want"),
    [
        ("float32", 0.5, 0.5),
        ("float32", 3, 3.0),
        ("float32", np.float64(0.25), 0.25),
        ("float32", np.array(2.0), 2.0),
        ("float32", float("inf"), float("inf")),
        ("float32", ml_dtypes.bfloat16(1.5), 1.5),
        ("float32", 0.1, float(np.float32(0.1))),
        ("float32", 3.4028235677973362e38, float(np.finfo(np.float32).max)),  # just below the rounding to infinity
        ("bfloat16", 0.1, float(ml_dtypes.bfloat16(0.1))),
        ("int32", 5, 5),
        ("int32", np.int64(-3), -3),
        ("int32", -(2**31), -(2**31)),
        ("bool", True, 1),
        ("bool", np.bool_(False), 0),
    ],
)
def test_scalars(dtype: str, value: Any, want: float) -> None:
    field = ScalarField(0, "s", dtype)
    assert field.check(value) == want
    assert len(field.pack(value)) == 4


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        ("float32", 1e39),
        ("float32", -3.4028235677973366e38),
        ("float32", 10**400),
        ("float32", True),
        ("float32", "1"),
        ("float32", np.zeros(1)),
        ("float32", None),
        ("float16", 70000.0),
        ("int32", 2**31),
        ("int32", 1.0),
        ("int32", True),
        ("int32", np.timedelta64(5, "ns")),
        ("float32", np.complex64(1)),
        ("float32", np.timedelta64(5, "ns")),
        ("bool", 1),
    ],
)
def test_scalars_refused(dtype: str, value: Any) -> None:
    with pytest.raises(ArgumentError, match="input 3 'lr'"):
        ScalarField(3, "lr", dtype).check(value)


@pytest.mark.parametrize("dtype", ["float32", "int32", "bool"])
def test_integers_that_python_does_not_print(dtype: str) -> None:
    with pytest.raises(ArgumentError, match=r"got an integer of 16,610 bits"):
        ScalarField(3, "lr", dtype).check(10**5000)


def test_scalar_bounds() -> None:
    field = ScalarField(1, "length", "int32", minimum=0, maximum=10)
    assert field.check(10) == 10
    for value in (-1, 11):
        with pytest.raises(ArgumentError, match="from 0 to 10"):
            field.check(value)


# Streams.


def test_stream_handles() -> None:
    class Protocol:
        def __cuda_stream__(self) -> tuple[int, int]:
            return (0, 77)

    class Torch:
        cuda_stream = 0

    class Cupy:
        ptr = 99

    assert [stream_handle(item) for item in (None, 0, 1, 5, Protocol(), Torch(), Cupy())] == [
        LEGACY_STREAM,
        LEGACY_STREAM,
        1,
        5,
        77,
        LEGACY_STREAM,
        99,
    ]

    class Answers:
        def __init__(self, answer: Any) -> None:
            self.__cuda_stream__ = answer

    answers = [Answers(answer) for answer in (None, 5, (0,), (0, "x"), (1, 77), (0, -1), (0, 1 << 64), lambda: 1 / 0)]
    for wrong in ("stream", -1, 1 << 64, True, object(), *answers[1:]):
        with pytest.raises(ArgumentError, match="stream"):
            stream_handle(wrong)


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_lent_dtypes(dtype: str) -> None:
    """What a DeviceArray would say of its dtype is what view reads."""
    code, bits = _CODES[dtype]
    assert bits == 8 * DTYPES[dtype].itemsize_bytes
    capsule, _keep = make_capsule(b"dltensor", dtype_code=code, dtype_bits=bits)
    assert view_capsule(capsule, "other", None).dtype == dtype
