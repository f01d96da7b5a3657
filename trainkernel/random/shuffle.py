"""Shuffled orders whose elements are computed one by one: none is ever stored.

A long order is a Feistel network on pairs ``(left, right)`` of Z_a × Z_b, with ``x = left * b +
right``. Its rounds ``left += f(right) mod a`` and ``right += f(left) mod b`` can each be undone, so
the network permutes ``0..a * b - 1`` whatever ``f`` is; here ``f`` is Philox, which makes it a
pseudorandom permutation (Luby and Rackoff, "How to construct pseudorandom permutations from
pseudorandom functions", 1988; Black and Rogaway, "Ciphers with arbitrary finite domains", 2002).

``a * b`` is the size plus a small rest, found by a search over ``a``. An index that the network
sends into the rest walks on through it until it comes out (cycle walking). That is exact in a
bounded number of steps: a walk stays on one cycle of a permutation, so it meets each of the
``a * b - size`` elements of the rest at most once before it comes out, and as the walk from each
index below the size ends at the first such index on its cycle, no two walks end at the same one:
every index is hit exactly once. For a long order the ends of the walks from the rest are a table of
that many entries, so an index costs one network and a look-up; the few indices of a mini-batch walk
each by itself, so that none waits for a table.

A short order, of which a network has too few, is the rank of each of its random words.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from trainkernel import primitives as b
from trainkernel.errors import TraceError
from trainkernel.promotion import is_integer
from trainkernel.random.keys import SHUFFLED, checked_key, fold_in, words
from trainkernel.trace import as_value, at_user_line, aval_of, is_scalar

Value = Any

LONGEST_RANKED = 256
MOST_WALKERS = 4096
MAX_SIZE = 2**31 - 1
_ROUNDS = 6


def shuffled_index(key: Value, positions: Any, size: int) -> Value:
    """Elements of a shuffled order of ``0..size - 1`` at given positions.

    The order is a permutation: over all positions each index comes exactly once. Gather with it
    (``x[shuffled_index(key, positions, len(x))]``) to read mini-batches in random order without a
    shuffled copy of the data, or of the order.

    Parameters
    ----------
    key : uint32[2]
        One key is one order: fold the number of the epoch into it for a new one.
    positions : int or integer array
        Taken modulo ``size``; may be traced.
    size : int

    Returns
    -------
    int32 array of the shape of ``positions``

    Raises
    ------
    TraceError
        If a position is no integer, or the size is not in ``1..2**31 - 1``.
    """
    value, size = as_value(positions), _checked_size(size, "shuffled_index")
    if isinstance(value, bool) or not is_integer(aval_of(value).dtype):
        raise TraceError(f"positions are integers, got {aval_of(value)}{at_user_line()}")
    place = b.full((), value % size, "int32") if is_scalar(value) else _wrapped(value, size)
    key = checked_key(key, "shuffled_index")
    return _ranked(key, place, size) if size <= LONGEST_RANKED else _walked(key, place, size)


def shuffled_batch(key: Value, step: Any, batch_size: int, size: int) -> Value:
    """Indices of the mini-batch of a step, each epoch in a new shuffled order.

    An epoch has ``size // batch_size`` steps; what is left over is another part of the data in
    each epoch.

    Parameters
    ----------
    key : uint32[2]
    step : int or integer scalar array
        Counts from 0 over all epochs; may be traced.
    batch_size, size : int

    Returns
    -------
    int32[batch_size]

    Raises
    ------
    TraceError
        If a batch is empty or larger than the data.
    """
    if not 1 <= batch_size <= _checked_size(size, "shuffled_batch"):
        raise TraceError(f"a batch of {batch_size} from {size} examples{at_user_line()}")
    value = as_value(step)
    value = b.full((), value, "int32") if is_scalar(value) else b.cast(value, "int32")
    epoch = b.floor_divide(value, size // batch_size)
    first = b.mul(b.remainder(value, size // batch_size), batch_size)
    positions = b.add(b.broadcast(first, (batch_size,), ()), b.iota(batch_size))
    return shuffled_index(fold_in(key, epoch), positions, size)


def permutation(key: Value, x: Any, axis: int = 0) -> Value:
    """A shuffled range or array.

    Parameters
    ----------
    key : uint32[2]
    x : int or array
        An int stands for ``0..x - 1``.
    axis : int
        Along which whole slices of an array are shuffled.

    Returns
    -------
    int32[x], or an array like ``x``

    Raises
    ------
    TraceError
        If ``x`` is a scalar that is no int, or has no such axis.
    """
    if isinstance(x, (int, np.integer)) and not isinstance(x, bool):
        checked_key(key, "permutation")
        return b.iota(0) if x == 0 else shuffled_index(key, b.iota(int(x)), int(x))
    value = as_value(x)
    ndim = len(aval_of(value).shape)
    if not -ndim <= axis < ndim:
        raise TraceError(f"cannot shuffle {aval_of(value)} along axis {axis}{at_user_line()}")
    return take_along(value, permutation(key, value.shape[axis]), axis)


def take_along(x: Value, indices: Value, axis: int) -> Value:
    """Slices of ``x`` by the indices, whose dims take the place of the axis."""
    ndim, axis = len(x.shape), axis % len(x.shape)
    if x.shape[axis] == 0:
        return x
    rows = b.transpose(x, (axis, *(dim for dim in range(ndim) if dim != axis)))
    taken = b.take(rows, indices)
    lead = len(indices.shape)
    order = [*range(lead, lead + axis), *range(lead), *range(lead + axis, len(taken.shape))]
    return b.transpose(taken, order)


def _checked_size(size: int, what: str) -> int:
    if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or not 1 <= size <= MAX_SIZE:
        raise TraceError(f"{what} needs a size in 1..{MAX_SIZE}, got {size!r}{at_user_line()}")
    return int(size)


def _wrapped(positions: Value, size: int) -> Value:
    """Positions modulo the size, int32."""
    wide = b.cast(positions, "int32" if aval_of(positions).dtype == "uint8" else aval_of(positions).dtype)
    return b.cast(b.remainder(wide, size), "int32")


# ---------------------------------------------------------------------------- short orders


def ranks(values: Value, of: Value, places: Value) -> Value:
    """The rank of each element ``of`` among ``values`` (1-d); equal ones rank by their places."""
    shape = (*of.shape, *values.shape)
    across, along = tuple(range(len(of.shape))), (len(of.shape),)
    others, own = b.broadcast(values, shape, along), b.broadcast(of, shape, across)
    earlier = b.compare(b.broadcast(b.iota(values.shape[0]), shape, along), b.broadcast(places, shape, across), "lt")
    tied = b.bitwise_and(b.compare(others, own, "eq"), earlier)
    before = b.bitwise_or(b.compare(others, own, "lt"), tied)
    return b.sum(b.cast(before, "int32"), dims=along)


def _ranked(key: Value, place: Value, size: int) -> Value:
    drawn = words(key, (size,), SHUFFLED)
    return ranks(drawn, b.take(drawn, place), place)


# ---------------------------------------------------------------------------- long orders


@functools.cache
def domain_of(size: int) -> tuple[int, int]:
    """``(a, b)`` with ``a * b`` least among those not below ``size``, ``b / 4 <= a <= b + 1``.

    Halves of very different sizes would need more rounds: with 4 times 83 the distance of two
    elements is measurably uneven after 6, with 16 times 21 it is not.
    """
    root = math.isqrt(size - 1) + 1
    candidates = range((root + 1) // 2, root + 1)
    a = min(candidates, key=lambda a: (-size % a, -a))
    return a, -(-size // a)


def _walked(key: Value, place: Value, size: int) -> Value:
    a, other = domain_of(size)
    rest = a * other - size
    image = _permuted(key, b.cast(place, "uint32"), a, other)
    if math.prod(place.shape) <= MOST_WALKERS:
        image = _walk_on(key, image, size)
    elif rest:
        end = _walk_on(key, b.add(b.iota(rest, "uint32"), size), size)
        outside = b.compare(image, size, "ge")
        image = b.where(outside, b.take(end, b.where(outside, b.sub(image, size), 0)), image)
    return b.cast(image, "int32")


def _walk_on(key: Value, x: Value, size: int) -> Value:
    """The ends of the walks from elements of the network's domain, uint32."""
    a, other = domain_of(size)
    for _ in range(a * other - size):
        x = b.where(b.compare(x, size, "ge"), _permuted(key, x, a, other), x)
    return x


def _permuted(key: Value, x: Value, a: int, other: int) -> Value:
    """One pass of the network through ``0..a * other - 1``, uint32."""
    keys = b.broadcast(key, (*x.shape, 2), (len(x.shape),))
    left = b.floor_divide(x, other)
    right = b.sub(x, b.mul(left, other))
    for number in range(0, _ROUNDS, 2):
        left = _turned(keys, left, right, a, number)
        right = _turned(keys, right, left, other, number + 1)
    return b.add(b.mul(left, other), right)


def _turned(keys: Value, half: Value, by: Value, modulus: int, number: int) -> Value:
    """``half + f(by)`` modulo ``modulus``: below ``2**16 + 2**17`` there is no overflow."""
    amount = b.remainder(b.random_bits(keys, by, shape=(), stream=SHUFFLED + number), modulus)
    return b.remainder(b.add(half, amount), modulus)
