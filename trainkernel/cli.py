"""``python -m trainkernel``: compile a saved Program, look at one, or run the demo.

A mistake of the user's is one line on standard error and exit code 2.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkernel.errors import OptionError, ProgramError, TrainkernelError
from trainkernel.ir import Program
from trainkernel.options import PRECISIONS, SWITCHES, Options, describe_choices
from trainkernel.target import PRESETS, Target

if TYPE_CHECKING:
    from trainkernel.compiler import Kernel

DEFAULT_ARCH = "sm_90a"
DEMO_STEPS = 330
PROGRAM_FILE, SETTINGS_FILE = "program.json", "settings.json"
_PROGRAM_HELP = (
    "JSON file of a Program (Program.to_json), - for standard input, or a directory that compile -o or demo --save "
    "wrote: its settings count where no option says otherwise"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code: 0, or 2 for a mistake or a refusal."""
    if sys.stdout is None:  # closed by `>&-`
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # for the rest of the process
    parser = _parser()
    parsed = parser.parse_args(arguments)
    run: Callable[[argparse.Namespace], None] = parsed.run
    try:
        run(parsed)
        sys.stdout.flush()
    except TrainkernelError as error:
        return _fail(str(error))
    except BrokenPipeError:
        # The reader, `head` for example, has what it wanted. Without this the interpreter would try
        # to write the rest at exit, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        return _fail(f"{place}{error.strerror or error}")
    except KeyboardInterrupt:
        if sys.stderr is not None and sys.stderr.isatty():
            print(file=sys.stderr)  # the line has a progress bar, or the terminal's ^C
        return _fail("interrupted", code=130)
    return 0


def _fail(message: str, code: int = 2) -> int:
    # One line: a program error prints its operation on the next lines.
    print("trainkernel: " + " ".join(line.strip() for line in message.splitlines() if line.strip()), file=sys.stderr)
    return code


# ---------------------------------------------------------------------------- arguments


def _parser() -> argparse.ArgumentParser:
    from trainkernel import __version__

    parser = argparse.ArgumentParser(
        prog="python -m trainkernel", description="Compile training steps to CUDA kernels."
    )
    parser.add_argument("--version", action="version", version=f"trainkernel {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")

    compiling = commands.add_parser(
        "compile", help="write a program's kernel: CUDA source, cubin, schedule, memory plan"
    )
    compiling.add_argument("program", help=_PROGRAM_HELP)
    compiling.add_argument("--arch", help=f"architecture of the cubin (default: the directory's, else {DEFAULT_ARCH})")
    compiling.add_argument("-o", "--output", required=True, metavar="DIR", help="directory to write to")
    _add_options(compiling)
    compiling.set_defaults(run=_compile)

    inspecting = commands.add_parser("inspect", help="print a program, its stages, their times and its memory plan")
    inspecting.add_argument("program", help=_PROGRAM_HELP)
    inspecting.add_argument(
        "--target", "--arch", dest="arch", help=f"{', '.join(PRESETS)} (default: the directory's, else {DEFAULT_ARCH})"
    )
    inspecting.add_argument("--measure", action="store_true", help="run the kernel on a GPU and show measured times")
    inspecting.add_argument("--device", help="the GPU to measure on (default cuda)")
    inspecting.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help="of a loop whose length is a scalar (default 100, or its maximum if that is less)",
    )
    inspecting.add_argument("--html", metavar="FILE", help="also write the stages and a timeline to one HTML page")
    inspecting.add_argument("--trace", metavar="FILE", help="also write a trace for ui.perfetto.dev")
    _add_options(inspecting)
    inspecting.set_defaults(run=_inspect)

    demo = commands.add_parser("demo", help="train a digit classifier with one kernel per step")
    demo.add_argument(
        "--device",
        help="cuda:0, emulator or reference (default: $TRAINKERNEL_DEVICE, else a GPU if there is one, else reference)",
    )
    demo.add_argument("--steps", type=int, default=DEMO_STEPS, help=f"training steps (default {DEMO_STEPS})")
    demo.add_argument("--dtype", default="float32", help="float32 or bfloat16: operands of the products")
    demo.add_argument(
        "--arch", default=DEFAULT_ARCH, help=f"what to compile for without a GPU (default {DEFAULT_ARCH})"
    )
    demo.add_argument(
        "--save",
        metavar="DIR",
        help="write program, settings, schedule, plan, source and cubin to DIR, which compile and inspect read",
    )
    demo.set_defaults(run=_demo)
    return parser


def _add_options(parser: argparse.ArgumentParser) -> None:
    """One flag per tuning option of ``generate``, and ``--inplace``."""
    parser.add_argument(
        "--inplace",
        metavar="OUT:IN",
        action="append",
        default=[],
        help="output index and the input index whose storage it updates; may be repeated",
    )
    group = parser.add_argument_group("tuning options (left out: the cost model chooses)")
    for field in dataclasses.fields(Options):
        flag = "--" + field.name.replace("_", "-")
        if field.name in SWITCHES:
            group.add_argument(flag, choices=("on", "off"))
        elif field.name == "precision":
            group.add_argument(flag, choices=PRECISIONS)
        else:
            group.add_argument(flag, type=int, metavar="N", help=describe_choices(field.name) or "at least 1")


def _options(parsed: argparse.Namespace) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for field in dataclasses.fields(Options):
        value = getattr(parsed, field.name)
        if value is not None:
            options[field.name] = value == "on" if field.name in SWITCHES else value
    inplace: dict[int, int] = {}
    for text in parsed.inplace:
        match = re.fullmatch("([0-9]{1,9}):([0-9]{1,9})", text)
        if match is None:
            raise OptionError(f"--inplace needs OUTPUT_INDEX:INPUT_INDEX, for example 1:4, got {text[:40]!r}")
        output, target = int(match[1]), int(match[2])
        if inplace.setdefault(output, target) != target:
            raise OptionError(f"--inplace names input {inplace[output]} and input {target} for output {output}")
    if inplace:
        options["inplace_outputs"] = inplace
    return options


def read_program(path: str) -> tuple[Program, dict[str, Any]]:
    """A Program, and the settings that it was compiled with where they are known.

    Parameters
    ----------
    path : str
        A JSON file, ``-`` for standard input, or a directory that ``write_artifacts`` wrote.

    Raises
    ------
    ProgramError
        Naming the file.
    OSError
    """
    if path == "-" and sys.stdin is None:
        raise ProgramError("-: standard input is closed")
    folder = Path(path)
    is_folder = path != "-" and folder.is_dir()
    file = folder / PROGRAM_FILE if is_folder else folder
    content = sys.stdin.buffer.read() if path == "-" else file.read_bytes()
    try:
        program = Program.from_json(content.decode())
    except (ProgramError, UnicodeDecodeError) as error:
        raise ProgramError(f"{file}: {error}") from None
    return program, _read_settings(folder / SETTINGS_FILE) if is_folder else {}


def _read_settings(file: Path) -> dict[str, Any]:
    """``arch``, ``inplace_outputs`` and tuning options, as ``_write_settings`` wrote them."""
    try:
        settings = json.loads(file.read_bytes())
        settings["inplace_outputs"] = {int(output): target for output, target in settings["inplace_outputs"].items()}
        if not isinstance(settings["arch"], str):
            raise TypeError
    except (ValueError, TypeError, KeyError, AttributeError):
        raise OptionError(f'{file}: not settings with "arch" and "inplace_outputs" as compile -o writes them') from None
    return dict(settings)


def _write_settings(kernel: Kernel, options: Mapping[str, Any]) -> str:
    settings = {
        "arch": kernel.arch or kernel.stats.target.name,
        "inplace_outputs": {str(output): target for output, target in kernel.stats.inplace_outputs.items()},
        **options,
    }
    lines = ",\n".join(f'"{key}": {json.dumps(value)}' for key, value in settings.items())
    return f"{{\n{lines}\n}}\n"


def _compile_parsed(parsed: argparse.Namespace, device: str | None = None) -> tuple[Kernel, dict[str, Any]]:
    """The kernel that the arguments ask for, and the tuning options that were given.

    With a ``device`` it is one with time stamps that runs there; an architecture counts only if somebody named it.
    """
    program, settings = read_program(parsed.program)
    settings.update(_options(parsed))
    saved_arch = settings.pop("arch", None)
    arch = parsed.arch or saved_arch or (DEFAULT_ARCH if device is None else None)
    if device is not None:
        settings["stamps"] = True
    kernel = _compile_for(program, arch, settings, device)
    settings.pop("inplace_outputs", None)
    return kernel, settings


# ---------------------------------------------------------------------------- compile and inspect


def write_artifacts(
    directory: str | Path, kernel: Kernel, cubin: bytes | None, options: Mapping[str, Any] | None = None
) -> list[str]:
    """Write a kernel's stages to files and return their names.

    ``program.json``, ``settings.json`` (architecture, outputs in place, tuning options),
    ``schedule.txt``, ``plan.txt``, ``trainkernel_step.cu`` and, if given, ``trainkernel_step.cubin``.

    Raises
    ------
    OptionError
        If the directory is an empty text.
    OSError
    """
    if str(directory) == "":  # an unset shell variable, not the current directory
        raise OptionError("the directory to write to is an empty text; . is the current one")
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    generated = kernel.stats
    files: dict[str, str | bytes] = {
        PROGRAM_FILE: generated.program.to_json(),
        SETTINGS_FILE: _write_settings(kernel, options or {}),
        "schedule.txt": f"{generated.schedule}\n",
        "plan.txt": f"{generated.plan}\n",
        f"{generated.entry}.cu": generated.source,
    }
    if cubin is not None:
        files[f"{generated.entry}.cubin"] = cubin
    for name, content in files.items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return list(files)


def _compile_for(program: Program, arch: str | None, options: Mapping[str, Any], device: str | None = None) -> Kernel:
    """The kernel for an architecture (None: the device's), or for the portable target."""
    from trainkernel.compiler import compile

    if arch == "portable":
        return compile(program, device=device or "reference", target=Target.preset(arch), **options)
    return compile(program, device=device, arch=arch, **options)


def _counted(count: int, what: str) -> str:
    """``1 stage``, ``2 stages``."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def describe_counts(generated: Any) -> list[str]:
    """The counts of a generated kernel as lines of text."""
    return [
        f"{_counted(len({task.stage for task in generated.tasks}), 'stage')}, "
        f"{_counted(len(generated.tasks), 'task')}, {_counted(generated.grid_barriers, 'grid barrier')}",
        f"{generated.threads_per_block} threads per block, {generated.shared_bytes:,} bytes of shared memory, "
        f"workspace {generated.workspace_bytes:,} bytes",
        f"{generated.inlined_operations} operations computed where they are used, "
        f"{generated.tensor_core_operations} products on tensor cores",
        f"{generated.direct_outputs} outputs written by the task that computes them, "
        f"{generated.direct_state_commits} of them in place",
    ]


def describe_resources(source: str, arch: str, entry: str) -> str:
    """Registers and spills as ptxas reports them, in words."""
    from trainkernel.runtime.nvrtc import resource_statistics

    usage = resource_statistics(source, arch)[entry]
    spills = usage.spill_store_bytes + usage.spill_load_bytes
    return f"{usage.registers} registers per thread, {'no spills' if spills == 0 else f'{spills} bytes of spills'}"


def _compile(parsed: argparse.Namespace) -> None:
    kernel, options = _compile_parsed(parsed)
    cubin = None if kernel.arch is None else kernel.cubin
    names = write_artifacts(parsed.output, kernel, cubin, options)
    for line in describe_counts(kernel.stats):
        print(line)
    if kernel.arch is not None:
        print(f"cubin for {kernel.arch}: {describe_resources(kernel.source, kernel.arch, kernel.stats.entry)}")
    print(f"written to {parsed.output}: {', '.join(names)}")


def _inspect(parsed: argparse.Namespace) -> None:
    from trainkernel.inspection import inspect_kernel, loop_steps
    from trainkernel.inspection_views import format_html, format_text, format_trace

    if parsed.steps is not None and parsed.steps < 1:
        raise OptionError(f"--steps must be at least 1, got {parsed.steps}")
    if parsed.device is not None and not parsed.measure:
        raise OptionError("--device says where --measure runs the kernel; pass both")
    device = (parsed.device or "cuda") if parsed.measure else None
    if device in ("emulator", "reference"):
        raise OptionError(f"--measure runs the kernel on a GPU, got --device {device}")
    kernel, _ = _compile_parsed(parsed, device)
    steps = loop_steps(kernel.stats, parsed.steps)
    report = inspect_kernel(kernel.stats, steps)
    if parsed.measure:
        from trainkernel.measurement import measure, with_stamps

        report = with_stamps(report, measure(kernel, steps), str(kernel.device))
    sections = {
        "program": str(kernel.program),
        f"schedule for {kernel.stats.target.name}": str(kernel.schedule),
        "stages": format_text(report),
        "memory plan": str(kernel.plan),
        "counts": "\n".join(describe_counts(kernel.stats)),
    }
    print("\n\n".join(f"== {title}\n{text}" for title, text in sections.items()))
    if parsed.html is not None:
        Path(parsed.html).write_text(format_html(report, f"Stages of {parsed.program}"), encoding="utf-8")
    if parsed.trace is not None:
        Path(parsed.trace).write_text(format_trace(report), encoding="utf-8")


def _demo(parsed: argparse.Namespace) -> None:
    from trainkernel.demo import run_demo

    run_demo(
        device=parsed.device, steps=parsed.steps, dtype=parsed.dtype, arch=parsed.arch, save=parsed.save, out=sys.stdout
    )
