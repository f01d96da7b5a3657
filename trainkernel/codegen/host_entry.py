"""The raw C host entry: the part of the generated source that a host compiler sees.

``emit_host_entry`` joins the templates ``cuda/host_api.c``, ``cuda/host_load.c`` and
``cuda/host_entry.c`` with a few constants and tables about one kernel. The templates hold no
placeholders; what differs between kernels is only in the macros and tables written here.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files

from trainkernel.errors import VerificationError

HEADER_BYTES = 256
_PARAMS_HEAD_BYTES = 16
_MAX_INT = 2**31 - 1
_MIN_INT = -_MAX_INT  # -2**31 is no C literal of type int
_MAX_STAGE_NAME_BYTES = 160


@dataclass(frozen=True)
class HostTensor:
    """A tensor slot of the launch.

    Attributes
    ----------
    kind : str
        ``"input"`` or ``"output"``.
    name : str
        The buffer's name.
    dtype : str
    size_bytes : int
        From the first to the last element, so with the gaps of a strided input.
    alignment_bytes : int
        What the address must be a multiple of.
    in_place : bool
        Whether the launch updates this input.
    """

    kind: str
    name: str
    dtype: str
    size_bytes: int
    alignment_bytes: int = 1
    in_place: bool = False


@dataclass(frozen=True)
class HostScalar:
    """A scalar input, 4 bytes at ``offset_bytes`` of the parameter block.

    ``int32`` and ``bool`` are passed as an int32 from ``minimum`` to ``maximum`` (for a loop's
    length, 0 and the room in its stacked tensors), every other dtype as a float32.
    """

    name: str
    dtype: str
    offset_bytes: int
    minimum: int | None = None
    maximum: int | None = None

    @property
    def is_integer(self) -> bool:
        return self.dtype in ("int32", "bool")

    @property
    def bounds(self) -> tuple[int, int]:
        """The integers allowed, both inclusive; ``(0, 0)`` for a float."""
        if not self.is_integer:
            return 0, 0
        low, high = (0, 1) if self.dtype == "bool" else (_MIN_INT, _MAX_INT)
        return (
            low if self.minimum is None else max(low, self.minimum),
            high if self.maximum is None else min(high, self.maximum),
        )


@dataclass(frozen=True)
class HostEntryDescription:
    """What the host entry needs to know of a kernel.

    ``tensors`` are in slot order: all inputs, then the outputs that are not in place.
    ``max_blocks`` 0 is no bound. ``stage_names`` are what the message of a barrier timeout calls
    the stages, by stage number; any text is allowed.
    """

    tensors: tuple[HostTensor, ...]
    scalars: tuple[HostScalar, ...]
    params_bytes: int
    uses_tensor_table: bool
    threads_per_block: int
    shared_bytes: int
    workspace_bytes: int
    blocks_per_sm: int
    max_work_blocks: int
    max_blocks: int = 0
    stage_names: tuple[str, ...] = ()
    entry: str = "trainkernel_step"
    header_bytes: int = HEADER_BYTES


def emit_host_entry(description: HostEntryDescription) -> str:
    """The host entry's C text, which is also valid C++.

    Raises
    ------
    VerificationError
        If the description contradicts the layout of the parameter block or the workspace.
    """
    check_description(description)
    tail = "\n".join(f"#undef {name}" for name, _ in _macros(description))
    return "\n".join(
        (
            _template("host_api.c"),
            "#ifndef TRAINKERNEL_DECLARATIONS_ONLY",
            _kernel_macros(description),
            _tables(description),
            _template("host_load.c"),
            _template("host_entry.c"),
            tail,
            _END,
        )
    )


def check_description(description: HostEntryDescription) -> None:
    """Refuse a description that cannot belong to a generated kernel."""
    kinds = [tensor.kind for tensor in description.tensors]
    if kinds != sorted(kinds) or set(kinds) - {"input", "output"}:
        raise VerificationError(f"host entry: tensor slots must be the inputs, then the outputs; got {kinds}")
    num_pointers = 1 if description.uses_tensor_table else len(kinds)
    offset_bytes = _PARAMS_HEAD_BYTES + 8 * num_pointers
    for scalar in description.scalars:
        if scalar.offset_bytes != offset_bytes:
            raise VerificationError(
                f"host entry: scalar {scalar.name} lies at byte {scalar.offset_bytes} of the parameter block, "
                f"the layout puts it at {offset_bytes}"
            )
        offset_bytes += 4
    needed_bytes = -(-offset_bytes // 8) * 8
    if description.params_bytes != needed_bytes:
        raise VerificationError(
            f"host entry: the parameter block has {description.params_bytes} bytes, its fields need {needed_bytes}"
        )
    if description.workspace_bytes < description.header_bytes:
        raise VerificationError(
            f"host entry: a workspace of {description.workspace_bytes} bytes does not hold the header "
            f"of {description.header_bytes}"
        )


def c_string(text: str, max_bytes: int = 4000) -> str:
    """A C string literal of any text, cut to ``max_bytes`` bytes of UTF-8.

    Everything but letters, digits, spaces and plain punctuation is written as an octal escape,
    so no text can end the literal, form a trigraph or splice a line.
    """
    plain = b" _-+=.,:;()[]{}<>!@#$%^&|~/"
    cut = text.encode("utf-8", "replace")[:max_bytes]
    body = "".join(
        chr(byte) if byte in plain or (chr(byte).isascii() and chr(byte).isalnum()) else f"\\{byte:03o}" for byte in cut
    )
    return f'"{body}"'


def _template(name: str) -> str:
    path = files("trainkernel.codegen") / "cuda" / name
    return path.read_text(encoding="ascii").rstrip("\n") + "\n"


def _macros(description: HostEntryDescription) -> tuple[tuple[str, str], ...]:
    num_inputs = sum(tensor.kind == "input" for tensor in description.tensors)
    return (
        ("TK_HOST_ENTRY", c_string(description.entry)),
        ("TK_HOST_NUM_INPUTS", str(num_inputs)),
        ("TK_HOST_NUM_OUTPUTS", str(len(description.tensors) - num_inputs)),
        ("TK_HOST_NUM_SLOTS", str(len(description.tensors))),
        ("TK_HOST_NUM_SCALARS", str(len(description.scalars))),
        ("TK_HOST_NUM_STAGES", str(max(1, len(description.stage_names)))),
        ("TK_HOST_PARAMS_BYTES", str(description.params_bytes)),
        ("TK_HOST_USES_TENSOR_TABLE", str(int(description.uses_tensor_table))),
        ("TK_HOST_THREADS_PER_BLOCK", str(description.threads_per_block)),
        ("TK_HOST_SHARED_BYTES", str(description.shared_bytes)),
        ("TK_HOST_WORKSPACE_BYTES", f"{description.workspace_bytes}ull"),
        ("TK_HOST_HEADER_BYTES", str(description.header_bytes)),
        ("TK_HOST_BLOCKS_PER_SM", str(description.blocks_per_sm)),
        ("TK_HOST_MAX_WORK_BLOCKS", str(min(description.max_work_blocks, _MAX_INT))),
        ("TK_HOST_MAX_BLOCKS", str(min(description.max_blocks, _MAX_INT))),
    )


def _kernel_macros(description: HostEntryDescription) -> str:
    lines = ["/* This kernel, as the generator planned it. */"]
    lines += [f"#define {name} {value}" for name, value in _macros(description)]
    return "\n".join(lines) + "\n"


def _table(declaration: str, rows: list[str], empty: str) -> str:
    """A static array; ISO C has no empty ones, so an unused row stands for none."""
    body = ",\n".join(f"    {row}" for row in rows or [empty])
    return f"static const {declaration}[] = {{\n{body},\n}};\n"


def _tables(description: HostEntryDescription) -> str:
    slots = [
        f"{{{c_string(tensor.name)}, {c_string(tensor.dtype)}, {tensor.size_bytes}ull, "
        f"{max(1, tensor.alignment_bytes)}, {int(tensor.in_place)}}}"
        for tensor in description.tensors
    ]
    scalars = [
        f"{{{c_string(scalar.name)}, {c_string(scalar.dtype)}, {int(scalar.is_integer)}, "
        f"{scalar.bounds[0]}, {scalar.bounds[1]}}}"
        for scalar in description.scalars
    ]
    offsets = [str(scalar.offset_bytes) for scalar in description.scalars]
    stages = [c_string(name, _MAX_STAGE_NAME_BYTES) for name in description.stage_names]
    return "\n".join(
        (
            _table("TK_HOST(tensor) TK_HOST(slots)", slots, '{"", "", 0, 1, 0}'),
            _table("TK_HOST(scalar_description) TK_HOST(scalar_table)", scalars, '{"", "", 0, 0, 0}'),
            _table("int TK_HOST(scalar_offsets)", offsets, "0"),
            _table("char* const TK_HOST(stage_names)", stages, '""'),
        )
    )


_END = """\
#undef TK_HOST_TRY
#undef TK_HOST_CALL
#endif /* TRAINKERNEL_DECLARATIONS_ONLY */

#undef TK_HOST
#undef TK_HOST_JOIN
#undef TK_HOST_JOIN_EXPANDED
#ifdef TK_HOST_DEFAULT_PREFIX
#undef TK_HOST_DEFAULT_PREFIX
#undef TRAINKERNEL_PREFIX
#endif
"""
