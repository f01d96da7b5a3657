"""Where a step's time goes: device time of each stage, by stamps after the grid barriers.

``python bench/profile_stages.py pinn mnist`` compiles a workload's kernel of one step with stamps
(``stamps.py``), runs it many times and prints the median time between stamps beside the stage's
tasks. Needs a GPU and torch.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

from machine import require_device  # noqa: E402
from stamps import interval_samples, stamped_kernels  # noqa: E402
from trainkernel_runner import TrainkernelTrainer  # noqa: E402
from workloads import GROUPS, WORKLOADS, Workload, named  # noqa: E402

WARMUP_LAUNCHES, LAUNCHES = 50, 250


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", default=["base"], metavar="NAME", help="workloads or groups of them")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=INT")
    arguments = parser.parse_args()
    unknown = set(arguments.workloads) - {*GROUPS, *WORKLOADS}
    if unknown:
        parser.error(f"no workload {', '.join(sorted(unknown))}; there are {', '.join([*GROUPS, *WORKLOADS])}")
    require_device("cuda:0")
    options = {name: int(value) for name, value in (text.split("=") for text in arguments.option)}
    for workload in named(arguments.workloads):
        try:
            profile(workload, options)
        except ValueError as error:
            print(f"\n{workload.name}: {error}")


def profile(workload: Workload, options: dict[str, Any]) -> None:
    """Print the stages of one workload."""
    import torch

    with stamped_kernels():
        trainer = TrainkernelTrainer(workload, "cuda:0", torch.cuda.current_stream(), options=options)
    kernel = trainer.kernel
    barriers = kernel.plan.barriers
    samples = interval_samples(trainer.launch, trainer.bound, sum(barriers), WARMUP_LAUNCHES + LAUNCHES)
    samples = samples[WARMUP_LAUNCHES:]
    print(f"\n{workload.name} {options}: {kernel.resource_usage()}")
    for number, tasks in enumerate(tasks_between_barriers(kernel)):
        print(f"  {statistics.median(sample[number] for sample in samples):6.2f} us  {tasks[0]}")
        for task in tasks[1:]:
            print(f"             {task}")
    print(f"  {statistics.median(map(sum, samples)):6.2f} us  in all")


def tasks_between_barriers(kernel: Any) -> list[list[str]]:
    """The tasks of each stretch from one barrier to the next."""
    groups: list[list[str]] = []
    for stage, waits in zip(kernel.schedule.stages, kernel.plan.barriers, strict=True):
        if waits or not groups:
            groups.append([])
        groups[-1] += [str(task) for task in stage.tasks]
    return groups


if __name__ == "__main__":
    main()
