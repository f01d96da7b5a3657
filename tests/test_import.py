"""What ``import trainkernel`` brings in, seen from a process of its own."""

from __future__ import annotations

import subprocess
import sys

import trainkernel as tk


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=True)


def test_import_loads_nothing_heavy() -> None:
    code = (
        "import sys, trainkernel\n"
        "roots = {name.split('.')[0] for name in sys.modules}\n"
        "heavy = roots & {'cuda', 'torch', 'jax', 'jaxlib', 'nvidia'}\n"
        "parts = {name for name in sys.modules if name.startswith('trainkernel.')}\n"
        "late = {name for name in parts if name.split('.')[1] in ('codegen', 'runtime', 'emulator', 'compiler')}\n"
        "print(sorted(heavy | late))\n"
    )
    assert run_python("-W", "error", "-c", code).stdout.strip() == "[]"


def test_import_time_report_names_no_cuda_module() -> None:
    report = run_python("-X", "importtime", "-c", "import trainkernel").stderr
    names = [line.split("|")[-1].strip() for line in report.splitlines() if line.startswith("import time:")]
    assert "trainkernel" in names
    assert not [name for name in names if name.split(".")[0] in ("cuda", "torch", "jax")]


def test_every_public_name_exists() -> None:
    for name in tk.__all__:
        assert getattr(tk, name) is not None, name


def test_compile_is_a_function_whatever_was_imported() -> None:
    code = "import trainkernel.compiler, trainkernel as tk; print(callable(tk.compile), callable(tk.compile))"
    assert run_python("-c", code).stdout.strip() == "True True"


def test_an_unknown_attribute_is_an_attribute_error() -> None:
    assert not hasattr(tk, "no_such_thing")
