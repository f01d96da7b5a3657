"""A product's path and tiles: what ``plan_product`` chooses, and everything after it reads."""

from __future__ import annotations

from dataclasses import dataclass

from trainkernel.ir import TensorSpec
from trainkernel.options import Options

TENSOR_DEPTHS = {"tf32": 8, "float16": 16, "bfloat16": 16}
"""Depth of one step of a warp, by format."""
SIXTEEN_BIT_FORMATS = ("float16", "bfloat16")


def ceil_div(a: int, b: int) -> int:
    """``a / b`` rounded up."""
    return -(-a // b)


@dataclass(frozen=True)
class ProductPlan:
    """One product's path and tiles.

    Attributes
    ----------
    path : str
        ``"gemv"`` (one row, depth split over a block's threads), ``"gemv_t"`` (one column),
        ``"thin"`` (one thread per output; all that are not float32), ``"tensor"`` (``mma.sync`` tiles),
        ``"warpgroup"`` (``wgmma`` tiles, sm_90a), ``"split"`` (the same of float32 operands, each the sum of two
        TF32 numbers),
        ``"tile"`` (float32 FMA tiles), ``"panel"`` (float32 tiles whose operands lie in shared memory over
        their whole depth), ``"block"`` (a piece of a block region: its operands lie in shared memory).
    m, n, k : int
        Product shape.
    tile_m, tile_n, tile_k : int
        Outputs of one piece and depth of one shared-memory step, elements.
    split : int
        Number of partial products along the depth; 1 means no split.
    chunk : int
        Depth of one partial product.
    skew_bytes : int
        Padding of shared-memory rows.
    batch : int
        Number of independent products of this shape; each has its own tiles.
    tensor : str
        How tensor cores multiply what lies near a block (paths ``"panel"`` and ``"block"``): ``""`` not at
        all, or the format of their operands: ``"tf32"``, ``"float16"`` or ``"bfloat16"``. Of path ``"split"``:
        ``"tf32x3"``, three products of TF32 numbers for one, or ``"tf32"``.
    each : int
        Outputs of a thread (path ``"thin"``), whose loads are on their way at the same time.
    """

    path: str
    m: int
    n: int
    k: int
    tile_m: int
    tile_n: int
    tile_k: int
    split: int = 1
    chunk: int = 0
    skew_bytes: int = 16
    batch: int = 1
    tensor: str = ""
    each: int = 1

    @property
    def on_tensor_cores(self) -> bool:
        return self.is_tensor_tile or bool(self.tensor)

    @property
    def is_tile(self) -> bool:
        """Whether a block computes a tile of it on the grid, step by step along the depth."""
        return self.path in ("tile", "split") or self.is_tensor_tile

    @property
    def is_tensor_tile(self) -> bool:
        """Whether its operands are fetched as 16-bit steps for tensor cores."""
        return self.path in ("tensor", "warpgroup")

    @property
    def tf32_products(self) -> int:
        """Products of TF32 numbers that make one of float32 (path ``"split"``)."""
        return 3 if self.tensor == "tf32x3" else 1

    @property
    def num_outputs(self) -> int:
        return self.batch * self.m * self.n

    @property
    def tiles_per_product(self) -> int:
        return ceil_div(self.m, self.tile_m) * ceil_div(self.n, self.tile_n)

    @property
    def num_tiles(self) -> int:
        if self.path == "thin":
            return ceil_div(self.num_outputs, self.each * self.tile_n)
        return self.batch * self.tiles_per_product

    @property
    def num_pieces(self) -> int:
        return self.num_tiles * self.split

    def __str__(self) -> str:
        split = f", depth split {self.split} x {self.chunk}" if self.split > 1 else ""
        batch = f"{self.batch} x " if self.batch != 1 else ""
        tile = f"tile {self.tile_m}x{self.tile_n}x{self.tile_k}"
        cores = f", {self.tensor} on tensor cores" if self.tensor else ""
        return f"{self.path} {batch}{self.m}x{self.n}x{self.k} {tile}{split}{cores}"


def tensor_format(a: TensorSpec, b: TensorSpec, options: Options) -> str:
    """How tensor cores may multiply two operands near a block; empty if they may not."""
    if a.dtype != b.dtype:
        return ""
    if a.dtype == "float32":
        return "tf32" if options.precision == "tf32" else ""
    return a.dtype if a.dtype in SIXTEEN_BIT_FORMATS else ""
