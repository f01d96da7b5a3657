"""A whole training step compiled to one cooperative CUDA kernel.

``compile`` turns a Program into a Kernel; ``reference.run`` computes what a Program means in
NumPy; ``emulator.run`` runs the generated CUDA source itself on the CPU. Nothing here needs a
GPU to be imported, and whatever needs CUDA is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from trainkernel import reference
from trainkernel.builder import ProgramBuilder
from trainkernel.errors import (
    ArgumentError,
    CompileError,
    DeviceError,
    EmulatorError,
    LaunchError,
    OptionError,
    ProgramError,
    RaceError,
    TrainkernelError,
    VerificationError,
)
from trainkernel.ir import Loop, Operation, Program, ScalarSpec, TensorSpec, validate
from trainkernel.target import Target

if TYPE_CHECKING:
    from trainkernel import codegen, emulator, mlp
    from trainkernel.compiler import Kernel, ReferenceWarning, compile

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "CompileError",
    "DeviceError",
    "EmulatorError",
    "Kernel",
    "LaunchError",
    "Loop",
    "Operation",
    "OptionError",
    "Program",
    "ProgramBuilder",
    "ProgramError",
    "RaceError",
    "ReferenceWarning",
    "ScalarSpec",
    "Target",
    "TensorSpec",
    "TrainkernelError",
    "VerificationError",
    "__version__",
    "codegen",
    "compile",
    "emulator",
    "mlp",
    "reference",
    "validate",
]

# Imported at first use: each brings in the compiler or more.
_LAZY_ATTRIBUTES = {
    "compile": "trainkernel.compiler",
    "Kernel": "trainkernel.compiler",
    "ReferenceWarning": "trainkernel.compiler",
}
_LAZY_MODULES = frozenset({"codegen", "emulator", "mlp"})


def __getattr__(name: str) -> Any:
    if name in _LAZY_ATTRIBUTES:
        value = getattr(import_module(_LAZY_ATTRIBUTES[name]), name)
    elif name in _LAZY_MODULES:
        value = import_module(f"trainkernel.{name}")
    else:
        raise AttributeError(f"module 'trainkernel' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
