"""From emitted CUDA sources to loaded shared objects, by the host's C++ compiler.

Two kinds of object are built: the runtime (fibers, barriers, race detector), once per compiler,
and one object for each list of sources that are compiled together. Both are kept in a private
cache directory. An object's name is the hash of all that it is made from, then the hash of its own
bytes, which are checked before they are loaded: the loader crashes on a damaged object.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib.resources
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainkernel.errors import CompileError
from trainkernel.runtime.cache import (
    entries_of,
    evict,
    make_private,
    read_private_file,
    user_directory,
    write_atomically,
)

_RUNTIME_FLAGS = ("-std=c++17", "-O2", "-fPIC", "-fno-exceptions", "-fno-rtti", "-ffp-contract=off", "-w")
# No contraction, no fast math: additions, products, divisions and square roots round as on the device.
_PROGRAM_FLAGS = (
    "-std=c++17",
    "-fPIC",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-strict-aliasing",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-stack-protector",
    "-fno-asynchronous-unwind-tables",
    "-fvisibility=hidden",
    "-w",
)
_QUICK_FLAGS = ("-O1",)
# Hooks before each memory access, and for misaligned vectors; both call the runtime, no sanitizer library. The hooks
# take most of the time, so that an optimized program is hardly quicker, and takes half as long again to compile.
_CHECK_FLAGS = ("-O0", "-fsanitize=thread", "-fsanitize=alignment")
_RUNTIME_FILES = (
    "abi.h",
    "fibers.h",
    "state.h",
    "races.h",
    "hooks.h",
    "scheduler.h",
    "warp.h",
    "bulk.h",
    "signals.h",
    "launch.h",
    "runtime.cpp",
)
_MAX_CACHE_BYTES = 256 * 1024 * 1024
_MAX_ERROR_LINES = 30


@dataclass(frozen=True)
class Compiler:
    """A C++17 compiler of this host.

    Attributes
    ----------
    command : tuple of str
        The command and leading arguments.
    version : str
        What it prints for ``--version``; part of every cache key.
    machine_flags : tuple of str
        Flags that this machine allows (``-mfma``).
    """

    command: tuple[str, ...]
    version: str
    machine_flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class EmulatedKernel:
    """A compiled program: the function that runs one CUDA thread of it.

    Attributes
    ----------
    entry : int
        Address of ``void entry(const void* params)``.
    check_races : bool
        Whether the object calls the race detector's hooks.
    library : ctypes.CDLL
        Kept so that the code stays loaded as long as the kernel lives.
    """

    entry: int
    check_races: bool
    library: ctypes.CDLL


def install_hint() -> str:
    """What to install to get a C++ compiler."""
    if sys.platform == "darwin":
        return "Install the Xcode command line tools: xcode-select --install"
    return "Install one (Debian, Ubuntu: apt-get install g++; Fedora: dnf install gcc-c++) or name one in $CXX"


def find_compiler() -> Compiler | None:
    """The host's C++ compiler: ``$CXX``, then g++, clang++, c++; None if there is none.

    Raises
    ------
    CompileError
        If ``$CXX`` cannot be split into words.
    """
    return _find_compiler(os.environ.get("CXX", ""), os.environ.get("PATH", ""))


def is_available() -> bool:
    """Whether programs can be emulated on this host."""
    try:
        found = find_compiler()
    except CompileError:  # a wrong $CXX, which building anything will tell
        return False
    return found is not None and platform.machine().lower() in ("x86_64", "amd64", "aarch64", "arm64")


def require_compiler() -> Compiler:
    """The host's C++ compiler.

    Raises
    ------
    CompileError
        If there is none.
    """
    compiler = find_compiler()
    if compiler is None:
        tried = "$CXX, g++, clang++, c++" if os.environ.get("CXX") else "g++, clang++, c++"
        raise CompileError(f"the emulator needs a C++17 compiler and found none (tried {tried}). {install_hint()}.")
    return compiler


@functools.lru_cache(maxsize=8)
def _find_compiler(cxx: str, path: str) -> Compiler | None:
    for candidate in (cxx, "g++", "clang++", "c++"):
        try:
            words = tuple(shlex.split(candidate))
        except ValueError as error:
            raise CompileError(f"$CXX is {candidate!r}, which is no command ({error})") from None
        if not words or shutil.which(words[0], path=path or None) is None:
            continue
        try:
            done = _run([*words, "--version"], timeout_seconds=60)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if done.returncode == 0:
            flags = ("-mfma",) if _has_fma() else ()
            return Compiler(words, done.stdout.strip(), flags)
    return None


def _run(
    command: Sequence[str], text: str | None = None, timeout_seconds: float | None = None
) -> subprocess.CompletedProcess[str]:
    # Replacing errors: a compiler may answer in the encoding of another locale.
    return subprocess.run(
        command,
        input=text,
        stdin=subprocess.DEVNULL if text is None else None,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=timeout_seconds,
        check=False,
    )


def _has_fma() -> bool:
    """Whether this x86 CPU has FMA; elsewhere the compiler needs no flag, or libm's fmaf does it."""
    try:
        return re.search(r"^flags\s*:.*\bfma\b", Path("/proc/cpuinfo").read_text(), re.MULTILINE) is not None
    except OSError:
        return False


@functools.cache
def _shim_text(name: str) -> str:
    return (importlib.resources.files("trainkernel.emulator") / "shim" / name).read_text(encoding="utf-8")


@functools.lru_cache(maxsize=8)
def _private_directory(root: Path | None) -> Path | None:
    if root is not None:
        directory = root / "emulator"
        with contextlib.suppress(OSError):
            if make_private(root) and make_private(directory):
                return directory
    return None


def cache_directory() -> Path | None:
    """Where compiled objects are kept: ``emulator`` in the folder of all caches; None where it cannot be used."""
    return _private_directory(user_directory())


def _key(*parts: str) -> str:
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()[:40]


def _compile(command: Sequence[str], text: str, what: str) -> None:
    try:
        done = _run(command, text)
    except OSError as error:
        raise CompileError(f"cannot run the C++ compiler {command[0]!r}: {error}. {install_hint()}.") from error
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        shown = "\n".join(lines[:_MAX_ERROR_LINES])
        raise CompileError(f"the C++ compiler {command[0]!r} refused {what}:\n{shown}")


def _build(compiler: Compiler, flags: Sequence[str], link: Sequence[str], text: str, path: Path, what: str) -> bytes:
    """Compile ``text`` to the shared object ``path`` and return its bytes."""
    head = [*compiler.command, *flags]
    if sys.platform == "darwin":
        # There the driver would link the sanitizer's own runtime: compile and link apart.
        _compile([*head, "-x", "c++", "-c", "-", "-o", f"{path}.o"], text, what)
        _compile([*compiler.command, "-shared", "-undefined", "dynamic_lookup", f"{path}.o", "-o", str(path)], "", what)
    else:
        _compile([*head, "-shared", "-x", "c++", "-", "-x", "none", *link, "-o", str(path)], text, what)
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise CompileError(f"the C++ compiler {compiler.command[0]!r} accepted {what} and wrote nothing") from None


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _find_object(directory: Path, key: str) -> Path | None:
    """A whole object of that key; damaged ones, and those that others could have written, do not count."""
    names: list[str] = []
    with contextlib.suppress(OSError):
        names = [name for name in os.listdir(directory) if name.startswith(f"{key}-")]
    for name in names:
        with contextlib.suppress(OSError):  # no file, or pruned by another process just now
            data = read_private_file(directory / name, _MAX_CACHE_BYTES)
            if data is not None and name == f"{key}-{_digest(data)}.so":
                return directory / name
    return None


def _store_object(directory: Path, key: str, data: bytes) -> Path | None:
    """Keep an object and the cache below its bound; None where that fails, which costs only the cache."""
    path = directory / f"{key}-{_digest(data)}.so"
    try:
        write_atomically(path, data)
        evict(entries_of(directory, ".so"), _MAX_CACHE_BYTES)
    except OSError:
        return None
    return path


def _load(path: Path, mode: int) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path), mode=mode)
    with contextlib.suppress(OSError):
        os.utime(path)
    return library


def _building_directory() -> tempfile.TemporaryDirectory[str]:
    try:
        return tempfile.TemporaryDirectory(prefix="trainkernel-emulator-")
    except OSError as error:
        raise CompileError(f"the emulator needs a folder to compile in: {error}. Name one in $TMPDIR.") from error


def _load_or_build(
    compiler: Compiler, flags: Sequence[str], link: Sequence[str], text: str, mode: int, what: str
) -> ctypes.CDLL:
    key = _key(compiler.version, "\0".join([*compiler.command, *flags, *link]), text)
    directory = cache_directory()
    found = None if directory is None else _find_object(directory, key)
    if found is not None:
        with contextlib.suppress(OSError):  # pruned by another process just now, or noexec
            return _load(found, mode)
    # What is loaded stays mapped when its file is removed.
    with _building_directory() as folder:
        built = Path(folder) / "object.so"
        data = _build(compiler, flags, link, text, built, what)
        stored = None if directory is None else _store_object(directory, key, data)
        if stored is not None:
            with contextlib.suppress(OSError):
                return _load(stored, mode)
        try:
            return _load(built, mode)
        except OSError as error:
            raise CompileError(
                f"cannot load what {compiler.command[0]!r} made of {what} (is {folder} noexec?): {error}"
            ) from error


_runtime_lock = threading.Lock()
# A process forked meanwhile would find it locked for ever.
os.register_at_fork(
    before=_runtime_lock.acquire, after_in_parent=_runtime_lock.release, after_in_child=_runtime_lock.release
)


def load_runtime() -> ctypes.CDLL:
    """The emulator's runtime, built at first use; its symbols are visible to the programs."""
    with _runtime_lock:
        return _load_runtime()


@functools.cache
def _load_runtime() -> ctypes.CDLL:
    compiler = require_compiler()
    pieces = []
    for name in _RUNTIME_FILES:
        for line in _shim_text(name).splitlines():
            if not line.startswith(('#include "', "#pragma once")):
                pieces.append(line)
    text = "\n".join(_hoist_includes(pieces)) + "\n"
    library = _load_or_build(compiler, _RUNTIME_FLAGS, (), text, os.RTLD_NOW | os.RTLD_GLOBAL, "its runtime")
    library.tk_emu_launch.restype = None
    library.tk_emu_launch.argtypes = [ctypes.c_void_p]
    library.tk_emu_request_bytes.restype = ctypes.c_uint32
    return library


def _hoist_includes(lines: Sequence[str]) -> list[str]:
    """System headers first: the runtime is pasted together to one text, so that its key is its content."""
    includes = [line for line in lines if line.startswith(("#include", "#define _GNU_SOURCE"))]
    includes.sort(key=lambda line: line.startswith("#include"))
    rest = [line for line in lines if not line.startswith(("#include", "#define _GNU_SOURCE"))]
    return [*dict.fromkeys(includes), *rest]


def _program_text(sources: Sequence[str]) -> str:
    """One translation unit: each source, unchanged, in a namespace of its own."""
    parts = [_shim_text("shim.h")]
    for index, source in enumerate(sources):
        entry = f"tk_program_{index}"
        parts.append(f"#define TRAINKERNEL_ENTRY {entry}\nnamespace {entry}_space {{")
        parts.append(f'#line 1 "program_{index}.cu"\n{source}\n')
        parts.append(
            f'extern "C" __attribute__((visibility("default"), no_sanitize_thread)) '
            f"void {entry}_thread(const void* params) {{ {entry}(*static_cast<const TkParams*>(params)); }}\n}}"
        )
        # The next source brings its own copy of the prelude.
        guards = dict.fromkeys(re.findall(r"^\s*#\s*define\s+(TRAINKERNEL_PRELUDE_\w+)", source, re.MULTILINE))
        parts.extend(f"#undef {guard}" for guard in ("TRAINKERNEL_ENTRY", *guards))
    return "\n".join(parts) + "\n"


def compile_sources(sources: Sequence[str], *, check_races: bool = False) -> list[EmulatedKernel]:
    """Compile emitted sources, in one run of the compiler, and load them.

    Parameters
    ----------
    sources : sequence of str
        Emitted CUDA sources.
    check_races : bool
        Compile with the race detector's hooks (about three times slower to run).

    Raises
    ------
    CompileError
        If there is no compiler, or it refuses a source.
    """
    if not sources:
        return []
    compiler = require_compiler()
    load_runtime()
    flags = [*_PROGRAM_FLAGS, *compiler.machine_flags, *(_CHECK_FLAGS if check_races else _QUICK_FLAGS)]
    what = "an emitted source" if len(sources) == 1 else f"one of {len(sources)} emitted sources"
    # Without the standard libraries on the command line no sanitizer runtime is linked either.
    library = _load_or_build(compiler, flags, ("-nostdlib", "-lm"), _program_text(sources), os.RTLD_NOW, what)
    closer = ctypes.CDLL(None).dlclose
    closer.argtypes = [ctypes.c_void_p]
    weakref.finalize(library, closer, library._handle).atexit = False
    kernels = []
    for index in range(len(sources)):
        function = getattr(library, f"tk_program_{index}_thread")
        entry = ctypes.cast(function, ctypes.c_void_p).value
        assert entry is not None
        kernels.append(EmulatedKernel(entry, check_races, library))
    return kernels
