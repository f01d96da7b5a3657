"""trainkernel's matrix products beside cuBLAS.

::

    python bench/gemm.py
    python bench/gemm.py 128x256x784 256x256x256:nt --dtype float32 --tiles
    python bench/gemm.py --dtype bfloat16 --brief    # the 16-bit sweep, about a minute

For each shape m x n x k (``t`` for a transposed operand, a then b; without any, a sweep) and dtype:
the time of a launch that does the product alone (``trainkernel_us``), the device time from start to
end of its kernel (``kernel_us``, by its time stamps), and torch.matmul's in a CUDA graph of 20. The
second is what a product costs inside of a step. Results are compared with float64 first. ``--brief``
leaves out the first of the times, and its compilation. With ``--tiles`` also the device time of each
tile option, and of 16-bit products with each tile, to which the cost model is fitted. Needs a GPU and
torch.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

from machine import describe_machine, new_run_id, require_device, results_path, write_json  # noqa: E402
from timing import Clock, event_clock, time_steps  # noqa: E402

import trainkernel as tk  # noqa: E402
from trainkernel import products as products_module  # noqa: E402
from trainkernel.ir import Program  # noqa: E402
from trainkernel.options import Options  # noqa: E402
from trainkernel.stamps import read_stamps  # noqa: E402

DEVICE = "cuda:0"
DTYPES = ("float32", "bfloat16")
RTOL = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}
SQUARES = (64, 128, 256, 512, 1024, 2048, 4096)
TRANSPOSED_SQUARES = (1024, 4096)
SIXTEEN_BIT_TILES = (
    *(
        ("tensor", *tile)
        for tile in ((16, 16), (16, 32), (32, 32), (32, 64), (64, 64), (128, 64), (64, 128), (128, 128))
    ),
    *(("warpgroup", *tile) for tile in ((128, 64), (128, 128), (128, 256), (256, 128))),
)
FLOAT32_TILES = (
    *(("tile", *tile) for tile in ((16, 32), (32, 32), (32, 64), (64, 64))),
    *(("split", *tile) for tile in ((64, 32), (64, 64), (128, 32), (128, 64), (64, 128))),
)
LAYERS = ((32, 32, 8), (256, 256, 17), (1024, 64, 64), (128, 256, 784), (2048, 128, 128), (65536, 64, 64))
"""Rows, outputs and inputs of layers: their forward products, and the two of their derivatives."""
PRODUCTS_PER_GRAPH = 20
WARMUP_LAUNCHES, LAUNCHES = 10, 50


@dataclass(frozen=True)
class Product:
    """``a`` [m, k] times ``b`` [k, n]; a ``t`` in the layout stores that operand transposed."""

    m: int
    n: int
    k: int
    layout: str
    dtype: str

    @staticmethod
    def parse(text: str, dtype: str) -> Product:
        """Of ``"128x256x784"`` or ``"128x256x784:nt"``."""
        size, _, layout = text.partition(":")
        m, n, k = (int(part) for part in size.split("x"))
        return Product(m, n, k, layout or "nn", dtype)

    @property
    def stored_shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        a, b = (self.m, self.k), (self.k, self.n)
        return a[::-1] if self.layout[0] == "t" else a, b[::-1] if self.layout[1] == "t" else b

    def operands(self, stored: Iterable[Any]) -> tuple[Any, Any]:
        """The operands as the product takes them."""
        a, b = stored
        return a.T if self.layout[0] == "t" else a, b.T if self.layout[1] == "t" else b

    def program(self) -> Program:
        builder = tk.ProgramBuilder()
        stored = [builder.input(name, shape, self.dtype) for name, shape in zip("ab", self.stored_shapes, strict=True)]
        return builder.build([builder.op("mm", *self.operands(stored), dtype=self.dtype)])

    def __str__(self) -> str:
        return f"{self.m}x{self.n}x{self.k}:{self.layout}"


def main() -> None:
    arguments = parse()
    require_device(DEVICE)
    import torch

    torch.set_float32_matmul_precision("highest")
    torch.cuda.set_stream(torch.cuda.Stream())
    machine, run_id = describe_machine(DEVICE), new_run_id()
    out = arguments.out or results_path(machine["device"], "_gemm")
    rows = []
    for product in products(arguments.shapes, arguments.dtype):
        rows.append({"run_id": run_id, **measure(product, arguments.brief)})
        print_row(rows[-1])
        if arguments.tiles:
            print_tiles(product)
        write_json(out, {**machine, "rows": rows})


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", metavar="MxNxK[:nt]")
    parser.add_argument("--dtype", nargs="+", default=list(DTYPES), choices=list(RTOL))
    parser.add_argument("--tiles", action="store_true", help="also print the device time of each tile option")
    parser.add_argument("--brief", action="store_true", help="only the device time, not that of a launch")
    parser.add_argument("--out", type=Path, help="JSON file (default: bench/results/<device>_gemm.json)")
    return parser.parse_args()


def products(shapes: list[str], dtypes: list[str]) -> list[Product]:
    """Those asked for, or the sweep."""
    if shapes:
        return [Product.parse(text, dtype) for dtype in dtypes for text in shapes]
    squares = [(size, size, size, "nn") for size in SQUARES]
    squares += [(size, size, size, layout) for size in TRANSPOSED_SQUARES for layout in ("nt", "tn", "tt")]
    layers = [
        case
        for rows, outputs, inputs in LAYERS
        for case in ((rows, outputs, inputs, "nn"), (rows, inputs, outputs, "nt"), (inputs, outputs, rows, "tn"))
    ]
    return [Product(*case, dtype) for dtype in dtypes for case in (*squares, *layers)]


def measure(product: Product, brief: bool) -> dict[str, Any]:
    """The row of one product; its error instead of times if it is wrong."""
    import torch

    generator = torch.Generator(DEVICE).manual_seed(0)
    dtype = getattr(torch, product.dtype)
    stored = [torch.randn(shape, device=DEVICE, generator=generator).to(dtype) for shape in product.stored_shapes]
    result = torch.empty(product.m, product.n, device=DEVICE, dtype=dtype)
    row: dict[str, Any] = {"product": str(product), "dtype": product.dtype, "error": None}
    try:
        kernel = tk.compile(product.program(), device=DEVICE, stamps=brief)
        bound = kernel.bind(stored, [result])
        bound.launch()
        bound.check()
        row["plan"] = plan_of(kernel)
        row["relative_error"] = relative_error(result, *product.operands(stored))
        if not row["relative_error"] <= RTOL[product.dtype]:
            raise ValueError(f"relative error {row['relative_error']:.3g} is over {RTOL[product.dtype]:g}")
        clock = event_clock(torch.cuda.current_stream())
        ours = None if brief else time_steps(bound.launch, clock)
        cublas_us, cublas_spread_us = time_cublas(*product.operands(stored), result, clock)
        kernel_us = stamped_time(kernel, bound) if brief else kernel_time(product, stored, result, {})[0]
    except Exception as error:
        return row | {"error": f"{type(error).__name__}: {error}"}
    return row | {
        "trainkernel_us": None if ours is None else ours.us_per_step,
        "trainkernel_spread_us": None if ours is None else ours.spread_us,
        "kernel_us": kernel_us,
        "cublas_us": cublas_us,
        "cublas_spread_us": cublas_spread_us,
        "kernel_tflops": 2e-6 * product.m * product.n * product.k / kernel_us,
    }


def plan_of(kernel: Any) -> str:
    return next(str(task.plan) for task in kernel.schedule.tasks if task.kind == "product")


def relative_error(result: Any, a: Any, b: Any) -> float:
    """The largest error against the largest element of the exact product."""
    exact = a.double() @ b.double()
    return float((result.double() - exact).abs().max() / exact.abs().max())


def time_cublas(a: Any, b: Any, result: Any, clock: Clock) -> tuple[float, float]:
    """Microseconds per product in a CUDA graph, and their spread."""
    import torch

    torch.matmul(a, b, out=result)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for _ in range(PRODUCTS_PER_GRAPH):
            torch.matmul(a, b, out=result)
    timing = time_steps(graph.replay, clock, PRODUCTS_PER_GRAPH)
    return timing.us_per_step, timing.spread_us


def kernel_time(product: Product, stored: list[Any], result: Any, options: dict[str, Any]) -> tuple[float, str]:
    """Median microseconds from the start to the end of the kernel, and the plan."""
    kernel = tk.compile(product.program(), device=DEVICE, stamps=True, **options)
    return stamped_time(kernel, kernel.bind(stored, [result])), plan_of(kernel)


def stamped_time(kernel: Any, bound: Any) -> float:
    """Median microseconds from the start to the end of a kernel that has stamps."""
    samples = read_stamps(kernel, bound.launch, bound, WARMUP_LAUNCHES + LAUNCHES)
    return statistics.median(sample.total_us for sample in samples[WARMUP_LAUNCHES:])


def print_row(row: dict[str, Any]) -> None:
    name = f"{row['product']:>18} {row['dtype']:<9}"
    if row["error"]:
        print(f"{name} {row['error']}")
        return
    launch = "" if row["trainkernel_us"] is None else f"launch {row['trainkernel_us']:8.2f} us, "
    print(
        f"{name} {launch}kernel {row['kernel_us']:8.2f} us "
        f"({row['kernel_tflops']:6.1f} TFLOP/s), cuBLAS {row['cublas_us']:8.2f} us, "
        f"kernel / cuBLAS {row['kernel_us'] / row['cublas_us']:5.2f}  {row['plan']}"
    )


def print_tiles(product: Product) -> None:
    import torch

    dtype = getattr(torch, product.dtype)
    stored = [torch.randn(shape, device=DEVICE).to(dtype) for shape in product.stored_shapes]
    result = torch.empty(product.m, product.n, device=DEVICE, dtype=dtype)
    options: dict[str, int]
    option_sets: list[dict[str, int]] = [{"threads_per_block": 512}, {"threads_per_block": 128}]
    option_sets += [{"gemm_tile_n": n, "gemm_k_tile": k} for n, k in itertools.product((32, 64), (16, 32))]
    for options in option_sets:
        try:
            time_us, plan = kernel_time(product, stored, result, options)
            print(f"{'':18} {time_us:8.2f} us  {plan}  {options}")
        except tk.TrainkernelError as error:
            print(f"{'':18} {options}: {error}")
    tiles = FLOAT32_TILES if product.dtype == "float32" else SIXTEEN_BIT_TILES
    target = tk.compile(product.program(), device=DEVICE, stamps=True).stats.target
    shape = (product.m, product.n, product.k)
    offered = products_module.tile_paths(shape, product.dtype != "float32", target, Options())
    for number, (path, *tile) in enumerate(tiles):
        if path not in offered:
            continue
        # Kernels are kept by their options: a bound that bounds nothing tells those of two tiles apart.
        options = {"max_blocks": 1_000_000 + number}
        choices = {path: [tuple(tile)]}
        with (
            mock.patch.object(products_module, "_tile_choices", lambda path, *_, of=choices: of.get(path, [])),
            mock.patch.object(products_module, "_best_panels", return_value=None),
        ):
            products_module._best_tiles.cache_clear()
            time_us, plan = kernel_time(product, stored, result, options)
        products_module._best_tiles.cache_clear()
        print(f"{'':18} {time_us:8.2f} us  {plan}")


if __name__ == "__main__":
    main()
