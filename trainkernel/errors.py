"""Every error that trainkernel raises on purpose.

Each message says what failed, where, what was got against what is needed, and what to do.
Errors about a program, an option or an argument are also ``ValueError``, errors about a
device, a compiler or a launch are also ``RuntimeError``, so that callers can catch either.
"""

from __future__ import annotations


def show(value: object) -> str:
    """``repr`` for messages and printed programs, also where Python refuses to print a very long int."""
    try:
        return repr(value)
    except ValueError:
        return f"<{type(value).__name__} too long to print>"


class TrainkernelError(Exception):
    """Base of every error raised by trainkernel."""


class ProgramError(TrainkernelError, ValueError):
    """A Program breaks a rule of the language; the message prints the operation."""


class TraceError(TrainkernelError, ValueError, TypeError):
    """A Python function cannot be traced: shapes or dtypes that do not fit, or a value that does not exist yet."""


class OptionError(TrainkernelError, ValueError):
    """A compile option has a wrong type or value, or cannot be obeyed for this program."""


class ArgumentError(TrainkernelError, ValueError):
    """An array given to a kernel does not match its input or output."""


class DeviceError(TrainkernelError, RuntimeError):
    """No driver, no GPU, or a GPU that cannot do what is asked."""


class CompileError(TrainkernelError, RuntimeError):
    """NVRTC or the host's C++ compiler refused a source, or is not installed."""


class LaunchError(TrainkernelError, RuntimeError):
    """A kernel cannot be resident, failed to launch, or did not pass a barrier in time."""


class VerificationError(TrainkernelError, AssertionError):
    """A stage of the compiler broke an invariant: a bug in trainkernel, never in a program."""


class EmulatorError(TrainkernelError, RuntimeError):
    """The emulated kernel deadlocked or touched memory outside its buffers."""


class RaceError(EmulatorError):
    """The race detector found accesses that no barrier orders."""
