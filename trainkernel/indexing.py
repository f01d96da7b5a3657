"""Exact integer index expressions with non-negative coefficients.

An ``Index`` is ``const + sum(coefficient * atom)``. An atom is a variable with a known range, or
the quotient or remainder of an Index by a constant. Sums are kept in a normal form in which
``d * (x / d) + x % d`` is ``x``, so splitting a linear index into coordinates and folding it
back costs nothing, and a transposed, sliced or broadcast view of an inlined value comes out as
plain coordinates wherever it can.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd
from typing import TypeAlias


@dataclass(frozen=True)
class Variable:
    """A loop variable in ``range(size)``."""

    name: str
    size: int

    @property
    def maximum(self) -> int:
        return max(self.size - 1, 0)

    @cached_property
    def text(self) -> str:
        return self.name


@dataclass(frozen=True)
class Quotient:
    """``inner / divisor``, rounded down."""

    inner: Index
    divisor: int

    @property
    def maximum(self) -> int:
        return self.inner.maximum // self.divisor

    @cached_property
    def text(self) -> str:
        return f"tk_div({self.inner}, {self.divisor})"


@dataclass(frozen=True)
class Remainder:
    """``inner % divisor``."""

    inner: Index
    divisor: int

    @property
    def maximum(self) -> int:
        return min(self.divisor - 1, self.inner.maximum)

    @cached_property
    def text(self) -> str:
        return f"tk_mod({self.inner}, {self.divisor})"


Atom: TypeAlias = Variable | Quotient | Remainder


@dataclass(frozen=True)
class Index:
    """``constant + sum(coefficient * atom)``; build with the functions of this module."""

    terms: tuple[tuple[Atom, int], ...] = ()
    constant: int = 0

    @cached_property
    def maximum(self) -> int:
        """The largest value over the atoms' ranges."""
        return self.constant + sum(coefficient * atom.maximum for atom, coefficient in self.terms)

    def __add__(self, other: Index | int) -> Index:
        if isinstance(other, int):
            return Index(self.terms, self.constant + other)
        coefficients = dict(self.terms)
        for atom, coefficient in other.terms:
            coefficients[atom] = coefficients.get(atom, 0) + coefficient
        return _normal(coefficients, self.constant + other.constant)

    def __mul__(self, factor: int) -> Index:
        if factor == 0:
            return ZERO
        return Index(tuple((atom, c * factor) for atom, c in self.terms), self.constant * factor)

    def _split(self, divisor: int) -> tuple[Index, Index]:
        """(multiple, rest) with ``self == divisor * multiple + rest``."""
        whole = tuple((atom, c // divisor) for atom, c in self.terms if c % divisor == 0)
        rest = tuple((atom, c) for atom, c in self.terms if c % divisor)
        return Index(whole, self.constant // divisor), Index(rest, self.constant % divisor)

    def __floordiv__(self, divisor: int) -> Index:
        multiple, rest = self._split(divisor)
        if rest.maximum < divisor:
            return multiple
        common = gcd(divisor, *(c for _, c in rest.terms), rest.constant)
        inner, divisor = rest._divided(common), divisor // common
        if len(inner.terms) == 1 and inner.constant == 0:
            atom, coefficient = inner.terms[0]
            if coefficient == 1 and isinstance(atom, Quotient):
                inner, divisor = atom.inner, atom.divisor * divisor
        return multiple + Index(((Quotient(inner, divisor), 1),))

    def __mod__(self, divisor: int) -> Index:
        _, rest = self._split(divisor)
        if rest.maximum < divisor:
            return rest
        common = gcd(divisor, *(c for _, c in rest.terms), rest.constant)
        return Index(((Remainder(rest._divided(common), divisor // common), common),))

    def _divided(self, common: int) -> Index:
        return Index(tuple((atom, c // common) for atom, c in self.terms), self.constant // common)

    def __str__(self) -> str:
        parts = [atom.text if c == 1 else f"{atom.text} * {c}" for atom, c in self.terms]
        if self.constant or not parts:
            parts.append(str(self.constant))
        return " + ".join(parts)


ZERO = Index()


def variable(name: str, size: int) -> Index:
    """The Index that is one variable in ``range(size)``; of size 1 it is the constant 0."""
    return ZERO if size <= 1 else Index(((Variable(name, size), 1),))


def _normal(coefficients: dict[Atom, int], constant: int) -> Index:
    changed = True
    while changed:
        changed = False
        for atom, coefficient in coefficients.items():
            if isinstance(atom, Remainder) and _fold(coefficients, atom, coefficient):
                changed = True
                break
    terms = sorted(((atom, c) for atom, c in coefficients.items() if c), key=lambda term: (-term[1], term[0].text))
    return Index(tuple(terms), constant)


def _fold(coefficients: dict[Atom, int], atom: Remainder, coefficient: int) -> bool:
    """Replace ``c * (x % d) + c * d * (x / d)`` by ``c * x`` if both are there."""
    quotient = atom.inner // atom.divisor
    scale = coefficient * atom.divisor
    if quotient.constant or any(coefficients.get(part, 0) < c * scale for part, c in quotient.terms):
        return False
    if not quotient.terms or atom.inner.constant:
        return False
    del coefficients[atom]
    for part, c in quotient.terms:
        coefficients[part] -= c * scale
        if coefficients[part] == 0:
            del coefficients[part]
    for part, c in atom.inner.terms:
        coefficients[part] = coefficients.get(part, 0) + c * coefficient
    return True


def delinearize(index: Index, shape: Sequence[int]) -> tuple[Index, ...]:
    """The row-major coordinates of a linear index in ``shape``."""
    coordinates = []
    for size in reversed(shape):
        coordinates.append(index % max(size, 1))
        index = index // max(size, 1)
    return tuple(reversed(coordinates))


def linearize(coordinates: Sequence[Index], strides: Sequence[int], offset: int = 0) -> Index:
    """``offset + sum(coordinate * stride)``."""
    total = Index((), offset)
    for coordinate, stride in zip(coordinates, strides, strict=True):
        total = total + coordinate * stride
    return total
