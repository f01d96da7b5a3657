"""Time stamps inside a kernel: block 0 writes the device's clock at the start, after each barrier, at the end.

They stand in the free words of the workspace's header, and are put into the emitted source before
it is compiled.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import trainkernel.kernel
from trainkernel.runtime.build import build_cubin

_HEADER_BYTES = 256
_FIRST_SLOT = 8
_MAX_STAMPS = _HEADER_BYTES // 8 - _FIRST_SLOT
_STAMP = "if (blockIdx.x == 0 && threadIdx.x == 0) ((unsigned long long*)p.workspace)[{}] = tk_globaltimer_ns();"


@contextmanager
def stamped_kernels() -> Iterator[None]:
    """Kernels that are compiled inside have stamps."""

    def build(source: str, arch: str) -> bytes:
        return build_cubin(stamped(source), arch)

    module: Any = trainkernel.kernel
    module.build_cubin = build
    try:
        yield
    finally:
        module.build_cubin = build_cubin


def stamped(source: str) -> str:
    """The source with stamps.

    Raises
    ------
    ValueError
        If there are more barriers than free words.
    """
    count = 1

    def after_barrier(match: re.Match[str]) -> str:
        nonlocal count
        count += 1
        return f"{match.group(0)}\n{match.group(1)}{_STAMP.format(_FIRST_SLOT + count - 1)}"

    head = "TkBarrier barrier = tk_barrier_init(p.workspace, p.barrier_timeout_ns);"
    body_start = source.index(head) + len(head)
    end = source.index("\n}\n\n#else", body_start)
    body = re.sub(r"( +)if \(!tk_grid_barrier\(barrier, \d+\)\) return;", after_barrier, source[body_start:end])
    if count + 1 > _MAX_STAMPS:
        raise ValueError(f"{count + 1} stamps do not fit the {_MAX_STAMPS} free words of the header")
    final = f"  __syncthreads();\n  {_STAMP.format(_FIRST_SLOT + count)}"
    return f"{source[:body_start]}\n  {_STAMP.format(_FIRST_SLOT)}{body}\n{final}{source[end:]}"


def interval_samples(launch: Callable[[], object], bound: Any, num_barriers: int, launches: int) -> list[list[float]]:
    """Microseconds between neighbouring stamps, for each of so many launches of a stamped kernel without a loop."""
    samples = []
    for _ in range(launches):
        launch()
        bound.check()
        words = struct.unpack(f"<{_HEADER_BYTES // 8}Q", bound._workspace.read(_HEADER_BYTES))
        stamps = words[_FIRST_SLOT : _FIRST_SLOT + 2 + num_barriers]
        samples.append([(after - before) / 1e3 for before, after in pairwise(stamps)])
    return samples
