"""Where a step's time goes: device time of each stage, by stamps after the grid barriers.

``python bench/profile_stages.py pinn mnist`` compiles a workload's kernel with a time stamp of
block 0 after every grid barrier, at the start and at the end, runs it many times and prints the
median time between stamps beside the stage's tasks. Needs a GPU and torch.
"""

from __future__ import annotations

import argparse
import re
import statistics
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from trainkernel_runner import TrainkernelTrainer
from workloads import WORKLOADS

import trainkernel.compiler
import trainkernel.kernel
from trainkernel.program_cache import CachedProgram
from trainkernel.runtime.build import build_cubin

FIRST_SLOT = 8
_MAX_STAMPS = 24
_STAMP = "if (blockIdx.x == 0 && threadIdx.x == 0) ((unsigned long long*)p.workspace)[{}] = tk_globaltimer_ns();"


def stamped(source: str) -> str:
    """The source with stamps in the workspace header's free words."""
    count = 1

    def after_barrier(match: re.Match[str]) -> str:
        nonlocal count
        count += 1
        return f"{match.group(0)}\n{match.group(1)}{_STAMP.format(FIRST_SLOT + count - 1)}"

    head = "TkBarrier barrier = tk_barrier_init(p.workspace, p.barrier_timeout_ns);"
    body_start = source.index(head) + len(head)
    end = source.index("\n}\n\n#else", body_start)
    body = re.sub(r"( +)if \(!tk_grid_barrier\(barrier, \d+\)\) return;", after_barrier, source[body_start:end])
    if count + 1 > _MAX_STAMPS:
        raise SystemExit(f"{count + 1} stamps do not fit the {_MAX_STAMPS} free words of the header")
    final = f"  __syncthreads();\n  {_STAMP.format(FIRST_SLOT + count)}"
    return f"{source[:body_start]}\n  {_STAMP.format(FIRST_SLOT)}{body}\n{final}{source[end:]}"


@contextmanager
def stamping() -> Iterator[None]:
    """Kernels that are compiled in the block have stamps, and no place in the cache of Programs."""
    kernel: Any = trainkernel.kernel
    compiler: Any = trainkernel.compiler
    before = kernel.build_cubin, compiler.find_program
    kernel.build_cubin = lambda source, arch: build_cubin(stamped(source), arch)
    compiler.find_program = lambda program, arch, options, generate: CachedProgram(generate)
    try:
        yield
    finally:
        kernel.build_cubin, compiler.find_program = before


def profile(name: str, options: dict[str, int]) -> None:
    """Print the stages of one workload."""
    with stamping():
        trainer = TrainkernelTrainer(WORKLOADS[name], "cuda", torch.cuda.Stream(), options)
    barriers = trainer.kernel.plan.barriers
    samples = []
    for _ in range(300):
        trainer.step()
        trainer.read_loss()
        words = struct.unpack("<32Q", trainer.bound._workspace.read(256))
        samples.append(words[FIRST_SLOT : FIRST_SLOT + 2 + sum(barriers)])
    usage = trainer.kernel.resource_usage()
    print(f"\n{name} {options}: {usage}")
    groups: list[list[str]] = []
    for stage, waits in zip(trainer.kernel.schedule.stages, barriers, strict=True):
        if waits or not groups:
            groups.append([])
        groups[-1] += [str(task) for task in stage.tasks]
    for number, tasks in enumerate(groups):
        times = [(sample[number + 1] - sample[number]) / 1e3 for sample in samples[50:]]
        print(f"  {statistics.median(times):6.2f} us  {tasks[0]}")
        for task in tasks[1:]:
            print(f"             {task}")
    total = [(sample[len(groups)] - sample[0]) / 1e3 for sample in samples[50:]]
    print(f"  {statistics.median(total):6.2f} us  in all")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workloads", nargs="*", default=list(WORKLOADS))
    parser.add_argument("--option", action="append", default=[], metavar="NAME=INT")
    arguments = parser.parse_args()
    options = {name: int(value) for name, value in (text.split("=") for text in arguments.option)}
    for name in arguments.workloads:
        profile(name, options)


if __name__ == "__main__":
    main()
