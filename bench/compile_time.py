"""Time from a Python step to its cubin: tracing, generating, NVRTC; and the same from the caches.

::

    python bench/compile_time.py --out bench/results/compile_time.json

Needs no GPU. The demo's step and two of ``examples/`` are each measured in processes of their own
with one cache folder, empty at first:

- ``cold``: nothing is in the cache.
- ``cached``: the cubin is found by its source, so only NVRTC is skipped.
- ``warm``: the compiled Program is found, so nothing is generated. ``find_s`` is the key, the
  entry and its check; the median of several processes, by total.

NVRTC's own cache is off. The imports of trainkernel and of the step's module, and the first values
of the parameters are not counted; in the first two rows neither is a small step that warms NVRTC
up. In the last everything is as a new process finds it, but for the bytecode of the modules.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

GOALS_S = {"demo": 0.3, "digits_mlp": 0.5, "transformer": 3.0}
"""Cold: of the demo's step NVRTC alone, of the others the total."""
WARM_GOAL_S = 0.02
NUM_WARM = 15


def arguments(name: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The jitted function of an example, and a call's arguments at the size of its script."""
    import numpy as np

    import trainkernel as tk
    from trainkernel import demo, digits_step, random

    if name == "demo":
        return digits_step.compiled_step("float32"), demo.initial_arguments(), {}
    module = __import__(name)
    if name == "digits_mlp":
        images, labels = module.load_digits()
        function = tk.jit(module.train, donate_argnums=0, static_argnames="steps")
        data = (images[: module.NUM_TRAIN], labels[: module.NUM_TRAIN].astype(np.int32))
        return function, (module.init(128), *data, random.key(1)), {"steps": 1000}
    text, num_letters = module.characters()
    return tk.jit(module.step, donate_argnums=0), (module.init(64, num_letters), text, random.key(1)), {}


def measure(name: str, arch: str) -> dict[str, Any]:
    """Seconds of each stage in this process."""
    import trainkernel as tk
    from trainkernel.codegen import generate
    from trainkernel.runtime.nvrtc import compile_cubin

    builder = tk.ProgramBuilder()
    warm = builder.build([builder.op("neg", builder.input("x", (4,)))])
    compile_cubin(generate(warm).source, arch)
    function, args, kwargs = arguments(name)
    start = time.perf_counter()
    step = function.lower(*args, **kwargs)
    traced = time.perf_counter()
    kernel = tk.compile(step.program, arch=arch, inplace_outputs=dict(step.inplace_outputs))
    generated = time.perf_counter()
    size = len(kernel.cubin)
    done = time.perf_counter()
    return {
        "trace_s": round(traced - start, 4),
        "generate_s": round(generated - traced, 4),
        "cubin_s": round(done - generated, 4),
        "total_s": round(done - start, 4),
        "operations": len(step.program.operations),
        "source_lines": kernel.source.count("\n"),
        "cubin_bytes": size,
        "grid_barriers": kernel.stats.grid_barriers,
    }


def measure_warm(name: str, arch: str) -> dict[str, Any]:
    """Seconds until the kernel is there in a process that finds it in the cache."""
    import trainkernel as tk

    function, args, kwargs = arguments(name)
    start, cpu = time.perf_counter(), time.process_time()
    step = function.lower(*args, **kwargs)
    traced = time.perf_counter()
    kernel = tk.compile(step.program, arch=arch, inplace_outputs=dict(step.inplace_outputs))
    size = len(kernel.cubin)
    done, cpu = time.perf_counter(), time.process_time() - cpu
    if "trainkernel.codegen" in sys.modules or "cuda.bindings.nvrtc" in sys.modules:
        raise SystemExit(f"{name} was not found in the cache")
    return {
        "trace_s": round(traced - start, 4),
        "find_s": round(done - traced, 4),
        "total_s": round(done - start, 4),
        "cpu_s": round(cpu, 4),
        "operations": len(step.program.operations),
        "cubin_bytes": size,
    }


def in_process(name: str, arch: str, cache: str, state: str) -> dict[str, Any]:
    """One measurement in a process of its own with a cache folder."""
    command = [sys.executable, __file__, "--arch", arch, "--only", name, "--state", state]
    environment = {**os.environ, "TRAINKERNEL_CACHE_DIR": cache, "CUDA_CACHE_DISABLE": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise SystemExit(f"the process of {name}, {state}, ended with {done.returncode}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def forget_programs(cache: str) -> None:
    """Remove the compiled Programs of a cache and leave the cubins by source."""
    from trainkernel.runtime.cache import unpack_entry

    for path in Path(cache).rglob("*.tkc"):
        entry = unpack_entry(path.parent.name + path.stem, path.read_bytes())
        if entry is not None and "facts" in entry.metadata:
            path.unlink()


def measure_all(name: str, arch: str) -> list[dict[str, Any]]:
    """The rows of one step."""
    with tempfile.TemporaryDirectory() as cache:
        cold = in_process(name, arch, cache, "cold")
        forget_programs(cache)
        cached = in_process(name, arch, cache, "cached")
        runs = [in_process(name, arch, cache, "warm") for _ in range(NUM_WARM)]
    warm = sorted(runs, key=lambda run: run["total_s"])[NUM_WARM // 2]
    warm["total_s_range"] = [min(run["total_s"] for run in runs), max(run["total_s"] for run in runs)]
    states = (("cold", cold), ("cached", cached), ("warm", warm))
    return [{"step": name, "cubin": state, **row} for state, row in states]


def describe(row: dict[str, Any]) -> str:
    """One line of a row."""
    stages = [f"{key.removesuffix('_s')} {row[key]:.3f} s" for key in row if key.endswith("_s")]
    goals = {"cold": GOALS_S[row["step"]], "warm": WARM_GOAL_S}
    goal = f" (goal {goals[row['cubin']]} s)" if row["cubin"] in goals else ""
    return f"{row['step']:12} {row['cubin']:7} {', '.join(stages)}{goal}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="sm_90")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--only", choices=list(GOALS_S), help=argparse.SUPPRESS)
    parser.add_argument("--state", choices=("cold", "cached", "warm"), default="cold", help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    if parsed.only:
        measured = (measure_warm if parsed.state == "warm" else measure)(parsed.only, parsed.arch)
        print(json.dumps(measured))
        return
    from trainkernel.runtime.nvrtc import nvrtc_version

    rows = []
    for name in GOALS_S:
        for row in measure_all(name, parsed.arch):
            rows.append(row)
            print(describe(row), flush=True)
    report = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "processor": platform.processor() or platform.machine(),
        "num_cores": os.cpu_count(),
        "nvrtc": ".".join(map(str, nvrtc_version())),
        "python": platform.python_version(),
        "arch": parsed.arch,
        "rows": rows,
    }
    if parsed.out:
        parsed.out.parent.mkdir(parents=True, exist_ok=True)
        parsed.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
