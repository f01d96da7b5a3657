"""Machine code of a cubin as ``nvdisasm`` prints it, and the memory descriptors in it that no path defines.

Every access of global memory names a descriptor in a pair of uniform registers. Where a call overwrites
them, ptxas keeps the descriptor in vector registers and moves it back (``R2UR UR4, R10``). ptxas 13.0 does
that in some programs with registers that nothing has written, or that the call overwrites.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

_LABEL = re.compile(r"^(?:\.text\.)?([\w$.]+):\s*$")
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,6}\*/\s+(.*?)\s*;")
_TARGET = re.compile(r"`\(([^)]*)\)")
_PREDICATE = re.compile(r"^@!?\w+\s+")
_STORED = (
    "R2UR",
    "ST",
    "RED",
    "BRA",
    "CALL",
    "RET",
    "EXIT",
    "BAR",
    "BSSY",
    "BSYNC",
    "ISETP",
    "FSETP",
    "DSETP",
    "MEMBAR",
)
_STORED += ("CCTL", "NOP", "LDGSTS", "LDGDEPBAR", "DEPBAR", "WARPSYNC", "ERRBAR", "FCHK", "PLOP3", "U")
"""Instructions that write no vector register."""
_NEAR = 80
"""Instructions after ``R2UR`` among which its descriptor is used."""


@dataclass
class Function:
    """Instructions of a function, and the places of its labels among them."""

    name: str
    instructions: list[str] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)


def find_nvdisasm() -> str | None:
    """The disassembler of the package ``nvidia-cuda-nvdisasm`` or of a CUDA toolkit."""
    try:
        paths = [Path(str(path.locate())) for path in files("nvidia-cuda-nvdisasm") or () if path.name == "nvdisasm"]
    except PackageNotFoundError:
        paths = []
    return str(paths[0]) if paths else shutil.which("nvdisasm")


def disassemble(nvdisasm: str, cubin: Path) -> dict[str, Function]:
    """The functions of a cubin by name."""
    done = subprocess.run([nvdisasm, "-c", str(cubin)], check=True, capture_output=True, text=True)
    return parse(done.stdout)


def parse(text: str) -> dict[str, Function]:
    """The functions in a listing, by name."""
    functions: dict[str, Function] = {}
    current = Function("")
    for line in text.splitlines():
        if label := _LABEL.match(line):
            name = label.group(1)
            if name.startswith(".L"):
                current.labels[name] = len(current.instructions)
            else:
                current = functions.setdefault(name, Function(name))
        elif instruction := _INSTRUCTION.match(line):
            current.instructions.append(instruction.group(1))
    return {name: function for name, function in functions.items() if function.instructions}


def descriptors_from_registers(function: Function) -> Iterator[tuple[int, int]]:
    """Where a function moves a memory descriptor out of a vector register, and that register."""
    for place, instruction in enumerate(function.instructions):
        moved = re.match(r"R2UR UR(\d+), R(\d+)", _PREDICATE.sub("", instruction))
        if moved is None:
            continue
        uniform, register = int(moved.group(1)), int(moved.group(2))
        for later in function.instructions[place + 1 : place + _NEAR]:
            if f"desc[UR{uniform}]" in later or f"desc[UR{uniform - 1}]" in later:
                yield place, register
                break
            if re.search(rf"\b(?:U\w+|R2UR|S2UR)[\w.]* UR{uniform}\b", later):
                break


def undefined_descriptors(functions: Mapping[str, Function]) -> list[str]:
    """Descriptors out of registers that some path leaves undefined: where, and which."""
    written = {name: _written(function) for name, function in functions.items()}
    pending = True
    while pending:
        before = {name: len(registers) for name, registers in written.items()}
        for name, function in functions.items():
            for instruction in function.instructions:
                written[name] |= written.get(_callee(instruction), set())
        pending = before != {name: len(registers) for name, registers in written.items()}
    found = []
    for function in functions.values():
        wanted = dict(descriptors_from_registers(function))
        if not wanted:
            continue
        defined = _defined(function, written)
        found += [
            f"{function.name}: {function.instructions[place]}"
            for place, register in wanted.items()
            if defined[place] is not None and register not in (defined[place] or ())
        ]
    return found


def _defined(function: Function, written: Mapping[str, set[int]]) -> list[frozenset[int] | None]:
    """The registers that every path to an instruction has written since the last call that overwrites them."""
    count = len(function.instructions)
    defined: list[frozenset[int] | None] = [None] * count
    defined[0] = frozenset()
    pending = [0]
    while pending:
        place = pending.pop()
        instruction = function.instructions[place]
        # A predicated write counts: what reads it has the same predicate.
        after = (defined[place] or frozenset()) - written.get(_callee(instruction), set()) | _writes(instruction)
        for follower in _followers(function, place):
            if follower >= count:
                continue
            known = defined[follower]
            merged = frozenset(after) if known is None else known & after
            if merged != known:
                defined[follower] = merged
                pending.append(follower)
    return defined


def _followers(function: Function, place: int) -> list[int]:
    instruction = function.instructions[place]
    body = _PREDICATE.sub("", instruction)
    conditional = body != instruction
    if body.startswith("BRA"):
        target = _TARGET.search(body)
        jumps = [function.labels[target.group(1)]] if target and target.group(1) in function.labels else []
        return [*jumps, place + 1] if conditional or ", " in body.split("`")[0] else jumps
    if body.startswith(("EXIT", "RET", "BRX", "KILL")) and not conditional:
        return []
    return [place + 1]


def _callee(instruction: str) -> str:
    target = _TARGET.search(instruction)
    return target.group(1) if target and "CALL" in instruction else ""


def _written(function: Function) -> set[int]:
    return {register for instruction in function.instructions for register in _writes(instruction)}


def _writes(instruction: str) -> set[int]:
    """The vector registers that an instruction writes."""
    operation, _, rest = _PREDICATE.sub("", instruction).partition(" ")
    if operation.startswith(_STORED):
        return set()
    for operand in (operand.strip() for operand in rest.split(",")):
        if register := re.match(r"R(\d+)(?:\.\w+)*$", operand):
            first = int(register.group(1))
            return set(range(first, first + _width(operation)))
        if not re.match(r"!?U?P\w+$", operand):
            return set()
    return set()


def _width(operation: str) -> int:
    if ".128" in operation or operation.startswith(("HMMA", "LDSM")):
        return 4
    return 2 if ".64" in operation or "WIDE" in operation or operation.startswith(("DADD", "DMUL", "DFMA")) else 1
