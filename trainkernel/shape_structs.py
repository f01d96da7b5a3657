"""``eval_shape``: the shapes and dtypes of a function's results, without computing any."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from trainkernel import tree
from trainkernel.dtypes import DTYPES
from trainkernel.primitives import dtype_name
from trainkernel.trace import Aval, as_value, aval_of, new_trace, parameter


class ShapeDtypeStruct:
    """What is known of an array without its elements; a leaf of trees, which a dataclass would not be.

    Attributes
    ----------
    shape : tuple of int
    dtype : numpy.dtype
        Given as a name, a NumPy dtype or a scalar type.
    """

    __slots__ = ("dtype", "shape")

    def __init__(self, shape: Sequence[int], dtype: Any) -> None:
        self.shape = tuple(shape)
        self.dtype: np.dtype[Any] = DTYPES[dtype_name(dtype)].numpy

    def __repr__(self) -> str:
        return f"ShapeDtypeStruct(shape={self.shape}, dtype={self.dtype})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ShapeDtypeStruct) and (self.shape, self.dtype) == (other.shape, other.dtype)

    def __hash__(self) -> int:
        return hash((self.shape, self.dtype))

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a 0-d array has no length")
        return self.shape[0]


def eval_shape(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The shapes and dtypes of what ``fun(*args, **kwargs)`` returns, which is traced and not computed.

    Parameters
    ----------
    fun : callable
    *args, **kwargs : trees of arrays, numbers, or anything with a shape and a dtype

    Returns
    -------
    tree of ShapeDtypeStruct

    Raises
    ------
    TraceError
        Where ``fun`` cannot be traced.
    """
    leaves, treedef = tree.flatten((args, kwargs))
    with new_trace("eval_shape") as trace:
        positional, named = tree.unflatten(treedef, [parameter(_aval(leaf), trace) for leaf in leaves])
        results, structure = tree.flatten(fun(*positional, **named))
        avals = [aval_of(as_value(result)) for result in results]
    return tree.unflatten(structure, [ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals])


def _aval(leaf: Any) -> Aval:
    is_described = hasattr(leaf, "shape") and hasattr(leaf, "dtype") and not isinstance(leaf, np.generic)
    return Aval(tuple(leaf.shape), dtype_name(leaf.dtype)) if is_described else aval_of(as_value(leaf))
