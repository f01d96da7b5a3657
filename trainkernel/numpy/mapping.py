"""Functions of rows or elements as functions of arrays, by ``vmap``."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from trainkernel import primitives as b
from trainkernel.batching import vmap
from trainkernel.errors import TraceError
from trainkernel.numpy.axes import one_axis
from trainkernel.numpy.shapes import broadcast_to
from trainkernel.trace import at_user_line

Value = Any

__all__ = ["apply_along_axis", "vectorize"]


def apply_along_axis(func1d: Callable[..., Value], axis: int, arr: Value, *args: Any, **kwargs: Any) -> Value:
    """A function of a row, of each row along an axis; its result takes the row's place."""
    x = b.as_array(arr)
    rank = len(x.shape)
    along = one_axis(axis, rank, "apply_along_axis")

    def function(row: Value) -> Value:
        return func1d(row, *args, **kwargs)

    for place in range(1, rank - along):
        function = vmap(function, in_axes=place, out_axes=-1)
    for _ in range(along):
        function = vmap(function)
    return function(x)


def vectorize(
    pyfunc: Callable[..., Any], *, excluded: Collection[int | str] = frozenset(), signature: str | None = None
) -> Callable[..., Any]:
    """A function of single elements as one of arrays that broadcast.

    Parameters
    ----------
    pyfunc : callable
    excluded : collection of int and str
        Arguments that are passed as they are, by position; all named ones are.
    signature : str, optional
        The dims of single arguments, as in ``"(n,m),(m)->(n)"``; without, they have none.

    Raises
    ------
    TraceError
        When called, if the arguments do not fit the signature or do not broadcast.
    """
    ranks = None if signature is None else _ranks(signature)

    @functools.wraps(pyfunc)
    def vectorized(*args: Any, **kwargs: Any) -> Any:
        places = [place for place in range(len(args)) if place not in excluded]
        if ranks is not None and len(ranks) != len(places):
            raise TraceError(f"vectorize: {len(places)} arguments for the signature {signature!r}{at_user_line()}")
        values = [b.as_array(args[place]) for place in places]
        inner = [0] * len(places) if ranks is None else ranks
        outer = _outer_shape(values, inner, signature)
        spread = [
            broadcast_to(x, (*outer, *x.shape[len(x.shape) - rank :])) for x, rank in zip(values, inner, strict=True)
        ]

        def function(*given: Value) -> Any:
            full = list(args)
            for place, value in zip(places, given, strict=True):
                full[place] = value
            return pyfunc(*full, **kwargs)

        for _ in outer:
            function = vmap(function)
        return function(*spread)

    return vectorized


def _outer_shape(values: list[Value], inner: list[int], signature: str | None) -> tuple[int, ...]:
    if any(len(x.shape) < rank for x, rank in zip(values, inner, strict=True)):
        shapes = ", ".join(str(list(x.shape)) for x in values)
        raise TraceError(f"vectorize: arguments of shapes {shapes} for the signature {signature!r}{at_user_line()}")
    outer = [tuple(x.shape[: len(x.shape) - rank]) for x, rank in zip(values, inner, strict=True)]
    try:
        return tuple(np.broadcast_shapes(*outer))
    except ValueError:
        raise TraceError(f"vectorize: {', '.join(map(str, outer))} do not broadcast{at_user_line()}") from None


def _ranks(signature: str) -> list[int]:
    """How many dims each argument of a signature has."""
    dims = r"\(\s*(?:\w+\s*(?:,\s*\w+\s*)*)?\)"
    several = rf"{dims}(?:\s*,\s*{dims})*"
    if re.fullmatch(rf"\s*{several}\s*->\s*{several}\s*", signature) is None:
        raise TraceError(f"vectorize: {signature!r} is no signature such as '(n,m),(m)->(n)'{at_user_line()}")
    return [len(re.findall(r"\w+", each)) for each in re.findall(dims, signature.split("->")[0])]
