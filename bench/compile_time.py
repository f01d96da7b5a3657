"""Time from a Python step to its cubin: tracing, generating, NVRTC; and the same with the cubin in the cache.

::

    python bench/compile_time.py --out bench/results/compile_time.json

Needs no GPU. The demo's step and two of ``examples/`` are each measured in a process of its own,
twice with one empty cache folder: the first time cold, the second from the cache. NVRTC's own
cache is off. The import of trainkernel, a small step that warms NVRTC up, and the first values of
the parameters are not counted.
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


def in_process(name: str, arch: str, cache: str) -> dict[str, Any]:
    """``measure`` in a process of its own with a cache folder."""
    command = [sys.executable, __file__, "--arch", arch, "--only", name]
    environment = {**os.environ, "TRAINKERNEL_CACHE_DIR": cache, "CUDA_CACHE_DISABLE": "1"}
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="sm_90")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--only", choices=list(GOALS_S), help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    if parsed.only:
        print(json.dumps(measure(parsed.only, parsed.arch)))
        return
    from trainkernel.runtime.nvrtc import nvrtc_version

    rows = []
    for name in GOALS_S:
        with tempfile.TemporaryDirectory() as cache:
            for state in ("cold", "cached"):
                row = {"step": name, "cubin": state, **in_process(name, parsed.arch, cache)}
                rows.append(row)
                goal = f" (goal {GOALS_S[name]} s)" if state == "cold" else ""
                print(
                    f"{name:12} {state:7} trace {row['trace_s']:.3f} s, generate {row['generate_s']:.3f} s, "
                    f"cubin {row['cubin_s']:.3f} s, total {row['total_s']:.3f} s{goal}"
                )
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
