"""Program to Kernel: ``compile`` picks the device and the target, generates, builds and loads.

A Kernel has every stage it was made through (``program``, ``schedule``, ``plan``, ``source``,
``cubin``) and is called with the program's inputs. One that is found in the cache skips the stages;
they run when somebody asks for what they make.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

from trainkernel.errors import OptionError
from trainkernel.ir import Program
from trainkernel.kernel import GpuKernel, HostBound, HostKernel, Kernel
from trainkernel.options import Options
from trainkernel.program_cache import CachedProgram, find_program
from trainkernel.runtime import driver, nvrtc
from trainkernel.target import PRESETS, Target

__all__ = ["GpuKernel", "HostBound", "HostKernel", "Kernel", "ReferenceWarning", "compile"]

HOST_DEVICES = ("emulator", "reference")
_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_DEVICE = re.compile("cuda|cuda:[0-9]{1,9}|emulator|reference")


class ReferenceWarning(UserWarning):
    """No device was named and there is no GPU, so the NumPy reference runs."""


def compile(
    program: Program,
    *,
    device: str | None = None,
    arch: str | None = None,
    barrier_timeout_ms: float | None = None,
    max_launch_ms: float | None = None,
    tune: bool = False,
    **options: Any,
) -> Kernel:
    """Compile a Program.

    Parameters
    ----------
    program : Program
    device : str, optional
        ``"cuda"`` (the current device), ``"cuda:1"``, ``"emulator"`` or ``"reference"``. None: the
        environment's ``TRAINKERNEL_DEVICE``, else a GPU where there is one, else the reference,
        told once by a ``ReferenceWarning``.
    arch : str, optional
        Architecture to compile for, for example ``"sm_90a"``; by default the device's own.
        Without ``device``, the kernel has a source and a cubin and cannot be called.
    barrier_timeout_ms : float, optional
        On a GPU: a barrier not passed in that time ends the kernel and is reported by ``check`` of
        a bound launch and by a call, which then waits for the launch. None: barriers wait for ever.
    max_launch_ms : float, optional
        On a GPU: a run is cut, between stages and between the steps of loops at the top, into launches that take
        less than so many milliseconds, with the bits of one launch. The first run measures what a stage and a step
        take and waits for that; each launch is planned to take half of what it may. A stage or a step that alone
        takes longer is run, and told once by a ``LaunchTimeWarning``. A call returns when all but the last four
        launches are done. In the emulator the launches have 1, 2, 4, ... stages and steps; the reference has none.
        The source has no host entry in C then. None: a run is one launch.
    tune : bool
        On a GPU: measure what the cost model could have chosen otherwise, and take the fastest. That compiles
        up to ten kernels, once: the choice is kept in the cache, by the device's name. ``kernel.tuning`` tells
        what was measured. Results may differ from those without it by rounding.
    **options
        Those of ``trainkernel.codegen.generate``: ``inplace_outputs``, which maps the index of an
        output to that of the input it updates, and the tuning options. Without ``target``, the preset of the
        architecture is used where there is one, else the portable target, never the device's own
        numbers: the same program gives the same bits on devices that differ in size.

    Raises
    ------
    ProgramError, OptionError
        If the program or an option breaks a rule.
    DeviceError
        If a GPU is asked for and cannot be used; the same error each time.
    CompileError
        If NVRTC refuses.
    LaunchError
        If not one block can be resident.
    """
    known = ("inplace_outputs", "target", *(field.name for field in fields(Options)))
    for option in options:
        if option not in known:
            raise OptionError(_unknown_option(option, (*known, *(compile.__kwdefaults__ or ()))))
    timeout_ns = _timeout_ns(barrier_timeout_ms)
    if max_launch_ms is not None:
        _check_milliseconds("max_launch_ms", max_launch_ms)
        if options.get("parts") is False:
            raise OptionError("max_launch_ms needs launches of a part of a run, and parts=False rules them out")
        options["parts"] = True
    asked = frozenset(option for option, value in options.items() if value is not None)
    if arch is not None:
        nvrtc.check_arch(arch)
        if arch not in PRESETS and int(arch.removeprefix("sm_").rstrip("af")) < 80:
            Target.preset(arch)  # raises: older than the oldest supported
    if isinstance(options.get("target"), str):
        options["target"] = Target.preset(options["target"])
    name = None if device is None and arch is not None else _device_name(device)
    facts = None
    if name is not None and name not in HOST_DEVICES:
        facts = driver.device_facts(_device_index(name))
        arch = _arch_on_device(facts, arch, options.get("target"))
    if options.get("target") is None:
        options.pop("target", None)
        if arch is not None:
            options["target"] = Target.preset(arch if arch in PRESETS else "portable")
    elif arch is not None:
        _check_target(options["target"], arch)
    if isinstance(options.get("inplace_outputs"), Mapping):
        options["inplace_outputs"] = dict(options["inplace_outputs"])  # as it is now
    if facts is not None:
        assert arch is not None
        return _on_gpu(program, facts, arch, timeout_ns, max_launch_ms, options, asked if tune else None)
    if tune:
        raise OptionError(f"tune=True measures kernels on a GPU, and this one is for {name or 'an architecture alone'}")
    cached, stats = _find(program, arch, options)
    if name is None:
        return Kernel(program, stats, None, arch, cached)
    return HostKernel(program, stats, name, arch, timeout_ns, cached, max_launch_ms)


def _on_gpu(
    program: Program,
    facts: driver.DeviceFacts,
    arch: str,
    timeout_ns: int,
    max_launch_ms: float | None,
    options: Mapping[str, Any],
    tuned_beside: frozenset[str] | None,
) -> GpuKernel:
    """The kernel on a GPU, tuned if the options that are to stay are given."""

    def build(more: Mapping[str, Any]) -> GpuKernel:
        cached, stats = _find(program, arch, {**options, **more})
        return GpuKernel(program, stats, facts.index, arch, timeout_ns, cached, max_launch_ms)

    if tuned_beside is None:
        return build({})
    from trainkernel import tuning  # only then

    found = tuning.tune(program, arch, facts.name, options, tuned_beside, build)
    kernel = build(tuning.as_options(found.options))
    kernel.tuning = found
    return kernel


def _find(program: Program, arch: str | None, options: Mapping[str, Any]) -> tuple[CachedProgram, Any]:
    """A Program's place in the cache, and the GeneratedKernel, or None if the place holds it."""
    cached = find_program(program, arch, options, partial(_generate, program, options))
    return cached, cached.generate() if cached.facts is None else None


def _generate(program: Program, options: Mapping[str, Any]) -> Any:
    from trainkernel.codegen import generate  # not needed for what is in the cache

    return generate(program, **options)


_reference_told = False


def _device_name(device: str | None) -> str:
    global _reference_told
    asked = "device" if device is not None else "TRAINKERNEL_DEVICE"
    chosen = device if device is not None else os.environ.get("TRAINKERNEL_DEVICE") or None
    if chosen is None:
        if driver.is_available():
            return "cuda"
        if not _reference_told:
            _reference_told = True
            warnings.warn(
                "no device was named and there is no GPU: kernels run as the NumPy reference, on the CPU. "
                "Pass device='reference' (or 'emulator'), or set TRAINKERNEL_DEVICE, to choose it.",
                ReferenceWarning,
                stacklevel=_levels_to_user(),
            )
        return "reference"
    if not isinstance(chosen, str) or not _DEVICE.fullmatch(chosen):
        raise OptionError(f"{asked} must be 'cuda', 'cuda:<index>', 'emulator' or 'reference', got {chosen!r}")
    return str(chosen)


def _levels_to_user() -> int:
    """The ``stacklevel`` with which a warning of the caller names the user's line, whoever of us called it."""
    level = 1
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
        level += 1
    return level


def _device_index(name: str) -> int:
    """The index of ``cuda:1``; of ``cuda``: the device that is current in this thread, else 0."""
    if name != "cuda":
        driver.require_driver()
        return int(name.removeprefix("cuda:"))
    return driver.current_device_index()


def _arch_on_device(facts: driver.DeviceFacts, arch: str | None, target: Any) -> str:
    """The architecture to compile for on a device, refused where the device could not run it."""
    major, minor = facts.compute_capability
    number = 10 * major + minor
    asked, source = (arch, "arch") if arch is not None else (getattr(target, "arch", None), "target")
    if asked is None:
        return facts.arch
    wanted = int(asked.removeprefix("sm_").rstrip("af"))
    specific = asked[-1] in "af"
    other = wanted // 10 != number // 10 or wanted > number
    if (specific and wanted != number) or (source == "arch" and other):
        raise OptionError(
            f"{source}={asked!r} does not run on device {facts.index} ({facts.name}), which is {facts.arch}; "
            "leave it out, or compile with arch= and no device"
        )
    return asked if specific or source == "arch" else facts.arch


def _check_target(target: Any, arch: str) -> None:
    """Refuse a target with instructions that the architecture to compile for does not have."""
    own = getattr(target, "arch", None)
    if own is not None and own[-1] in "af" and own != arch:
        raise OptionError(
            f"target={target.name!r} has instructions of {own} alone, which arch={arch!r} lacks; "
            f"pass arch={own!r}, or another target"
        )


def _timeout_ns(milliseconds: float | None) -> int:
    if milliseconds is None:
        return 0
    _check_milliseconds("barrier_timeout_ms", milliseconds)
    return max(1, int(milliseconds * 1e6))


def _unknown_option(option: str, known: Sequence[str]) -> str:
    from difflib import get_close_matches

    meant = [f" (did you mean {name!r}?)" for name in get_close_matches(option, known, 1)]
    return f"unknown option {option!r}{''.join(meant)}; known: {', '.join(known)}"


def _check_milliseconds(option: str, milliseconds: Any) -> None:
    if isinstance(milliseconds, bool) or not isinstance(milliseconds, (int, float)) or not 0 < milliseconds < 1e9:
        limits = "None or a positive number of milliseconds, less than 1e9"
        raise OptionError(f"{option} must be {limits}, got {milliseconds!r}")
