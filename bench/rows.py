"""Rows of results: what they hold, which of them are peers, and how they are printed."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

Row = dict[str, Any]

OURS, FLOOR, SYNC = "trainkernel", "floor", "_sync"


def new_row(workload: str, runner: str, precision: str, **values: Any) -> Row:
    """A row with all fields; what is not given is unknown.

    ``spread_us`` is the largest less the smallest sample. ``refused`` marks an error that is no
    failure: what was asked for does not exist.
    """
    row: Row = {
        "workload": workload,
        "runner": runner,
        "us_per_step": None,
        "spread_us": None,
        "steps_per_launch": 1,
        "precision": precision,
        "run_id": None,
        "loss_after_20": None,
        "variant": "",
        "error": None,
        "refused": False,
    }
    return row | values


def is_peer(row: Row) -> bool:
    """Whether a row is another library's time for steps that nobody waits for."""
    return not (row["runner"].startswith(OURS) or row["runner"] == FLOOR or row["runner"].endswith(SYNC))


def fastest(rows: Iterable[Row]) -> Row | None:
    """The row of the least time; None where nothing was timed."""
    timed = [row for row in rows if row["us_per_step"] is not None]
    return min(timed, key=lambda row: float(row["us_per_step"]), default=None)


def failures(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row["error"] is not None and not row.get("refused")]


def print_table(rows: Sequence[Row]) -> None:
    """One line a row; ratios to the fastest peer and to the floor."""
    peer = fastest(row for row in rows if is_peer(row))
    floor = fastest(row for row in rows if row["runner"] == FLOOR)
    print(
        f"\n{'workload':<12}{'runner':<26}{'steps':>5} {'us/step':>10} {'spread':>9} {'/peer':>8} {'/floor':>8} "
        f"{'loss@20':>10}  variant"
    )
    for row in rows:
        time_us = row["us_per_step"]
        print(
            f"{row['workload']:<12}{row['runner']:<26}{row['steps_per_launch']:>5} {_number(time_us, 2):>10} "
            f"{_number(row['spread_us'], 2):>9} {_ratio(time_us, peer):>8} {_ratio(time_us, floor):>8} "
            f"{_number(row['loss_after_20'], 6):>10}  {row['error'] or row['variant']}"
        )
    ours = fastest(row for row in rows if row["runner"] == OURS)
    if ours and peer:
        time_us = ours["us_per_step"]
        print(
            f"{ours['workload']}: trainkernel takes {_ratio(time_us, peer)} of the time of the fastest peer, "
            f"{peer['runner']}, and {_ratio(time_us, floor)} times the floor"
        )
    sys.stdout.flush()


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _ratio(time_us: float | None, base: Row | None) -> str:
    return "-" if time_us is None or base is None or not base["us_per_step"] else f"{time_us / base['us_per_step']:.2f}"
