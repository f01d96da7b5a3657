"""Time per training step: trainkernel beside torch, JAX and a model floor.

::

    python bench/run_steps.py --workload base --compile
    python bench/run_steps.py --workload tiny ppo --out results.json
    python bench/run_steps.py --workload all --small --device reference

Each workload runs in a process of its own, all runners back to back on the same device. A runner is
timed only after its loss agrees with the first peer's; one that fails is recorded with its error,
the others go on, and the exit code is 1. On a host device (the last line) losses alone are compared:
``--small`` makes that quick.

The runners are ``torch_eager``, ``torch_graph`` and ``torch_compile_graph`` (perceptrons only),
``jax_jit``, ``jax_scan`` (many steps in a launch), ``trainkernel`` (one step in a launch, then
many), and ``floor``. ``_sync`` after a name: the host waits for the loss of each step. Rows of the
same workload and precision in the file of results are replaced, all others stay.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

from machine import (  # noqa: E402
    HOST_DEVICES,
    describe_machine,
    new_run_id,
    own_stream,
    require_device,
    results_path,
    write_json,
)
from measurements import Session, all_rows  # noqa: E402
from parts import run_part  # noqa: E402
from rows import Row, failures, new_row, print_table  # noqa: E402
from workloads import GROUPS, WORKLOADS, Workload, named  # noqa: E402


def main() -> int:
    arguments = parse()
    require_device(arguments.device)
    if arguments.part:
        name, path = arguments.part
        measure(WORKLOADS[name], arguments, Path(path))
        return 0
    machine, run_id = describe_machine(arguments.device), new_run_id()
    out = arguments.out or (None if arguments.device in HOST_DEVICES else results_path(machine["device"]))
    failed: list[Row] = []
    for workload in named(arguments.workload):
        rows, problem = run_part(workload.name, arguments.timeout)
        rows = rows or []
        if problem is not None:
            rows.append(new_row(workload.name, "process", arguments.precision, error=problem))
        rows = [row | {"run_id": run_id} for row in rows]
        print_table(rows)
        failed += failures(rows)
        if out is not None:
            write_json(out, merged(out, machine, rows))
    return 1 if failed else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", nargs="+", default=["all"], choices=[*GROUPS, *WORKLOADS], metavar="NAME")
    parser.add_argument("--out", type=Path, help="JSON file (default: bench/results/<device>.json)")
    parser.add_argument("--device", default="cuda:0", help="cuda:N, reference or emulator")
    parser.add_argument(
        "--precision", default="float32", choices=["float32", "tf32"], help="of the peers' f32 products"
    )
    parser.add_argument("--compile", action="store_true", help="also torch.compile in a CUDA graph")
    parser.add_argument(
        "--unroll", type=int, nargs="+", default=[1], metavar="N", help="of JAX's scan; the fastest counts"
    )
    parser.add_argument("--small", action="store_true", help="shrink batches and widths, to compare losses only")
    parser.add_argument("--floor-target", default="sm_90a", help="target of the floor model (default sm_90a: H200)")
    parser.add_argument("--timeout", type=float, default=500, help="seconds allowed per workload (default 500)")
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="argument of tk.jit, value in JSON, for example arch='\"sm_90a\"' or threads_per_block=512",
    )
    parser.add_argument("--part", nargs=2, metavar=("NAME", "PATH"), help=argparse.SUPPRESS)
    return parser.parse_args()


def measure(workload: Workload, arguments: argparse.Namespace, path: Path) -> None:
    """Leave the rows of one workload in a file, again after each of them."""
    session = Session(
        workload.small() if arguments.small else workload,
        arguments.device,
        own_stream(arguments.device),
        precision=arguments.precision,
        compiled=arguments.compile,
        unrolls=arguments.unroll,
        options=jit_options(arguments.option),
    )
    rows: list[Row] = []
    for row in all_rows(session, arguments.floor_target):
        rows.append(row)
        path.write_text(json.dumps(rows))


def jit_options(texts: list[str]) -> dict[str, Any]:
    """``NAME=JSON`` texts as keyword arguments."""
    return {name: json.loads(value) for name, _, value in (text.partition("=") for text in texts)}


def merged(path: Path, machine: dict[str, Any], rows: list[Row]) -> dict[str, Any]:
    """A file's report with new rows in place of those of the same workloads and precision.

    A file of another device, driver or versions is not added to: its rows are dropped.
    """
    replaced = {(row["workload"], row["precision"]) for row in rows}
    kept: list[Row] = []
    if path.exists():
        report = json.loads(path.read_text())
        if all(report.get(name) == machine[name] for name in ("device", "driver", "versions")):
            kept = [row for row in report["rows"] if (row["workload"], row["precision"]) not in replaced]
    return {**machine, "rows": kept + rows}


if __name__ == "__main__":
    sys.exit(main())
