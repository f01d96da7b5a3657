"""The cache of compiled Programs: what a launch needs, without schedule, generation or NVRTC.

An entry is found by a digest of everything that it depends on: the Program with its names (they
reach the source), options, target, architecture, NVRTC's version and the text of the files that
make a source of a Program. It lies in the same folder as the cubins by source and is held to the
same rules (``runtime/cache.py``): whatever is wrong with it, it is a miss.

A Program that broke a rule was never stored, so what is found needs no checks again.
"""

from __future__ import annotations

import hashlib
import marshal
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import trainkernel
from trainkernel.errors import CompileError, VerificationError
from trainkernel.facts import LaunchFacts
from trainkernel.ir import Loop, Operation, Program, ScalarSpec, TensorSpec
from trainkernel.runtime import build
from trainkernel.runtime.cache import CubinCache, cache_key
from trainkernel.target import Target

FRONT_END = frozenset(
    ("arguments", "assemble", "autodiff", "batching", "cli", "compiler", "custom_rules", "data", "demo", "derivatives")
    + ("digits_step", "emulator", "initializers", "jacobians", "jitted", "kernel", "lax", "losses", "mlp", "nn")
    + ("numpy", "optim", "primitives", "program_cache", "promotion", "random", "reference", "runtime", "sample_arrays")
    + ("scanning", "shape_structs", "structure", "trace", "tree", "tuning", "windows", "__init__", "__main__")
)
"""Modules and packages that are not needed to make a source of a Program."""

_PACKAGE = str(Path(__file__).parent)


class _NotPlainError(Exception):
    """A Program or an option holds something that no valid one does."""


@dataclass(frozen=True)
class CachedProgram:
    """A Program's place in the cache, and what was found there.

    Attributes
    ----------
    generate : callable
        Makes the GeneratedKernel.
    key : str or None
        None: the Program has no place.
    facts, cubin
        None unless it was found.
    source_digest : str
        Of the source that the cubin was made from.
    """

    generate: Callable[[], Any]
    key: str | None = None
    facts: LaunchFacts | None = None
    cubin: bytes | None = None
    source_digest: str = ""

    def generated(self) -> Any:
        """The GeneratedKernel of what was found.

        Raises
        ------
        VerificationError
            If it is another: the files of trainkernel changed while they ran.
        """
        generated = self.generate()
        if LaunchFacts.of(generated) != self.facts or _digest_of_source(generated.source) != self.source_digest:
            raise VerificationError(
                "the kernel in the cache is not the one that is generated now: have files of trainkernel changed "
                "since this process began? Start it again, with TRAINKERNEL_CACHE=0 if that does not help"
            )
        return generated

    def store(self, generated: Any, cubin: bytes) -> None:
        """Store a kernel in this place; what cannot be stored is no error."""
        if self.key is None or not build.is_nvrtc(build.nvrtc_identity()):
            return
        metadata = {
            "facts": LaunchFacts.of(generated).to_json(),
            "source": _digest_of_source(generated.source),
        }
        CubinCache.from_environment().put(self.key, cubin, metadata)


def find_program(
    program: Program, arch: str | None, options: Mapping[str, Any], generate: Callable[[], Any]
) -> CachedProgram:
    """Look for a Program compiled for an architecture with these options of ``codegen.generate``."""
    nowhere = CachedProgram(generate)
    if arch is None:
        return nowhere
    cubins = CubinCache.from_environment()
    key = None if cubins.directory is None else program_key(program, arch, options)
    if key is None:
        return nowhere
    entry = cubins.load(key)
    if entry is None:
        return CachedProgram(generate, key)
    try:
        facts = LaunchFacts.from_json(entry.metadata.get("facts"))
    except ValueError:
        return CachedProgram(generate, key)
    return CachedProgram(generate, key, facts, entry.cubin, str(entry.metadata.get("source")))


def program_key(program: Program, arch: str, options: Mapping[str, Any]) -> str | None:
    """The name of an entry; None for a Program or options that no valid ones are like.

    The location of an operation changes nothing but messages, and is left out.
    """
    package = package_digest()
    if package is None:
        return None
    try:
        parts = (_program(program), _options(options))
        # Version 2 has no references between objects, so equal values are equal bytes, and it takes
        # exact builtin types alone: True is not 1 there, and a number of NumPy is no int.
        encoded = marshal.dumps(parts, 2)
    except (_NotPlainError, ValueError):
        return None
    try:
        nvrtc = build.nvrtc_identity()
    except CompileError:
        return None
    return cache_key(
        {
            "program": hashlib.sha256(encoded).hexdigest(),
            "package": package,
            "nvrtc": nvrtc,
            "arch": arch,
            "options": build.options_of(arch),
        }
    )


def _digest_of_source(source: str) -> str:
    return hashlib.sha256(source.encode()).hexdigest()


# ---------------------------------------------------------------------------- plain tuples


def _spec(spec: Any) -> tuple[Any, ...]:
    if type(spec) is TensorSpec:
        return spec.buffer, spec.shape, spec.strides, spec.offset, spec.dtype
    if type(spec) is ScalarSpec:
        return spec.buffer, spec.dtype
    raise _NotPlainError


def _operand(operand: Any) -> Any:
    """A number stands for itself; only a spec becomes a tuple."""
    return operand if type(operand) in (int, float) else _spec(operand)


def _item(item: Any) -> tuple[Any, ...]:
    if type(item) is Operation:
        inputs = [_operand(operand) for operand in item.inputs]
        return item.name, item.op, inputs, [_spec(spec) for spec in item.outputs], tuple(item.attrs.items())
    if type(item) is Loop:
        inputs, outputs = [_spec(spec) for spec in item.inputs], [_spec(spec) for spec in item.outputs]
        counts = (item.num_carry, item.num_xs, item.length, item.reverse)
        return item.name, _program(item.body), inputs, outputs, counts
    raise _NotPlainError


def _program(program: Any) -> tuple[Any, ...]:
    if type(program) is not Program:
        raise _NotPlainError
    return (
        [_spec(spec) for spec in program.inputs],
        [_item(item) for item in program.operations],
        [_spec(spec) for spec in program.outputs],
    )


def _options(options: Mapping[str, Any]) -> list[Any]:
    return [(name, _option(value)) for name, value in sorted(options.items()) if value is not None]


def _option(value: Any) -> Any:
    if type(value) is dict:
        return list(value.items())
    return list(vars(value).items()) if type(value) is Target else value


# ---------------------------------------------------------------------------- the package


@cache
def package_digest() -> str | None:
    """A digest of the files that make a source of a Program.

    None if one of them cannot be read, or is younger than this process's import of the package:
    what runs may be another text then, so nothing is found and nothing stored.
    """
    digest = hashlib.sha256()
    newest = 0
    try:
        for path in sorted(source_files()):
            with open(path, "rb", buffering=0) as file:
                newest = max(newest, os.fstat(file.fileno()).st_mtime_ns)
                text = file.read()
            digest.update(f"{path[len(_PACKAGE) :]} {len(text)}\n".encode())
            digest.update(text)
    except OSError:
        return None
    return digest.hexdigest() if newest < trainkernel.IMPORTED_NS else None


def source_files() -> list[str]:
    """The modules and templates of the package that are not the front end's."""
    found = []
    for item in os.scandir(_PACKAGE):
        name, suffix = os.path.splitext(item.name)
        if name in FRONT_END or name == "__pycache__":
            continue
        if item.is_dir():
            found += _all_files(item.path)
        elif suffix == ".py":
            found.append(item.path)
    return found


def _all_files(folder: str) -> list[str]:
    found = []
    for item in os.scandir(folder):
        if item.is_dir():
            found += [] if item.name == "__pycache__" else _all_files(item.path)
        else:
            found.append(item.path)
    return found
