"""Which blocks compute the pieces of a stage's tasks, where their number leaves some blocks with more than others.

By default a task's pieces follow those of the task before it, so that a stage with more pieces than blocks goes on at
its first blocks, whatever those have. Where some pieces take longer than others, a task gets a range of blocks for
itself instead: the long ones first, each where the blocks are free soonest. Nothing but time depends on it, so a grid
that is smaller than the ranges just does as by default.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from trainkernel.product_costs import piece_cost_us
from trainkernel.product_plans import ProductPlan, ceil_div
from trainkernel.schedule import Task
from trainkernel.target import MAX_SHARING_THREADS, Target

# Time of a piece of what is no product, microseconds; of a part of a region.
_PIECE_US, _PART_US = 1.0, 0.4
_RESULT_US = 4.0e-4
"""Of each further result of a product's output: an optimizer's moments."""
_SHARE_OF_MODEL = {"tile": 0.75, "panel": 1.1}
"""What a piece took on an H200, by a block that has a multiprocessor to itself, in parts of what the model says."""
_LEAST_GAIN_US = 0.5
_MAX_ROUNDS = 8


@dataclass(frozen=True)
class BlockRange:
    """Blocks ``first`` to ``first + width - 1``, which take a task's pieces in turn."""

    first: int
    width: int


@dataclass(frozen=True)
class Share:
    """What one task, or tasks that run as one, has of a stage: equal pieces; ``fixed``: from the first block on."""

    num_pieces: int
    piece_us: float
    fixed: bool = False


def share_of(tasks: Sequence[Task], target: Target, threads: int) -> Share:
    """The share of tasks whose pieces follow each other."""
    us = max(_piece_us(task, target, threads) for task in tasks)
    return Share(sum(task.num_pieces for task in tasks), us, tasks[0].region is not None)


def _piece_us(task: Task, target: Target, threads: int) -> float:
    if task.region is not None:
        return _PART_US * len(task.region.parts)
    if not isinstance(task.plan, ProductPlan):
        return _PIECE_US
    outputs = task.plan.num_outputs * task.plan.split / max(1, task.num_pieces)
    own_us = piece_cost_us(task.plan, target, threads)
    if threads > MAX_SHARING_THREADS:
        own_us *= _SHARE_OF_MODEL.get(task.plan.path, 1.0)
    return own_us + max(0, len(task.stores) - 1) * outputs * _RESULT_US


def block_ranges(shares: Sequence[Share], num_blocks: int) -> list[BlockRange | None]:
    """A range for each share; None for all where the default is as good.

    Parameters
    ----------
    shares : sequence of Share
        In the order in which the blocks run them.
    num_blocks : int
        Of the grid that is to be expected.
    """
    if len(shares) < 2:
        return [None] * len(shares)
    return list(_best(tuple(shares), num_blocks)[1])


def stage_us(shares: Sequence[Share], num_blocks: int) -> float:
    """Estimated time until the last block of a stage has finished, barriers apart."""
    return _best(tuple(shares), num_blocks)[0]


@lru_cache(maxsize=4096)
def _best(shares: tuple[Share, ...], num_blocks: int) -> tuple[float, tuple[BlockRange | None, ...]]:
    default: tuple[BlockRange | None, ...] = (None,) * len(shares)
    default_us = _default_us(shares, num_blocks)
    busy_us = [0.0] * num_blocks
    ranges = list(default)
    order = sorted(range(len(shares)), key=lambda n: (not shares[n].fixed, -shares[n].piece_us, n))
    for number in order:
        share = shares[number]
        if share.fixed or not share.num_pieces:
            _add(busy_us, share, BlockRange(0, min(num_blocks, max(1, share.num_pieces))))
            continue
        chosen = min(_candidates(share, busy_us), key=lambda each: _end_us(busy_us, share, each))
        _add(busy_us, share, chosen)
        ranges[number] = chosen
    if max(busy_us) + _LEAST_GAIN_US < default_us:
        return max(busy_us), tuple(ranges)
    return default_us, default


def _candidates(share: Share, busy_us: Sequence[float]) -> list[BlockRange]:
    """Ranges that begin or end where one with another load does, fewer rounds first."""
    num_blocks = len(busy_us)
    changes = [0, *(block for block in range(1, num_blocks) if busy_us[block] != busy_us[block - 1]), num_blocks]
    found = []
    for rounds in range(1, _MAX_ROUNDS + 1):
        width = ceil_div(share.num_pieces, rounds)
        starts = sorted({*changes, *(change - width for change in changes)})
        found += [BlockRange(start, width) for start in starts if 0 <= start <= num_blocks - width]
    return found or [BlockRange(0, num_blocks)]


def _end_us(busy_us: Sequence[float], share: Share, blocks: BlockRange) -> tuple[float, float]:
    """When the last block would end; the sum of what the range's blocks would have."""
    own = [busy_us[block] for block in range(blocks.first, blocks.first + blocks.width)]
    rounds = ceil_div(share.num_pieces, blocks.width)
    end = max(own) + rounds * share.piece_us
    return max(end, max(busy_us)), end


def _add(busy_us: list[float], share: Share, blocks: BlockRange) -> None:
    """Pieces in turn from the range's first block on; a range may go on at the first of all blocks."""
    rounds, rest = divmod(share.num_pieces, blocks.width)
    for place in range(blocks.width):
        busy_us[(blocks.first + place) % len(busy_us)] += share.piece_us * (rounds + (place < rest))


def _default_us(shares: Sequence[Share], num_blocks: int) -> float:
    busy_us = [0.0] * num_blocks
    offset = 0
    for share in shares:
        _add(busy_us, share, BlockRange(0 if share.fixed else offset % num_blocks, num_blocks))
        offset += share.num_pieces
    return max(busy_us)
