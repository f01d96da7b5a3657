"""Device time of single products, by options: what the cost model is fitted to.

``python bench/products.py 128x256x784 256x256x256:nt`` prints, for each shape m x n x k (``t`` for a
transposed operand, a then b), the time from the start to the end of the kernel in block 0, for the
default plan and for each tile option. Needs a GPU and torch.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import struct

import torch
from profile_stages import FIRST_SLOT, stamping

import trainkernel
from trainkernel.builder import ProgramBuilder


def product_us(shape: tuple[int, int, int], layout: str, dtype: str, options: dict[str, int]) -> tuple[float, str]:
    """Median time in microseconds, and the plan."""
    m, n, k = shape
    b = ProgramBuilder()
    left = b.input("a", (k, m) if layout[0] == "t" else (m, k), dtype)
    right = b.input("b", (n, k) if layout[1] == "t" else (k, n), dtype)
    out = b.op("mm", left.T if layout[0] == "t" else left, right.T if layout[1] == "t" else right, dtype="float32")
    with stamping():
        kernel = trainkernel.compile(b.build([out]), device="cuda", **options)
    kind = getattr(torch, dtype)
    inputs = [torch.randn(spec.shape, device="cuda").to(kind) for spec in (left, right)]
    bound = kernel.bind(inputs, [torch.empty(m, n, device="cuda")])
    times = []
    for _ in range(60):
        bound.launch()
        bound.check()
        words = struct.unpack("<32Q", bound._workspace.read(256))
        times.append((words[FIRST_SLOT + 1 + kernel.stats.grid_barriers] - words[FIRST_SLOT]) / 1e3)
    plan = next(str(task.plan) for task in kernel.schedule.tasks if task.kind == "product")
    return statistics.median(times[10:]), plan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shapes", nargs="+")
    parser.add_argument("--dtype", default="float32")
    arguments = parser.parse_args()
    for text in arguments.shapes:
        size, _, layout = text.partition(":")
        m, n, k = (int(part) for part in size.split("x"))
        variants: list[dict[str, int]] = [{}, {"threads_per_block": 512}, {"threads_per_block": 128}]
        variants += [{"gemm_tile_n": n, "gemm_k_tile": k} for n, k in itertools.product((32, 64), (16, 32))]
        for options in variants:
            time_us, plan = product_us((m, n, k), layout or "nn", arguments.dtype, options)
            print(f"{text:20s} {time_us:7.2f} us  {plan}  {options or 'default'}")


if __name__ == "__main__":
    main()
