"""The op table as Markdown: ``python -m trainkernel.ops.table > docs/ops.md``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from trainkernel.ops import OPS, REQUIRED, Op

MEANINGS: Mapping[str, str] = MappingProxyType(
    {
        "add": "`a + alpha * b`",
        "sub": "`a - alpha * b`",
        "mul": "`a * b`",
        "div": "`a / b`",
        "neg": "`-x`",
        "cast": "`x` in the output's dtype",
        "relu": "`x < 0 ? 0 : x`",
        "pow": "`x ** exponent`; an exponent of 2 is a product",
        "power": "`x ** y`",
        "threshold_backward": "`x <= threshold ? 0 : grad`",
        "full": "`value` everywhere",
        "exp": "`e ** x`",
        "expm1": "`e ** x - 1`",
        "log": "natural logarithm",
        "log1p": "`log(1 + x)`",
        "tanh": "hyperbolic tangent",
        "sigmoid": "`1 / (1 + exp(-x))`",
        "softplus": "`log(1 + exp(x))`",
        "erf": "error function",
        "sin": "sine",
        "cos": "cosine",
        "arcsin": "inverse of the sine, in `-pi/2 .. pi/2`",
        "arccos": "inverse of the cosine, in `0 .. pi`",
        "arctan": "inverse of the tangent, in `-pi/2 .. pi/2`",
        "arctan2": "angle of the point `(x, y)`, given as `y, x`, in `-pi .. pi`",
        "arcsinh": "inverse of the hyperbolic sine",
        "arccosh": "inverse of the hyperbolic cosine, not negative",
        "cbrt": "cube root",
        "sqrt": "square root",
        "rsqrt": "`1 / sqrt(x)`",
        "abs": "absolute value",
        "sign": "-1, 0 or 1",
        "floor": "rounded down",
        "ceil": "rounded up",
        "round": "rounded to the nearest whole number, halves to even",
        "maximum": "the greater; NaN if either is",
        "minimum": "the smaller; NaN if either is",
        "remainder": "`a - floor(a / b) * b`, with the divisor's sign; integers modulo 0 stay",
        "floor_divide": "`floor(a / b)`; integers divided by 0 give -1",
        "compare": "`lt`, `le`, `gt`, `ge`, `eq` or `ne`, as 0 or 1",
        "where": "`condition ? a : b`",
        "bitwise_and": "`a & b`",
        "bitwise_or": "`a \\| b`",
        "bitwise_xor": "`a ^ b`",
        "bitwise_not": "`~x`",
        "shift_left": "`a << b`",
        "shift_right": "`a >> b`, arithmetic for signed integers",
        "iota": "the last coordinate",
        "flip": "reversed along `dims`",
        "pad": "`low`, `high` and `interior` padding with a scalar, all at least 0",
        "concatenate": "operands behind one another along `dim`",
        "take": "rows of `x` by indices of any shape, clamped to the range",
        "dynamic_slice": "a window of `sizes` at starts that are clamped to the range",
        "dynamic_update": "`x` with a window replaced, at starts that are clamped to the range",
        "random_bits": "words of Philox 4x32-10 under a key; see random.md",
        "sum": "sum over `dims`",
        "mean": "mean over `dims`",
        "max": "greatest over `dims`; NaN if one is",
        "min": "smallest over `dims`; NaN if one is",
        "prod": "product over `dims`",
        "softmax_stats": "maximum, and sum of `exp(x - maximum)`, over `dims`",
        "moments": "mean, and mean of squares of what is left, over `dims`",
        "scatter_add": "`out[indices[k]] += updates[k]` from zeros, in order; indices outside are dropped",
        "cumsum": "running sum along `dim`, from the end with `reverse`",
        "mm": "`[m,k] @ [k,n]`",
        "bmm": "`[b,m,k] @ [b,k,n]`",
        "addmm": "`beta * bias + alpha * (a @ b)`",
        "reshape": "the same elements in another shape",
        "transpose": "dims in another order",
        "broadcast": "dims at `dims` of `shape`, repeated along the others",
        "slice": "`x[start:limit:stride]`",
        "stop_gradient": "`x`, a constant to derivatives",
    }
)

_KINDS: Mapping[str, str] = MappingProxyType(
    {
        "pointwise": "Pointwise: one element of the output from the same element of each operand",
        "indexed": "Indexed: pointwise, but operands are read at other coordinates",
        "reduction": "Reductions",
        "scan": "Scans",
        "product": "Products",
        "view": "Views: in traced steps alone, since in a Program a TensorSpec says the same",
    }
)

_HEADER = """# Supported operations

Written by `python -m trainkernel.ops.table > docs/ops.md` from the op table (`trainkernel/ops/`); a test checks that it
is current. What users call (`trainkernel.numpy`, `nn`, `losses`, `lax`, `random`, `optim`) is made of these.

- *operands*: how many. Python numbers may stand for those of pointwise operations, a padding value, and the starts of
  windows.
- *computes in*: `any` the operands' own domain, `float` a floating one, `int` an integer one; see
  [numerics.md](numerics.md).
- *attributes*: with their defaults; those without one are required.
- *ulps*: bound of the error of a float32 result on the device, in units in the last place. 0.5 is correct rounding. Of
  reductions, scans and products it is the bound for each accumulated term.
- *derivative*: `yes`, or `zero` where no operand has one; `none` where derivatives never meet the op.
"""


def markdown() -> str:
    """The whole page."""
    lines = [_HEADER]
    for kind, title in _KINDS.items():
        entries = [op for op in OPS.values() if ("indexed" if op.indexed else op.kind) == kind]
        lines += [f"## {title}", "", "| op | meaning | operands | attributes | computes in | ulps | derivative |"]
        lines += ["|---|---|---|---|---|---|---|", *(_row(op) for op in entries), ""]
    return "\n".join(lines)


def _row(op: Op) -> str:
    ulps = "" if op.kind == "view" else f"{op.max_ulps:g}"
    cells = (f"`{op.name}`", MEANINGS[op.name], _operands(op), _attributes(op), op.accepts, ulps, _derivative(op))
    return f"| {' | '.join(cells)} |"


def _operands(op: Op) -> str:
    counts: Sequence[int] = op.num_inputs
    return f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"


def _attributes(op: Op) -> str:
    shown = (f"`{name}`" if default is REQUIRED else f"`{name}={default!r}`" for name, (default, _) in op.attrs.items())
    return ", ".join(shown)


def _derivative(op: Op) -> str:
    if op.vjp is None:
        return "none"
    return "zero" if op.vjp.__name__ == "_no_vjp" or op.name == "stop_gradient" else "yes"


if __name__ == "__main__":
    print(markdown(), end="")
