"""``einsum``: sums of products of any number of arrays, written with a letter for each dim."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import combinations
from math import prod
from typing import Any

from trainkernel import primitives as b
from trainkernel.errors import TraceError
from trainkernel.numpy.axes import refuse_out
from trainkernel.numpy.diagonals import diagonal
from trainkernel.numpy.products import contract, factors
from trainkernel.trace import at_user_line, aval_of

Value = Any
Labels = tuple[Hashable, ...]

__all__ = ["einsum"]


def einsum(
    subscripts: str,
    /,
    *operands: Value,
    out: None = None,
    optimize: Any = "auto",
    precision: Any = None,
    preferred_element_type: Any = None,
) -> Value:
    """Einstein summation: ``einsum("ij,jk->ik", a, b)``.

    Letters that are not in the result are summed over; a letter twice in one operand is its
    diagonal; ``...`` stands for dims that broadcast. Pairs of operands are contracted one after
    the other, at each step the pair with the smallest result.

    Raises
    ------
    TraceError
        If the subscripts do not fit the operands.
    """
    refuse_out(out)
    if not isinstance(subscripts, str):
        raise TraceError(f"einsum needs its subscripts as a string, got {subscripts!r}{at_user_line()}")
    values, dtype = factors(operands, preferred_element_type)
    terms, result = _parse(subscripts, [len(x.shape) for x in values])
    terms, values = _broadcastable(subscripts, terms, values)
    pairs = [_diagonals(x, labels) for x, labels in zip(values, terms, strict=True)]
    pairs = [_summed_alone(pairs, position, result) for position in range(len(pairs))]
    while len(pairs) > 1:
        pairs = _contract_one(pairs, result, dtype)
    value, labels = pairs[0]
    return b.transpose(b.cast(value, dtype), [labels.index(label) for label in result])


# ---------------------------------------------------------------------------- subscripts


def _bad(subscripts: str, problem: str) -> TraceError:
    return TraceError(f"einsum {subscripts!r}: {problem}{at_user_line()}")


def _parse(subscripts: str, ranks: Sequence[int]) -> tuple[list[Labels], Labels]:
    """One label for each dim of each operand, and of the result."""
    text = subscripts.replace(" ", "")
    left, arrow, right = text.partition("->")
    terms = left.split(",")
    if len(terms) != len(ranks):
        raise _bad(subscripts, f"it names {len(terms)} operands, and {len(ranks)} were given")
    labelled = [_labels(subscripts, term, rank) for term, rank in zip(terms, ranks, strict=True)]
    wide = max((sum(isinstance(label, int) for label in labels) for labels in labelled), default=0)
    dots: Labels = tuple(range(-wide, 0))
    if not arrow:
        letters = [letter for letter in sorted(set(left) - set(".,")) if left.count(letter) == 1]
        return labelled, (*dots, *letters)
    before, found, after = right.partition("...")
    result = (*before, *(dots if found else ()), *after)
    known = {label for labels in labelled for label in labels}
    for label in result:
        if label not in known or result.count(label) > 1:
            raise _bad(subscripts, f"{label!r} of the result is not one letter of the operands")
    return labelled, result


def _labels(subscripts: str, term: str, rank: int) -> Labels:
    """Letters, and for the dims of an ellipsis their distance from its end."""
    before, found, after = term.partition("...")
    letters = before + after
    if not all(letter.isalpha() for letter in letters):
        raise _bad(subscripts, f"{term!r} holds more than letters and one ellipsis")
    missing = rank - len(letters)
    if missing < 0 or (missing and not found):
        raise _bad(subscripts, f"{term!r} does not fit an operand of rank {rank}")
    return (*before, *range(-missing, 0), *after)


def _broadcastable(
    subscripts: str, terms: Sequence[Labels], values: Sequence[Value]
) -> tuple[list[Labels], list[Value]]:
    """Operands without the dims of size 1 that broadcast along those of others."""
    sizes: dict[Hashable, int] = {}
    for labels, x in zip(terms, values, strict=True):
        for label, size in zip(labels, x.shape, strict=True):
            known = sizes.get(label, 1)
            if size != 1 and known not in (1, size):
                shapes = " and ".join(str(list(each.shape)) for each in values)
                raise _bad(subscripts, f"{label!r} has sizes {known} and {size} in shapes {shapes}")
            sizes[label] = known if size == 1 else size
    kept_terms, kept = [], []
    for labels, x in zip(terms, values, strict=True):
        both = [(label, size) for label, size in zip(labels, x.shape, strict=True) if size == sizes[label]]
        kept_terms.append(tuple(label for label, _ in both))
        kept.append(b.reshape(x, [size for _, size in both]))
    return kept_terms, kept


# ---------------------------------------------------------------------------- contraction

Pair = tuple[Value, Labels]


def _diagonals(x: Value, labels: Labels) -> Pair:
    """The operand with each of its labels once."""
    for label in labels:
        while labels.count(label) > 1:
            first = labels.index(label)
            second = labels.index(label, first + 1)
            x = diagonal(x, 0, first, second)
            rest = [each for place, each in enumerate(labels) if place not in (first, second)]
            labels = (*rest, label)
    return x, labels


def _summed_alone(pairs: Sequence[Pair], position: int, result: Labels) -> Pair:
    """The operand summed over the labels that neither another operand nor the result has."""
    x, labels = pairs[position]
    elsewhere = {label for place, (_, other) in enumerate(pairs) if place != position for label in other}
    alone = tuple(dim for dim, label in enumerate(labels) if label not in elsewhere and label not in result)
    if not alone:
        return x, labels
    wide = b.cast(x, "int32") if aval_of(x).dtype == "bool" else x
    return b.cast(b.sum(wide, dims=alone), x.dtype), tuple(
        label for dim, label in enumerate(labels) if dim not in alone
    )


def _contract_one(pairs: Sequence[Pair], result: Labels, dtype: str) -> list[Pair]:
    """The operands with the pair contracted whose product grows least."""
    best = min(combinations(range(len(pairs)), 2), key=lambda pair: _growth(pairs, pair, result))
    (x, x_labels), (y, y_labels) = (pairs[position] for position in best)
    labels = _kept(pairs, best, result)
    is_last = len(pairs) == 2
    product = contract(x, x_labels, y, y_labels, labels, dtype if is_last else str(aval_of(x).dtype))
    rest = [pair for position, pair in enumerate(pairs) if position not in best]
    return [*rest, (product, labels)]


def _kept(pairs: Sequence[Pair], chosen: tuple[int, int], result: Labels) -> Labels:
    """The labels of two operands that others or the result need, in the result's order where it has them."""
    elsewhere = {label for place, (_, other) in enumerate(pairs) if place not in chosen for label in other}
    both = dict.fromkeys((*pairs[chosen[0]][1], *pairs[chosen[1]][1]))
    ordered = [label for label in result if label in both]
    return (*ordered, *(label for label in both if label in elsewhere and label not in result))


def _growth(pairs: Sequence[Pair], chosen: tuple[int, int], result: Labels) -> int:
    sizes: dict[Hashable, int] = {}
    for position in chosen:
        x, labels = pairs[position]
        sizes.update(zip(labels, x.shape, strict=True))
    product: int = prod(sizes[label] for label in _kept(pairs, chosen, result))
    before: int = sum(prod(pairs[position][0].shape) for position in chosen)
    return product - before
