"""Where a step's time goes: device time of each stage and each part of a block region.

``python bench/profile_stages.py pinn mnist`` compiles a workload's kernel with time stamps, runs it many
times and prints the median time from each stamp to the next; ``--steps 100`` looks at the last step of a
launch of 100. Needs a GPU and torch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

from machine import require_device  # noqa: E402
from trainkernel_runner import TrainkernelTrainer  # noqa: E402
from workloads import GROUPS, WORKLOADS, Workload, named  # noqa: E402

from trainkernel.stamps import read_stamps  # noqa: E402

WARMUP_LAUNCHES, LAUNCHES = 20, 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", default=["base"], metavar="NAME", help="workloads or groups of them")
    parser.add_argument("--steps", type=int, default=1, help="per launch (default 1)")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=JSON")
    arguments = parser.parse_args()
    unknown = set(arguments.workloads) - {*GROUPS, *WORKLOADS}
    if unknown:
        parser.error(f"no workload {', '.join(sorted(unknown))}; there are {', '.join([*GROUPS, *WORKLOADS])}")
    require_device("cuda:0")
    options = {name: json.loads(value) for name, value in (text.split("=") for text in arguments.option)}
    for workload in named(arguments.workloads):
        profile(workload, arguments.steps, options)


def profile(workload: Workload, steps: int, options: dict[str, Any]) -> None:
    """Print the stages of one workload."""
    import torch

    stream = torch.cuda.current_stream()
    trainer = TrainkernelTrainer(workload, "cuda:0", stream, steps, {**options, "stamps": True})
    kernel = trainer.kernel
    samples = read_stamps(kernel, trainer.launch, trainer.bound, WARMUP_LAUNCHES + LAUNCHES)[WARMUP_LAUNCHES:]
    total_us = statistics.median(sample.total_us for sample in samples)
    print(f"\n{workload.name} {options}, {steps} steps: {kernel.resource_usage()}")
    print(f"  {total_us / steps:7.2f} us per step")
    for number, name in enumerate(kernel.stats.stamps):
        print(f"  {statistics.median(sample.intervals_us[number] for sample in samples):7.2f} us  {name}")


if __name__ == "__main__":
    main()
