"""How a block multiplies what lies in its shared memory: by lanes of warps or tensor cores, and the cycles of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from trainkernel.product_plans import SIXTEEN_BIT_FORMATS, TENSOR_DEPTHS, ProductPlan, ceil_div

CYCLES_PER_US = 1800
LONE_WARP_CYCLES = 40
LONE_WARP_FACTOR = 2.0
_SHUFFLE_CYCLES = 35.0
_FINISH_CYCLES = 20.0
_FINISH_INSTRUCTIONS = 6.0
_MAX_TOGETHER = 8
_MICRO_TILES = ((8, 4), (4, 4), (4, 2), (4, 1), (2, 2), (2, 1), (1, 1))
_FLAT_MICRO_TILES = ((2, 4), (1, 4), (1, 2))
_WARP_LANES = tuple((n, k) for n in (1, 2, 4, 8, 16) for k in (1, 2, 4, 8, 16) if n * k <= 32)
# Cycles of a warp's step of that depth by its rows and units: of its chain of instructions, and more for each warp that
# is at work. Those of two rows are what shared memory needs for the operands, in proportion to one row.
_SIXTEEN_BIT_CYCLES = {(1, 2): (70.0, 7.0), (1, 4): (80.0, 14.0), (2, 4): (110.0, 18.0)}
_TENSOR_STEP_CYCLES = {
    "tf32": {(1, 1): (80.0, 5.0), (1, 2): (90.0, 8.0), (1, 4): (110.0, 15.0)},
    "float16": _SIXTEEN_BIT_CYCLES,
    "bfloat16": _SIXTEEN_BIT_CYCLES,
}
_TENSOR_START_CYCLES = 100.0
_TENSOR_ROUND_CYCLES = 60.0
_TENSOR_FINISH_CYCLES = 200.0


def on_best_cores(plan: ProductPlan, tensor: str, threads: int) -> ProductPlan:
    """The plan of a product near a block with its faster way to multiply.

    For the FMA units 16-bit operands become float32 one by one, and many sums take a detour through shared memory.
    """
    if not tensor or not plan.num_outputs * plan.tile_k or (tensor == "tf32" and plan.tile_k % TENSOR_DEPTHS[tensor]):
        return plan
    on_tensor_cores = replace(plan, tensor=tensor)
    fma_cycles = multiply_cycles(plan, threads)
    if tensor in SIXTEEN_BIT_FORMATS:
        outputs = plan.tile_m * plan.tile_n
        fma_cycles += (plan.tile_m + plan.tile_n) * plan.tile_k / 16
        fma_cycles += outputs / 4 if outputs > 4 * threads else 0
    faster = multiply_cycles(on_tensor_cores, threads) < fma_cycles
    return on_tensor_cores if faster else plan


def multiply_cycles(plan: ProductPlan, threads: int) -> float:
    """Cycles in which a block multiplies a tile whose operands lie near."""
    m, n, k = plan.tile_m, plan.tile_n, plan.tile_k
    if plan.tensor:
        return tensor_tile_cycles(tensor_tile(plan, threads), m, n, plan.tensor)
    return block_tile_cycles(block_tile(m, n, k, threads), m, n, k, threads)


@dataclass(frozen=True)
class BlockTile:
    """How the lanes of a warp share a tile of a product whose operands lie in shared memory.

    It has ``warp_n`` lanes along n and ``lanes_k`` along the depth, which take turns of four of it; the others
    are along m. A lane has ``micro_m`` x ``micro_n`` neighbouring outputs, whose sums those along the depth
    add up and deal out among them. All three numbers of lanes are powers of two.
    """

    warp_n: int
    lanes_k: int
    micro_m: int
    micro_n: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """As ``tk_block_product`` takes them."""
        return (self.warp_n, self.lanes_k, self.micro_m, self.micro_n)

    @cached_property
    def warp_m(self) -> int:
        """Lanes along m."""
        return 32 // (self.warp_n * self.lanes_k)

    @cached_property
    def rows(self) -> int:
        """Rows of a tile."""
        return self.warp_m * self.micro_m

    @cached_property
    def columns(self) -> int:
        """Columns of a tile."""
        return self.warp_n * self.micro_n

    def num_tiles(self, m: int, n: int) -> int:
        """Tiles of a product."""
        return -(-m // self.rows) * -(-n // self.columns)

    @cached_property
    def outputs(self) -> int:
        """Sums of a lane."""
        return self.micro_m * self.micro_n

    @cached_property
    def kept(self) -> int:
        """Outputs of a tile that a lane finishes."""
        return max(1, self.outputs // self.lanes_k)

    @cached_property
    def step_instructions(self) -> int:
        """Instructions of a warp for four of the depth."""
        return 4 * self.outputs + 2 * self.micro_m + 3 * self.micro_n + 6

    @cached_property
    def step_loads(self) -> float:
        """Cycles of shared memory that they take."""
        loads = _load_cycles(self.micro_m, self.warp_m, self.warp_n, True)
        return loads + _load_cycles(self.micro_n, self.warp_m, self.warp_n, False)


@lru_cache(maxsize=2)
def _block_tiles(flat: bool) -> tuple[BlockTile, ...]:
    micro_tiles = _MICRO_TILES + (_FLAT_MICRO_TILES if flat else ())
    return tuple(BlockTile(*lanes, *micro) for micro in micro_tiles for lanes in _WARP_LANES)


@lru_cache(maxsize=4096)
def block_tile(m: int, n: int, k: int, threads: int) -> BlockTile:
    """The fastest use of a block's warps by a count of cycles."""
    best: tuple[float, BlockTile] | None = None
    for tile in _block_tiles(m <= 2):
        # Lanes along m that nothing else needs do no harm.
        if (tile.columns >= 2 * n and tile.columns > 1) or (tile.rows >= 2 * m and tile.micro_m > 1):
            continue
        if 2 * tile.lanes_k >= k and tile.lanes_k > 1:
            continue
        cost = block_tile_cycles(tile, m, n, k, threads, math.inf if best is None else best[0])
        if best is None or cost < best[0]:
            best = (cost, tile)
    assert best is not None
    return best[1]


@dataclass(frozen=True)
class TensorTile:
    """How the warps of a block share a product on tensor cores: sums of 16 ``rows`` x 8 ``units`` at a time.

    ``swapped``: the rows lie along n, and the units along m. Warp ``w`` is number ``w % 2**log_m`` along the rows,
    ``w // 2**log_m % 2**log_n`` along the units, then one of ``groups`` along the depth, each of which has ``depth``.
    """

    swapped: bool
    rows: int
    units: int
    log_m: int
    log_n: int
    groups: int
    depth: int


def tensor_tile(plan: ProductPlan, threads: int) -> TensorTile:
    """The fastest use of a block's warps by a count of cycles."""
    return _tensor_tile(plan.tile_m, plan.tile_n, plan.tile_k, plan.tensor, threads // 32)


@lru_cache(maxsize=4096)
def _tensor_tile(m: int, n: int, k: int, tensor: str, warps: int) -> TensorTile:
    best: tuple[float, TensorTile] | None = None
    steps = ceil_div(k, TENSOR_DEPTHS[tensor])
    for swapped in (False, True):
        rows, columns = (n, m) if swapped else (m, n)
        for sixteens, units in _TENSOR_STEP_CYCLES[tensor]:
            if (units > 2 and columns <= 4 * units) or (sixteens > 1 and rows <= 16):
                continue
            tiles_m, tiles_n = ceil_div(rows, 16 * sixteens), ceil_div(columns, 8 * units)
            for log_m in range(warps.bit_length()):
                for log_n in range(warps.bit_length() - log_m):
                    if (1 << log_m) >= 2 * tiles_m or (1 << log_n) >= 2 * tiles_n:
                        continue
                    most = min(warps >> (log_m + log_n), steps)
                    for groups in sorted({1, most}):
                        own = ceil_div(steps, groups)
                        tile = TensorTile(
                            swapped, sixteens, units, log_m, log_n, ceil_div(steps, own), own * TENSOR_DEPTHS[tensor]
                        )
                        cost = tensor_tile_cycles(tile, m, n, tensor)
                        if best is None or cost < best[0]:
                            best = (cost, tile)
    assert best is not None
    return best[1]


def tensor_tile_cycles(tile: TensorTile, m: int, n: int, tensor: str) -> float:
    """Cycles of a multiprocessor: rounds of steps, each one warp's chain and the issue of all warps; then the sums.

    Those of several groups, or of a tile that lies across, take a detour through shared memory.
    """
    rows, columns = (n, m) if tile.swapped else (m, n)
    tiles_m, tiles_n = ceil_div(rows, 16 * tile.rows), ceil_div(columns, 8 * tile.units)
    rounds = ceil_div(tiles_m, 1 << tile.log_m) * ceil_div(tiles_n, 1 << tile.log_n)
    active = min(tiles_m, 1 << tile.log_m) * min(tiles_n, 1 << tile.log_n) * tile.groups
    chain, issue = _TENSOR_STEP_CYCLES[tensor][tile.rows, tile.units]
    steps = tile.depth / TENSOR_DEPTHS[tensor]
    stored = 2 * tile.groups * m * n / 32
    if tile.groups > 1 or tile.swapped:
        stored += _TENSOR_FINISH_CYCLES + tile.groups * m * n / 32
    return _TENSOR_START_CYCLES + rounds * (_TENSOR_ROUND_CYCLES + steps * (chain + issue * active)) + stored


def block_tile_cycles(tile: BlockTile, m: int, n: int, k: int, threads: int, limit: float = math.inf) -> float:
    """Cycles of a multiprocessor: rounds of tiles, one for each warp, by steps of four along the depth.

    A step takes what the four schedulers need to issue the instructions of all warps, or what shared memory
    needs, or what one warp needs alone, whose dependent sums nothing hides. Before the steps comes the latency
    of the loads, after them the lanes along the depth add up their sums by shuffles, and the results are finished.
    Once ``limit`` is reached the rest is not counted.
    """
    tiles = tile.num_tiles(m, n)
    warps = min(threads // 32, tiles)
    busiest, instructions = -(-warps // 4), tile.step_instructions
    # The loads of two steps are under way together if they are few.
    latency = LONE_WARP_CYCLES / (2 if tile.outputs <= _MAX_TOGETHER else 1)
    step = max(busiest * instructions, warps * tile.step_loads, latency + LONE_WARP_FACTOR * instructions)
    rounds, steps = -(-tiles // (threads // 32)), -(-k // (4 * tile.lanes_k))
    multiplied = LONE_WARP_CYCLES + steps * step
    if rounds * multiplied >= limit:
        return rounds * multiplied
    merged, sums, lanes = 0.0, tile.outputs, tile.lanes_k
    while lanes > 1:
        sums, lanes = max(1, sums // 2), lanes // 2
        merged += max(_SHUFFLE_CYCLES, 4 * busiest * sums, warps * sums)
    finished = max(_FINISH_CYCLES, _FINISH_INSTRUCTIONS * busiest) * tile.kept
    return rounds * (multiplied + merged + finished)


@lru_cache(maxsize=1024)
def _load_cycles(micro: int, warp_m: int, warp_n: int, of_a: bool) -> float:
    """Cycles of shared memory for a warp's loads of one operand, four of the depth: the mean of both ways it may lie.

    A lane has ``micro`` neighbouring places; rows are a multiple of 32 banks and four more apart. A load of 16 bytes
    goes by halves of the warp, or by quarters where neighbouring lanes do not share their addresses; one of 8 bytes
    by the warp or by halves. Each takes as many cycles as it has different addresses in the same banks.
    """
    low = min(warp_n, 2)
    lanes = []
    for lane in range(32):
        m, n = lane // low % warp_m, lane % low + lane // (low * warp_m) % (warp_n // low) * low
        lanes.append((m if of_a else n, lane // (warp_m * warp_n)))
    parts = 1 if (warp_n if of_a else warp_m) > 1 else 2
    half, whole = set(lanes[:16]), set(lanes)

    def cycles(places: set[tuple[int, int]], banks: set[int]) -> float:
        return max(parts, len(places) / len(banks))

    along = 2 * micro * cycles(half, {(micro * outer + k) % 8 for outer, k in half})
    if micro >= 4:
        across = 2 * micro * cycles(half, {(micro // 4 * outer + 4 * k) % 8 for outer, k in half})
    elif micro == 2:
        across = 4 * cycles(whole, {(outer + 8 * k) % 16 for outer, k in whole})
    else:
        across = 4 * len(whole) / len({(outer + 16 * k) % 32 for outer, k in whole})
    return (along + across) / 2
