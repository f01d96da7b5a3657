"""How the time per step depends on width, depth, batch and steps per launch: trainkernel beside JAX's scan.

::

    python bench/sweep.py
    python bench/sweep.py --axis width batch --out sweep.json

One size of a perceptron (relu, squared error, Adam, float32) is changed at a time. Each axis runs in
a process of its own; as in ``run_steps.py`` losses are compared before anything is timed, and a
point that fails is recorded with its error. On a host device, losses of small sizes are compared.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from functools import partial
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
from measurements import Session, jax_variants, rows_of, trainkernel_variants  # noqa: E402
from parts import run_part  # noqa: E402
from rows import OURS, SYNC, Row, failures, new_row  # noqa: E402
from workloads import Mlp  # noqa: E402

AXES: dict[str, tuple[int, ...]] = {
    "width": (16, 32, 64, 128, 256, 512, 1024),
    "depth": (2, 4, 8, 16),
    "batch": tuple(2**power for power in (5, 8, 10, 12, 14, 16, 18, 20)),
    "steps": (1, 10, 100, 1000, 10_000),
}
CENTRE = {"width": 64, "depth": 3, "batch": 1024, "steps": 100}
HOST_AXES: dict[str, tuple[int, ...]] = {"width": (4, 8), "depth": (2, 3), "batch": (8, 16), "steps": (1, 10, 100)}
HOST_CENTRE = {"width": 4, "depth": 2, "batch": 8, "steps": 10}


def main() -> int:
    arguments = parse()
    require_device(arguments.device)
    if arguments.part:
        axis, path = arguments.part
        measure(axis, arguments.device, Path(path))
        return 0
    machine, run_id = describe_machine(arguments.device), new_run_id()
    out = arguments.out or (None if arguments.device in HOST_DEVICES else results_path(machine["device"], "_sweep"))
    rows: list[Row] = []
    for axis in arguments.axis:
        part, problem = run_part(axis, arguments.timeout)
        part = part or []
        if problem is not None:
            part.append(new_row("sweep", "process", "float32", error=problem, axis=axis))
        rows += [row | {"run_id": run_id} for row in part]
        if out is not None:
            write_json(out, {**machine, "rows": rows})
    return 1 if failures(rows) else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--axis", nargs="+", default=list(AXES), choices=list(AXES))
    parser.add_argument("--device", default="cuda:0", help="cuda:N, reference or emulator")
    parser.add_argument("--out", type=Path, help="JSON file (default: bench/results/<device>_sweep.json)")
    parser.add_argument("--timeout", type=float, default=400, help="seconds allowed per axis (default 400)")
    parser.add_argument("--part", nargs=2, metavar=("AXIS", "PATH"), help=argparse.SUPPRESS)
    return parser.parse_args()


def points(axis: str, device: str) -> Iterator[dict[str, int]]:
    """The sizes along an axis."""
    on_host = device in HOST_DEVICES
    values, centre = (HOST_AXES, HOST_CENTRE) if on_host else (AXES, CENTRE)
    for value in values[axis]:
        yield centre | {axis: value}


def measure(axis: str, device: str, path: Path) -> None:
    """Leave the rows of one axis in a file, again after each point."""
    stream = own_stream(device)
    rows: list[Row] = []
    for point in points(axis, device):
        rows += [row | {"axis": axis, **point} for row in measure_point(point, device, stream)]
        print_point(axis, point, rows[-2:])
        path.write_text(json.dumps(rows))


def measure_point(point: dict[str, int], device: str, stream: Any) -> list[Row]:
    """JAX's row and trainkernel's; one step is jitted without a scan or a loop."""
    layers = (16, *(point["width"],) * point["depth"], 16)
    session = Session(Mlp(name="sweep", layers=layers, batch=point["batch"]), device, stream)
    steps = point["steps"]
    rows = []
    for runner, variants in (("jax", jax_variants), (OURS, trainkernel_variants)):
        rows += rows_of(session, runner, partial(variants, session, steps), steps)
    return [row for row in rows if not row["runner"].endswith(SYNC)]


def print_point(axis: str, point: dict[str, int], rows: list[Row]) -> None:
    shown = ", ".join(
        f"{row['runner']} {'-' if row['us_per_step'] is None else format(row['us_per_step'], '.2f')} us"
        + (f" ({row['error']})" if row["error"] else "")
        for row in rows
    )
    print(f"{axis} {point[axis]:>8}: {shown}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
