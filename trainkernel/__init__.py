"""A whole training step compiled to one cooperative CUDA kernel.

``compile`` turns a Program into a Kernel; ``reference.run`` computes what a Program means in
NumPy; ``emulator.run`` runs the generated CUDA source itself on the CPU. Nothing here needs a
GPU to be imported, and whatever needs CUDA is imported when it is first used.
"""

from __future__ import annotations

import time
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
    TraceError,
    TrainkernelError,
    VerificationError,
)
from trainkernel.ir import Loop, Operation, Program, ScalarSpec, TensorSpec, validate
from trainkernel.target import Target

if TYPE_CHECKING:
    from trainkernel import codegen, emulator, flatten_util, lax, losses, mlp, nn, numpy, optim, random, tree
    from trainkernel.batching import vmap
    from trainkernel.compiler import Kernel, ReferenceWarning, compile
    from trainkernel.custom_rules import checkpoint, custom_jvp, custom_vjp
    from trainkernel.derivatives import grad, jvp, linearize, stop_gradient, value_and_grad, vjp
    from trainkernel.jacobians import hessian, jacfwd, jacrev
    from trainkernel.jitted import DonationWarning, jit
    from trainkernel.runtime.parts import LaunchTimeWarning
    from trainkernel.scanning import cond, fori_loop, scan, while_loop
    from trainkernel.shape_structs import ShapeDtypeStruct, eval_shape
    from trainkernel.trace import Array

__version__ = "0.1.0"

IMPORTED_NS = time.time_ns()
"""A file of the package that is younger may not be the one that runs."""

__all__ = [
    "ArgumentError",
    "Array",
    "CompileError",
    "DeviceError",
    "DonationWarning",
    "EmulatorError",
    "Kernel",
    "LaunchError",
    "LaunchTimeWarning",
    "Loop",
    "Operation",
    "OptionError",
    "Program",
    "ProgramBuilder",
    "ProgramError",
    "RaceError",
    "ReferenceWarning",
    "ScalarSpec",
    "ShapeDtypeStruct",
    "Target",
    "TensorSpec",
    "TraceError",
    "TrainkernelError",
    "VerificationError",
    "__version__",
    "checkpoint",
    "codegen",
    "compile",
    "cond",
    "custom_jvp",
    "custom_vjp",
    "emulator",
    "eval_shape",
    "flatten_util",
    "fori_loop",
    "grad",
    "hessian",
    "jacfwd",
    "jacrev",
    "jit",
    "jvp",
    "lax",
    "linearize",
    "losses",
    "mlp",
    "nn",
    "numpy",
    "optim",
    "random",
    "reference",
    "scan",
    "stop_gradient",
    "tree",
    "validate",
    "value_and_grad",
    "vjp",
    "vmap",
    "while_loop",
]

# Imported at first use: each brings in the compiler or more.
_LAZY_ATTRIBUTES = {
    "Array": "trace",
    "DonationWarning": "jitted",
    "Kernel": "compiler",
    "LaunchTimeWarning": "runtime.parts",
    "ReferenceWarning": "compiler",
    "ShapeDtypeStruct": "shape_structs",
    "checkpoint": "custom_rules",
    "compile": "compiler",
    "cond": "scanning",
    "custom_jvp": "custom_rules",
    "custom_vjp": "custom_rules",
    "eval_shape": "shape_structs",
    "fori_loop": "scanning",
    "grad": "derivatives",
    "hessian": "jacobians",
    "jacfwd": "jacobians",
    "jacrev": "jacobians",
    "jit": "jitted",
    "jvp": "derivatives",
    "linearize": "derivatives",
    "scan": "scanning",
    "stop_gradient": "derivatives",
    "value_and_grad": "derivatives",
    "vjp": "derivatives",
    "vmap": "batching",
    "while_loop": "scanning",
}
_LAZY_MODULES = frozenset(
    {"codegen", "emulator", "flatten_util", "lax", "losses", "mlp", "nn", "numpy", "optim", "random", "tree"}
)


def __getattr__(name: str) -> Any:
    if name in _LAZY_ATTRIBUTES:
        value = getattr(import_module(f"trainkernel.{_LAZY_ATTRIBUTES[name]}"), name)
    elif name in _LAZY_MODULES:
        value = import_module(f"trainkernel.{name}")
    else:
        raise AttributeError(f"module 'trainkernel' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
