"""Program to CUDA source: ``generate`` runs every stage and keeps them all in its result."""

from __future__ import annotations

from collections.abc import Mapping

from trainkernel.codegen.generated import GeneratedKernel, Region, ScalarSlot, Slot, TaskInfo
from trainkernel.codegen.kernel import assemble
from trainkernel.errors import OptionError
from trainkernel.ir import Program, validate
from trainkernel.memory import plan_memory
from trainkernel.options import check_inplace_outputs, check_options
from trainkernel.placement import build_schedule
from trainkernel.target import Target
from trainkernel.verify import verify_plan

__all__ = ["GeneratedKernel", "Region", "ScalarSlot", "Slot", "TaskInfo", "generate"]


def generate(
    program: Program,
    *,
    target: Target | str | None = None,
    blocks_per_sm: int | None = None,
    fuse_pointwise: bool | None = None,
    max_blocks: int | None = None,
    fuse_epilogues: bool | None = None,
    gemm_k_tile: int | None = None,
    gemm_tile_n: int | None = None,
    shared_skew: int | None = None,
    split_k_gemv: bool | None = None,
    threads_per_block: int | None = None,
    inline_input_casts: bool | None = None,
    region_pieces: int | None = None,
    precision: str | None = None,
    stamps: bool | None = None,
    parts: bool | None = None,
    inplace_outputs: Mapping[int, int] | None = None,
) -> GeneratedKernel:
    """Generate the kernel of a Program; needs neither a GPU nor a toolkit.

    Parameters
    ----------
    program : Program
    target : Target or str, optional
        What may be assumed of the device, or a preset's name; the portable target by default.
    inplace_outputs : mapping of output index to input index, optional
        Outputs that update an input's storage.
    **options
        The tuning options of ``trainkernel.options.Options``; None lets the cost model choose.

    Returns
    -------
    GeneratedKernel

    Raises
    ------
    ProgramError
        If the program breaks a rule of the language.
    OptionError
        If an option has a wrong type or value; it names the option and what is allowed.
    """
    validate(program)
    options = check_options(
        {
            "blocks_per_sm": blocks_per_sm,
            "fuse_pointwise": fuse_pointwise,
            "max_blocks": max_blocks,
            "fuse_epilogues": fuse_epilogues,
            "gemm_k_tile": gemm_k_tile,
            "gemm_tile_n": gemm_tile_n,
            "shared_skew": shared_skew,
            "split_k_gemv": split_k_gemv,
            "threads_per_block": threads_per_block,
            "inline_input_casts": inline_input_casts,
            "region_pieces": region_pieces,
            "precision": precision,
            "stamps": stamps,
            "parts": parts,
        }
    )
    inplace = check_inplace_outputs(program, inplace_outputs)
    schedule = build_schedule(program, _target(target), options, inplace)
    plan = plan_memory(schedule)
    verify_plan(schedule, plan)
    return assemble(program, schedule, plan)


def _target(target: Target | str | None) -> Target:
    if target is None:
        return Target.preset("portable")
    if isinstance(target, str):
        return Target.preset(target)
    if not isinstance(target, Target):
        raise OptionError(f"option target must be a Target or a preset's name, got {target!r}")
    return target
