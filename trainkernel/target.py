"""What the schedule and the generator may assume of a device.

A Target is an argument of ``schedule`` and ``generate`` and part of every cache key. The split
of work into pieces may depend on the Target and on the program, never on the grid that a launch
happens to get: so the same program and target give the same bits on any grid.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from trainkernel.errors import OptionError

RESERVED_SHARED_BYTES = 1024
"""What each block takes of a multiprocessor's shared memory beside its own."""
MAX_SHARING_THREADS = 256
"""Threads of a block up to which a second one is expected beside it on a multiprocessor."""
ARRIVALS_BYTES = 64
"""Shared memory of the barriers on which a block's bulk copies arrive, at most."""


@dataclass(frozen=True)
class Target:
    """A device class.

    Attributes
    ----------
    name : str
        Preset name, for example ``"sm_90a"`` or ``"portable"``.
    arch : str or None
        NVRTC's ``--gpu-architecture`` value; None for the portable target, whose source
        compiles for sm_80 and newer.
    num_sms : int
        Streaming multiprocessors that the split of work aims at.
    shared_bytes_per_block, shared_bytes_per_sm : int
        Opt-in dynamic shared memory a block may use, and what an SM has.
    registers_per_sm : int
    max_cluster_blocks : int
        Largest portable cluster; 1 where clusters do not exist.
    l2_bytes : int
    grid_barrier_us, cluster_barrier_us, block_barrier_us : float
        Measured cost of one barrier, microseconds.
    memory_bytes_per_us : float
        Device-memory bandwidth, bytes per microsecond.
    fma_flops_per_us, tensor_flops_per_us : float
        Peak f32 FMA and dense bf16 tensor-core rates, floating-point operations per microsecond.
    """

    name: str
    arch: str | None
    num_sms: int
    shared_bytes_per_block: int
    shared_bytes_per_sm: int
    registers_per_sm: int
    max_cluster_blocks: int
    l2_bytes: int
    grid_barrier_us: float
    cluster_barrier_us: float
    block_barrier_us: float
    memory_bytes_per_us: float
    fma_flops_per_us: float
    tensor_flops_per_us: float

    @property
    def has_bulk_copies(self) -> bool:
        """Whether rows can come to shared memory by bulk copies: from sm_90 on, as clusters."""
        return self.max_cluster_blocks > 1

    @property
    def task_shared_bytes(self) -> int:
        """Shared memory that a block's tasks may use: what it may have, but for the barriers of bulk copies."""
        return self.shared_bytes_per_block - (ARRIVALS_BYTES if self.has_bulk_copies else 0)

    @staticmethod
    def preset(name: str) -> Target:
        """The named preset.

        Raises
        ------
        OptionError
            For an unknown name, or an architecture older than sm_80.
        """
        found = PRESETS.get(name)
        if found is not None:
            return found
        match = re.fullmatch(r"sm_(\d+)([af]?)", name) if isinstance(name, str) else None
        if match is None:
            raise OptionError(f"arch must look like 'sm_90a', got {name!r}; presets: {', '.join(PRESETS)}")
        if int(match.group(1)) < 80:
            raise OptionError(f"architecture {name} is older than sm_80, the oldest that trainkernel supports")
        raise OptionError(f"no target preset for {name!r}; presets: {', '.join(PRESETS)}")


def _preset(
    name: str,
    arch: str | None,
    num_sms: int,
    shared_kib: tuple[int, int],
    cluster: int,
    l2_mib: int,
    gb_per_s: float,
    fma_tflops: float,
    tensor_tflops: float,
) -> Target:
    block_kib, sm_kib = shared_kib
    return Target(
        name=name,
        arch=arch,
        num_sms=num_sms,
        shared_bytes_per_block=block_kib * 1024,
        shared_bytes_per_sm=sm_kib * 1024,
        registers_per_sm=65536,
        max_cluster_blocks=cluster,
        l2_bytes=l2_mib * 1024 * 1024,
        grid_barrier_us=0.93,
        cluster_barrier_us=0.2,
        block_barrier_us=0.03,
        memory_bytes_per_us=gb_per_s * 1e3,
        fma_flops_per_us=fma_tflops * 1e6,
        tensor_flops_per_us=tensor_tflops * 1e6,
    )


# Shared-memory sizes: CUDA C++ Programming Guide, "Compute Capabilities". Bandwidths and peak
# rates: the vendor's data sheets of A100, A10, L4, H100, H200, B200, B300 and RTX 5090; the
# barrier costs were measured on an H200.
PRESETS: Mapping[str, Target] = MappingProxyType(
    {
        "portable": _preset("portable", None, 128, (99, 100), 1, 32, 2000, 20, 200),
        "sm_80": _preset("sm_80", "sm_80", 108, (163, 164), 1, 40, 2039, 19.5, 312),
        "sm_86": _preset("sm_86", "sm_86", 84, (99, 100), 1, 6, 600, 31, 125),
        "sm_89": _preset("sm_89", "sm_89", 58, (99, 100), 1, 48, 300, 30, 121),
        "sm_90": _preset("sm_90", "sm_90", 132, (227, 228), 8, 50, 3350, 67, 990),
        "sm_90a": _preset("sm_90a", "sm_90a", 132, (227, 228), 8, 60, 4800, 67, 990),
        "sm_100": _preset("sm_100", "sm_100", 148, (227, 228), 8, 126, 8000, 80, 2250),
        "sm_103": _preset("sm_103", "sm_103", 148, (227, 228), 8, 126, 8000, 80, 2500),
        "sm_120": _preset("sm_120", "sm_120", 170, (99, 100), 8, 96, 1792, 105, 210),
    }
)
