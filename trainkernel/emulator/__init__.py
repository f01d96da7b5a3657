"""The emitted CUDA source, unchanged, on the CPU.

The source is compiled by the host's C++ compiler against a small shim. CUDA threads are fibers on
one host thread: all blocks are alive at once, a thread runs until it must wait, and the order of
blocks and threads can be permuted. Memory that nobody wrote is poison. With ``check_races`` every
access is watched, so that a missing block, cluster or grid barrier, a stray access or a read of
poison is found in one run, whatever the order, and reported by buffer, stage and operation.
"""

from trainkernel.emulator.compiler import Compiler, EmulatedKernel, compile_sources, find_compiler, is_available
from trainkernel.emulator.emulate import EmulationResult, emulate, prepare, run
from trainkernel.emulator.launch import Counters, LaunchResult, Region, Report, launch
from trainkernel.emulator.report import Names, check_reports

__all__ = [
    "Compiler",
    "Counters",
    "EmulatedKernel",
    "EmulationResult",
    "LaunchResult",
    "Names",
    "Region",
    "Report",
    "check_reports",
    "compile_sources",
    "emulate",
    "find_compiler",
    "is_available",
    "launch",
    "prepare",
    "run",
]
