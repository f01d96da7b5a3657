"""A part of a benchmark in a process of its own, which a kernel that hangs or crashes cannot outlive."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


def run_part(name: str, timeout_s: float) -> tuple[Any, str | None]:
    """Run this program again with its own arguments and ``--part NAME PATH``.

    Returns what it left in that JSON file, or None, and what went wrong with the process, or None.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "part.json"
        command = [sys.executable, *sys.argv, "--part", name, str(path)]
        problem = None
        try:
            code = subprocess.run(command, timeout=timeout_s, check=False).returncode
            problem = f"the process of {name} ended with exit code {code}" if code else None
        except subprocess.TimeoutExpired:
            problem = f"the process of {name} was ended after {timeout_s:g} s"
        try:
            return json.loads(path.read_text()), problem
        except (OSError, ValueError):
            return None, problem or f"the process of {name} left no report"
