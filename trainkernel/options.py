"""The tuning options of ``generate``: what they may be, and one frozen record of them.

An option left out (None) is chosen by the cost model; given, it is obeyed where it applies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

from trainkernel.errors import OptionError
from trainkernel.ir import Program, ScalarSpec, TensorSpec

ALLOWED_INTS: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {
        "blocks_per_sm": tuple(range(1, 9)),
        "gemm_k_tile": (16, 32),
        "gemm_tile_n": (32, 64),
        "region_pieces": tuple(range(1025)),
        "shared_skew": (0, 16),
        "threads_per_block": (128, 256, 512, 1024),
    }
)
PRECISIONS = ("highest", "tf32")
SWITCHES = ("fuse_pointwise", "fuse_epilogues", "split_k_gemv", "inline_input_casts", "stamps", "parts")
MAX_BLOCKS_LIMIT = 2**31 - 1


@dataclass(frozen=True)
class Options:
    """Checked options; None means that the cost model chooses.

    Attributes
    ----------
    blocks_per_sm : int or None
        Upper bound of resident blocks per SM that the grid uses, 1 to 8.
    max_blocks : int or None
        Upper bound of the grid, at least 1.
    fuse_pointwise : bool or None
        Evaluate pointwise values inside their consumers.
    fuse_epilogues : bool or None
        Run pointwise ops on a product's tile, or on a reduction's result, before the store.
    inline_input_casts : bool or None
        Evaluate casts of program inputs in every consumer (needs ``fuse_pointwise``).
    gemm_k_tile, gemm_tile_n, shared_skew : int or None
        Tile sizes of products in elements: depth, width; skew of shared-memory rows in bytes.
    split_k_gemv : bool or None
        Use the matrix-vector path that splits the depth over the threads of a block.
    threads_per_block : int or None
    region_pieces : int or None
        Pieces into which the rows of a block region are cut, 0 to 1024; 0: neither a region nor row groups,
        1: the step runs in one block. A number that divides no label leaves the step without a region.
    precision : str or None
        Of float32 products: ``"highest"`` (None), as exact as sums of float32 multiply-adds, or ``"tf32"``, which
        lets tensor cores multiply operands rounded to TF32's 11 bits.
    stamps : bool or None
        Whether block 0 writes down when it reaches each stage and each part of a region.
    parts : bool or None
        Whether a launch runs the stages and steps that its arguments name, so that a run may be several launches;
        ``tk.compile(..., max_launch_ms=...)`` sets it. Not together with ``stamps``.
    """

    blocks_per_sm: int | None = None
    max_blocks: int | None = None
    fuse_pointwise: bool | None = None
    fuse_epilogues: bool | None = None
    inline_input_casts: bool | None = None
    gemm_k_tile: int | None = None
    gemm_tile_n: int | None = None
    shared_skew: int | None = None
    split_k_gemv: bool | None = None
    threads_per_block: int | None = None
    region_pieces: int | None = None
    precision: str | None = None
    stamps: bool | None = None
    parts: bool | None = None

    @property
    def threads(self) -> int:
        """Threads per block: the option's, else 256."""
        return self.threads_per_block or 256

    @property
    def columns(self) -> int:
        """Neighbouring rows that a block reduces together: a multiple of a warp, each row by eight threads or fewer."""
        return max(32, self.threads // 8)


def describe_choices(name: str) -> str:
    """What an option that is an int may be, in words."""
    choices = ALLOWED_INTS.get(name, ())
    if len(choices) > 99:
        return f"{choices[0]} to {choices[-1]}"
    return ", ".join(str(choice) for choice in choices)


def check_options(values: Mapping[str, Any]) -> Options:
    """Check each option's type and value.

    Raises
    ------
    OptionError
        Naming the option, what it got and what is allowed.
    """
    known = [field.name for field in fields(Options)]
    for name, value in values.items():
        if name not in known:
            raise OptionError(f"unknown option {name!r}; known: {', '.join(known)}")
        if value is None:
            continue
        if name in SWITCHES:
            if not isinstance(value, bool):
                raise OptionError(f"option {name} must be True, False or None, got {value!r}")
            continue
        if name == "precision":
            if value not in PRECISIONS:
                raise OptionError(f"option precision must be one of {', '.join(PRECISIONS)} or None, got {value!r}")
            continue
        if not isinstance(value, int) or isinstance(value, bool):
            raise OptionError(f"option {name} must be an int or None, got {value!r}")
        if name == "max_blocks":
            if not 1 <= value <= MAX_BLOCKS_LIMIT:
                raise OptionError(f"option max_blocks must be 1 to {MAX_BLOCKS_LIMIT}, got {value}")
        elif value not in ALLOWED_INTS[name]:
            raise OptionError(f"option {name} must be one of {describe_choices(name)}, got {value}")
    if values.get("stamps") and values.get("parts"):
        raise OptionError(
            "stamps and launches in parts (max_launch_ms) exclude each other: time stamps are those of a whole launch"
        )
    return Options(**values)


def check_inplace_outputs(program: Program, inplace_outputs: Any) -> dict[int, int]:
    """Check ``{output_index: input_index}`` against the program.

    Raises
    ------
    OptionError
        Saying which entry breaks which rule.
    """
    if inplace_outputs is None:
        return {}
    if not isinstance(inplace_outputs, Mapping):
        raise OptionError(f"inplace_outputs must map output index to input index, got {inplace_outputs!r}")
    inputs = {spec.buffer for spec in program.inputs}
    taken: dict[int, int] = {}
    for output_index, input_index in inplace_outputs.items():
        entry = f"inplace_outputs {{{output_index!r}: {input_index!r}}}"
        _check_position(entry, "output", output_index, len(program.outputs))
        _check_position(entry, "input", input_index, len(program.inputs))
        output, target = program.outputs[output_index], program.inputs[input_index]
        if input_index in taken:
            raise OptionError(f"{entry}: input {input_index} is already the target of output {taken[input_index]}")
        taken[input_index] = output_index
        if isinstance(target, ScalarSpec):
            raise OptionError(f"{entry}: input {target.buffer!r} is a scalar passed by value")
        if output.shape != target.shape or output.dtype != target.dtype:
            raise OptionError(f"{entry}: output {output} and input {target} differ in shape or dtype")
        if not target.is_dense:
            raise OptionError(f"{entry}: input {target} is not contiguous")
        if output.buffer in inputs:
            raise OptionError(f"{entry}: output {output} is not computed; it is a view of an input")
    return dict(sorted(inplace_outputs.items()))


def _check_position(entry: str, kind: str, position: Any, count: int) -> None:
    if not isinstance(position, int) or isinstance(position, bool) or not 0 <= position < count:
        raise OptionError(f"{entry}: {kind} index {position!r} is not an int in 0..{count - 1}")


def whole_buffer(spec: TensorSpec, declared: TensorSpec) -> bool:
    """Whether a view is all of a computed buffer in row-major order (reshaped or not)."""
    return spec.is_dense and spec.offset == declared.offset and spec.num_elements == declared.num_elements
