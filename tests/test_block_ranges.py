"""Blocks for the tasks of a stage: inside of the grid, better than the default, every piece once on any grid."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from error_bounds import assert_close
from harness import bits, emulate

from trainkernel.block_ranges import BlockRange, Share, block_ranges
from trainkernel.builder import ProgramBuilder
from trainkernel.codegen import generate
from trainkernel.ir import Program
from trainkernel.target import Target


def random_shares(rng: np.random.Generator) -> list[Share]:
    count = int(rng.integers(1, 9))
    pieces = rng.choice([0, 1, 2, 3, 8, 31, 64, 200, 1000], count)
    times = rng.choice([0.5, 1.0, 3.7, 8.2, 20.1], count)
    fixed = bool(rng.integers(2))
    return [Share(int(pieces[n]), float(times[n]), fixed and n == 0) for n in range(count)]


def loads(shares: list[Share], ranges: list[BlockRange | None], num_blocks: int) -> list[float]:
    """What each block of a grid has to do, as the kernel deals it out."""
    busy_us, offset = [0.0] * num_blocks, 0
    for share, blocks in zip(shares, ranges, strict=True):
        for piece in range(share.num_pieces):
            block = (0 if share.fixed else offset) + piece
            if blocks is not None and num_blocks >= blocks.first + blocks.width:
                block = blocks.first + piece % blocks.width
            busy_us[block % num_blocks] += share.piece_us
        offset += share.num_pieces
    return busy_us


@pytest.mark.parametrize("chunk", range(4))
def test_ranges_are_inside_of_the_grid_and_worth_it(chunk: int) -> None:
    chosen = 0
    for seed in range(50 * chunk, 50 * chunk + 50):
        rng = np.random.default_rng(seed)
        shares, num_blocks = random_shares(rng), int(rng.choice([1, 2, 3, 7, 16, 132]))
        ranges = block_ranges(shares, num_blocks)
        assert len(ranges) == len(shares)
        if all(blocks is None for blocks in ranges):
            continue
        chosen += 1
        for share, blocks in zip(shares, ranges, strict=True):
            assert (blocks is None) == (share.fixed or not share.num_pieces)
            assert blocks is None or (blocks.first >= 0 and 1 <= blocks.width <= num_blocks - blocks.first)
        default = loads(shares, [None] * len(shares), num_blocks)
        assert max(loads(shares, ranges, num_blocks)) < max(default)
    assert chosen > 5


def test_long_pieces_get_the_blocks_that_others_leave_free() -> None:
    """A region has the first blocks; by default what follows would begin at its first one again."""
    shares = [Share(4, 1.0, fixed=True), Share(4, 1.0), Share(4, 10.0)]
    assert block_ranges(shares, 8) == [None, BlockRange(0, 4), BlockRange(4, 4)]
    assert block_ranges(shares[:1], 8) == [None]
    assert block_ranges([Share(4, 1.0), Share(4, 1.0)], 8) == [None, None]


def _updates() -> Program:
    """Gradients of several depths with an optimizer's step, and sums: tasks of one stage with unlike pieces."""
    b, outputs = ProgramBuilder(), []
    for number, (rows, columns, depth) in enumerate(((33, 65, 300), (64, 64, 16), (17, 40, 100))):
        x, g = b.input(f"x{number}", (depth, rows)), b.input(f"g{number}", (depth, columns))
        w, m = b.input(f"w{number}", (rows, columns)), b.input(f"m{number}", (rows, columns))
        m = b.op("add", b.op("mul", m, 0.9), b.op("mul", b.op("mm", x.T, g), 0.1))
        outputs += [b.op("sub", w, b.op("mul", m, 0.01)), m]
    z = b.input("z", (50, 70))
    return b.build([*outputs, b.op("sum", b.op("mul", z, z), dims=(0,))])


@pytest.mark.parametrize("num_sms", [3, 5, 8])
def test_every_piece_once_on_any_grid(num_sms: int) -> None:
    """In place: a piece that two blocks had, or one twice, would be a race or another result."""
    program = _updates()
    inputs = [np.random.default_rng(0).standard_normal(spec.shape, np.float32) for spec in program.tensor_inputs]
    inplace = {0: 2, 1: 3, 2: 6, 3: 7, 4: 10, 5: 11}
    target = replace(Target.preset("sm_90a"), num_sms=num_sms)
    generated = generate(program, target=target, region_pieces=0, inplace_outputs=inplace)
    assert "tk_range_first(" in generated.source[generated.source.index("__launch_bounds__") :]
    planned = min(generated.max_work_blocks, num_sms * generated.blocks_per_sm)
    found: Counter[tuple[bytes, ...]] = Counter()
    for num_blocks in (1, 2, planned - 1, planned, planned + 1, planned + 7):
        result = emulate(generated, inputs, num_blocks=num_blocks, order=num_blocks)
        assert_close(result.outputs, program, inputs)
        found[tuple(bits(output) for output in result.outputs)] += 1
    assert len(found) == 1
