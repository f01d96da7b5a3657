"""Arrays of a test on the GPU, by torch: with the strides of the NumPy ones, and back."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import trainkernel as tk
from trainkernel.ir import Program

T = TypeVar("T")
R = TypeVar("R")


def torch_module() -> Any:
    """torch, or the test is skipped."""
    return pytest.importorskip("torch", reason="the arrays are torch's")


def to_device(value: Any) -> Any:
    """A torch tensor of the array's shape, dtype and strides; numbers stay as they are."""
    if not isinstance(value, np.ndarray):
        return value
    torch = torch_module()
    strides = [stride // value.itemsize for stride in value.strides]
    last = sum((size - 1) * stride for size, stride in zip(value.shape, strides, strict=True)) if value.size else -1
    flat = np.zeros(last + 1, value.dtype)
    if value.size:
        np.lib.stride_tricks.as_strided(flat, value.shape, value.strides)[...] = value
    raw = flat.view(np.int16) if value.dtype == ml_dtypes.bfloat16 else flat
    tensor = torch.from_numpy(raw).cuda()
    if value.dtype == ml_dtypes.bfloat16:
        tensor = tensor.view(torch.bfloat16)
    return tensor.as_strided(value.shape, strides) if value.size else tensor.reshape(value.shape)


def to_host(tensor: Any) -> NDArray[Any]:
    """The NumPy array of a torch tensor."""
    torch = torch_module()
    if not isinstance(tensor, torch.Tensor):
        tensor = torch.from_dlpack(tensor)  # the runtime's own, of a program without inputs
    if tensor.dtype == torch.bfloat16:
        array: NDArray[Any] = tensor.contiguous().view(torch.int16).cpu().numpy().view(ml_dtypes.bfloat16)
        return array.reshape(tuple(tensor.shape))
    result: NDArray[Any] = tensor.cpu().numpy()
    return result


def launch(kernel: Any, inputs: Sequence[Any]) -> list[NDArray[Any]]:
    """Run a kernel on device copies of the inputs; what is not in place must be unchanged."""
    tensors = [to_device(value) for value in inputs]
    outputs = [to_host(output) for output in kernel(*tensors)]
    donated = set(kernel.stats.inplace_outputs.values())
    for index, (value, tensor) in enumerate(zip(inputs, tensors, strict=True)):
        if isinstance(value, np.ndarray) and index not in donated:
            assert to_host(tensor).tobytes() == np.ascontiguousarray(value).tobytes(), f"input {index} was changed"
    return outputs


def compile_program(job: tuple[Program, dict[str, Any]]) -> Any:
    """The kernel of a program with its options, whose barriers do not wait for ever."""
    program, options = job
    return tk.compile(program, device="cuda", barrier_timeout_ms=2000, **options)


def in_threads(function: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """``function`` of each item, in parallel threads: NVRTC runs outside Python's lock."""
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        return list(pool.map(function, items))
