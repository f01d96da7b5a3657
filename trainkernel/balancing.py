"""Tiles of products that share a stage: fewer, larger ones where the stage has more pieces than blocks.

A product's plan is chosen as if it had the device to itself: many small tiles, so that every multiprocessor has one.
Beside others (an optimizer's updates of several weights), small tiles come on top of what the blocks have already.
What runs beside a product depends on what is fused, so only tiles count that add up each sum in the same order: the
bits stay.
"""

from __future__ import annotations

from dataclasses import replace

from trainkernel.block_ranges import Share, share_of, stage_us
from trainkernel.options import Options
from trainkernel.product_plans import ProductPlan
from trainkernel.products import larger_tiles
from trainkernel.schedule import Stage, Task
from trainkernel.target import MAX_SHARING_THREADS, Target

_LEAST_GAIN_US = 0.3


def balanced(stages: tuple[Stage, ...], target: Target, options: Options) -> tuple[Stage, ...]:
    """The stages with tiles by which the last block of each finishes sooner."""
    if options.threads <= MAX_SHARING_THREADS:
        return stages  # two blocks share a multiprocessor: they have not each its time
    return tuple(_balanced(stage, target, options) for stage in stages)


def _balanced(stage: Stage, target: Target, options: Options) -> Stage:
    tasks = list(stage.tasks)
    if len(tasks) < 2 or stage.num_pieces <= target.num_sms:
        return stage
    shares = [share_of([task], target, options.threads) for task in tasks]
    best_us = stage_us(shares, target.num_sms)
    for number, task in enumerate(tasks):
        for other in _with_larger_tiles(task, target, options):
            trial: list[Share] = list(shares)
            trial[number] = share_of([other], target, options.threads)
            trial_us = stage_us(trial, target.num_sms)
            if trial_us + _LEAST_GAIN_US < best_us:
                tasks[number], shares, best_us = other, trial, trial_us
    return replace(stage, tasks=tuple(tasks))


def _with_larger_tiles(task: Task, target: Target, options: Options) -> list[Task]:
    if task.region is not None or task.root is None or not isinstance(task.plan, ProductPlan):
        return []
    plans = larger_tiles(task.plan, task.root, target, options)
    return [replace(task, plan=plan, num_pieces=plan.num_pieces) for plan in plans]
