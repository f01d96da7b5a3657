"""Source to cubin by NVRTC. Needs neither a driver nor a GPU.

The only option is ``--gpu-architecture``: a generated source may depend on nothing else.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainkernel.errors import CompileError

_ARCH = re.compile("sm_[1-9][0-9]{1,2}[af]?")
_nvrtc: Any = None
_failure: str | None = None
_lock = threading.Lock()


@dataclass(frozen=True)
class ResourceStatistics:
    """What ptxas reports of one kernel.

    Attributes
    ----------
    registers : int
        Per thread.
    stack_bytes, spill_store_bytes, spill_load_bytes : int
        Per thread, in local memory.
    shared_bytes : int
        Static shared memory per block.
    """

    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    shared_bytes: int


def _require_nvrtc() -> Any:
    """The module ``cuda.bindings.nvrtc`` with its library loaded; a failure is kept."""
    global _nvrtc, _failure
    with _lock:
        if _failure is None and _nvrtc is None:
            try:
                from cuda.bindings import nvrtc

                nvrtc.nvrtcVersion()
                _nvrtc = nvrtc
            except Exception as error:  # ImportError, or the loader's own classes
                reason = str(error).splitlines()[0] if str(error) else type(error).__name__
                _failure = (
                    f"NVRTC is not installed ({reason}). Install it with: pip install 'nvidia-cuda-nvrtc>=13,<14'."
                )
    if _failure is not None:
        raise CompileError(_failure)
    return _nvrtc


def nvrtc_version() -> tuple[int, int]:
    """Major and minor version of the NVRTC in use."""
    _, major, minor = _require_nvrtc().nvrtcVersion()
    return int(major), int(minor)


def supported_archs() -> tuple[str, ...]:
    """The architectures that this NVRTC compiles for, without their ``a`` and ``f`` variants."""
    status, archs = _require_nvrtc().nvrtcGetSupportedArchs()
    if int(status) != 0:
        raise CompileError(f"nvrtcGetSupportedArchs failed: {status.name}")
    return tuple(f"sm_{arch}" for arch in archs)


def check_arch(arch: str) -> None:
    """Refuse a text that does not name a real architecture.

    A virtual one such as ``compute_90`` would compile to an empty cubin without any error.

    Raises
    ------
    CompileError
    """
    if not isinstance(arch, str) or _ARCH.fullmatch(arch) is None:
        raise CompileError(f"arch must look like 'sm_90' or 'sm_90a', got {str(arch)[:40]!r}")


def compile_cubin(source: str, arch: str) -> bytes:
    """Compile a CUDA source to a cubin.

    Parameters
    ----------
    source : str
        Self-contained: no header is available.
    arch : str
        For example ``"sm_90"``.

    Raises
    ------
    CompileError
        If NVRTC is not installed, does not know the architecture, refuses the source (the message
        holds its log) or returns an empty cubin.
    """
    cubin, _ = _compile(source, arch, ())
    return cubin


def resource_statistics(source: str, arch: str) -> Mapping[str, ResourceStatistics]:
    """Registers, stack, spills and shared memory of each kernel of a source, by kernel name.

    Raises
    ------
    CompileError
        As ``compile_cubin``.
    """
    _, log = _compile(source, arch, (b"--ptxas-options=-v",))
    return parse_ptxas_log(log)


def parse_ptxas_log(log: str) -> Mapping[str, ResourceStatistics]:
    """The statistics of every entry function in a log of ``ptxas -v``."""
    found: dict[str, ResourceStatistics] = {}
    parts = re.split(r"Compiling entry function '([^']+)'[^\n]*", log)
    for name, text in zip(parts[1::2], parts[2::2], strict=True):
        # A device function that was not inlined is reported between; the entry's own lines come first.
        found[name] = ResourceStatistics(
            registers=_number(r"Used (\d+) registers", text),
            stack_bytes=_number(r"(\d+) bytes (?:cumulative )?stack", text),
            spill_store_bytes=_number(r"(\d+) bytes spill stores", text),
            spill_load_bytes=_number(r"(\d+) bytes spill loads", text),
            shared_bytes=_number(r"(\d+)(?:\+\d+)? bytes smem", text),
        )
    return found


def _number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    return int(match.group(1)) if match else 0


def _compile(source: str, arch: str, extra: tuple[bytes, ...]) -> tuple[bytes, str]:
    check_arch(arch)
    nvrtc = _require_nvrtc()
    version = ".".join(str(part) for part in nvrtc_version())
    known = supported_archs()
    if arch.rstrip("af") not in known:
        raise CompileError(f"NVRTC {version} cannot compile for {arch}; it supports {', '.join(known)}")
    status, program = nvrtc.nvrtcCreateProgram(source.encode(), b"trainkernel.cu", 0, [], [])
    if int(status) != 0:
        raise CompileError(f"nvrtcCreateProgram failed: {status.name}")
    try:
        options = [f"--gpu-architecture={arch}".encode(), *extra]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        log = _log(nvrtc, program)
        if status == nvrtc.nvrtcResult.NVRTC_ERROR_INVALID_OPTION or "--nv_arch" in log:
            raise CompileError(
                f"NVRTC {version} cannot compile for {arch}; it supports {', '.join(known)}, "
                f"and the suffixes 'a' and 'f' for some of them. {log}".rstrip()
            )
        if int(status) != 0:
            raise CompileError(f"NVRTC {version} refused the source for {arch} ({status.name}):\n{log}")
        status, size = nvrtc.nvrtcGetCUBINSize(program)
        if int(status) != 0 or size == 0:
            raise CompileError(f"NVRTC {version} gave an empty cubin for {arch} ({status.name}).\n{log}".rstrip())
        cubin = bytes(size)  # fresh, and filled in place before anyone else sees it
        (status,) = nvrtc.nvrtcGetCUBIN(program, cubin)
        if int(status) != 0:
            raise CompileError(f"nvrtcGetCUBIN failed: {status.name}")
        return cubin, log
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _log(nvrtc: Any, program: Any) -> str:
    status, size = nvrtc.nvrtcGetProgramLogSize(program)
    if int(status) != 0 or size <= 1:
        return ""
    buffer = bytes(size)
    nvrtc.nvrtcGetProgramLog(program, buffer)
    return buffer.rstrip(b"\0").decode(errors="replace").strip()
