"""Arrays of a kernel's own to run it on: for measuring, where the values do not matter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainkernel.dtypes import DTYPES
from trainkernel.ir import Program, ScalarSpec, TensorSpec
from trainkernel.ops.domains import domain_of_dtype
from trainkernel.runtime.device_array import DeviceArray, device_put
from trainkernel.runtime.dlpack import ArrayView

SEED = 0


def sample_inputs(
    program: Program, steps: Mapping[int, int], low: float = -1.0, high: float = 1.0, scalar: float = 1.0
) -> list[Any]:
    """Flat host arrays and scalars to run a program on.

    Floats are random between ``low`` and ``high``; integers, which may be indices, and bools are zeros. A tensor's
    array has as many elements as lie between the first and the last of its spec. A scalar is the number of steps
    if it is a loop's length, else ``scalar``, or 1 if it is an integer.
    """
    generator = np.random.default_rng(SEED)
    values: list[Any] = []
    for index, spec in enumerate(program.inputs):
        if isinstance(spec, ScalarSpec):
            values.append(steps.get(index, 1 if spec.dtype == "int32" else scalar))
            continue
        span = max(spec.last_index + 1 - spec.offset, 0)
        dtype = DTYPES[spec.dtype].numpy
        if spec.dtype != "bool" and domain_of_dtype(spec.dtype).startswith("float"):
            values.append(generator.uniform(low, high, span).astype(np.float32).astype(dtype))
        else:
            values.append(np.zeros(span, dtype))
    return values


@dataclass(frozen=True)
class _View:
    """A view, with a spec's shape and strides, of a flat array in device memory."""

    array: DeviceArray
    spec: TensorSpec

    def array_view(self, stream: int | None) -> ArrayView:
        return self.array.array_view(stream)._replace(owner=self, shape=self.spec.shape, strides=self.spec.strides)


def bind_samples(kernel: Any, steps: Mapping[int, int], **ranges: float) -> Any:
    """A kernel on a GPU, bound to arrays of its own (``sample_inputs``), also those updated in place."""
    index = int(kernel.device.removeprefix("cuda:"))
    program, inplace = kernel.program, kernel.stats.inplace_outputs
    inputs = [
        _View(device_put(value, index), spec) if isinstance(spec, TensorSpec) else value
        for spec, value in zip(program.inputs, sample_inputs(program, steps, **ranges), strict=True)
    ]
    outputs = [
        None if position in inplace else DeviceArray(spec.shape, spec.dtype, index)
        for position, spec in enumerate(program.outputs)
    ]
    return kernel.bind(inputs, outputs)
