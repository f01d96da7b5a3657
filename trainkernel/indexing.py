"""Exact integer index expressions with non-negative coefficients.

An ``Index`` is ``const + sum(coefficient * atom)``. An atom is a variable with a known range, or
the quotient or remainder of an Index by a constant. Sums are kept in a normal form in which
``d * (x / d) + x % d`` is ``x``, so splitting a linear index into coordinates and folding it
back costs nothing, and a transposed, sliced or broadcast view of an inlined value comes out as
plain coordinates wherever it can.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import gcd
from typing import TypeAlias


@dataclass(frozen=True)
class Variable:
    """A loop variable in ``range(size)``."""

    name: str
    size: int

    @cached_property
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

    @cached_property
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

    @cached_property
    def maximum(self) -> int:
        return min(self.divisor - 1, self.inner.maximum)

    @cached_property
    def quotient(self) -> Index:
        """``inner / divisor``: with it the remainder makes up ``inner`` again."""
        return self.inner // self.divisor

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
        total = self.constant
        for atom, coefficient in self.terms:
            total += coefficient * atom.maximum
        return total

    @cached_property
    def _hash(self) -> int:
        return hash((self.terms, self.constant))

    def __hash__(self) -> int:  # an Index is looked up many times, and holds others
        return self._hash

    def __add__(self, other: Index | int) -> Index:
        if isinstance(other, int):
            return Index(self.terms, self.constant + other)
        if not self.terms or not other.terms:
            return Index(self.terms or other.terms, self.constant + other.constant)
        coefficients = dict(self.terms)
        for atom, coefficient in other.terms:
            coefficients[atom] = coefficients.get(atom, 0) + coefficient
        return _normal(coefficients, self.constant + other.constant)

    def __mul__(self, factor: int) -> Index:
        if factor == 0:
            return ZERO
        if factor == 1:
            return self
        return Index(tuple((atom, c * factor) for atom, c in self.terms), self.constant * factor)

    def _split(self, divisor: int) -> tuple[Index, Index]:
        """(multiple, rest) with ``self == divisor * multiple + rest``."""
        if divisor == 1:
            return self, ZERO
        whole, rest = [], []
        for atom, c in self.terms:
            if c % divisor:
                rest.append((atom, c))
            else:
                whole.append((atom, c // divisor))
        constant, last = divmod(self.constant, divisor)
        return Index(tuple(whole), constant), Index(tuple(rest), last)

    def __divmod__(self, divisor: int) -> tuple[Index, Index]:
        multiple, rest = self._split(divisor)
        return multiple._with_quotient(rest, divisor), rest._remainder(divisor)

    def __floordiv__(self, divisor: int) -> Index:
        multiple, rest = self._split(divisor)
        return multiple._with_quotient(rest, divisor)

    def __mod__(self, divisor: int) -> Index:
        return self._split(divisor)[1]._remainder(divisor)

    def _with_quotient(self, rest: Index, divisor: int) -> Index:
        """``self + rest / divisor``."""
        if rest.maximum < divisor:
            return self
        common = gcd(divisor, *(c for _, c in rest.terms), rest.constant)
        inner, divisor = rest._divided(common), divisor // common
        if len(inner.terms) == 1 and inner.constant == 0:
            atom, coefficient = inner.terms[0]
            if coefficient == 1 and isinstance(atom, Quotient):
                inner, divisor = atom.inner, atom.divisor * divisor
        return self + Index(((Quotient(inner, divisor), 1),))

    def _remainder(self, divisor: int) -> Index:
        """``self % divisor`` of what no multiple can be taken out of."""
        if self.maximum < divisor:
            return self
        common = gcd(divisor, *(c for _, c in self.terms), self.constant)
        return Index(((Remainder(self._divided(common), divisor // common), common),))

    def _divided(self, common: int) -> Index:
        return Index(tuple((atom, c // common) for atom, c in self.terms), self.constant // common)

    def __str__(self) -> str:
        return self._text

    @cached_property
    def _text(self) -> str:
        parts = [atom.text if c == 1 else f"{atom.text} * {c}" for atom, c in self.terms]
        if self.constant or not parts:
            parts.append(str(self.constant))
        return " + ".join(parts)


ZERO = Index()
_MAX_KNOWN = 16384
"""Results that are kept of each function of indices: a program's operations are looked at many times."""


def variable(name: str, size: int) -> Index:
    """The Index that is one variable in ``range(size)``; of size 1 it is the constant 0."""
    return ZERO if size <= 1 else Index(((Variable(name, size), 1),))


def _normal(coefficients: dict[Atom, int], constant: int) -> Index:
    while any(_fold(coefficients, atom) for atom in list(coefficients) if isinstance(atom, Remainder)):
        pass
    terms = [(atom, c) for atom, c in coefficients.items() if c]
    if len(terms) > 1:
        terms.sort(key=_place)
    return Index(tuple(terms), constant)


def _place(term: tuple[Atom, int]) -> tuple[int, str]:
    """The order of terms: large coefficients first."""
    return -term[1], term[0].text


def _fold(coefficients: dict[Atom, int], atom: Remainder) -> bool:
    """Replace ``c * (x % d) + c * d * (x / d)`` by ``c * x`` if both are there."""
    coefficient, quotient = coefficients[atom], atom.quotient
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


@lru_cache(maxsize=_MAX_KNOWN)
def delinearize(index: Index, shape: tuple[int, ...]) -> tuple[Index, ...]:
    """The row-major coordinates of a linear index in ``shape``."""
    coordinates = []
    for size in shape[:0:-1]:
        index, coordinate = divmod(index, max(size, 1))
        coordinates.append(coordinate)
    if shape:
        coordinates.append(index % max(shape[0], 1))
    return tuple(coordinates[::-1])


@lru_cache(maxsize=_MAX_KNOWN)
def linearize(coordinates: tuple[Index, ...], strides: tuple[int, ...], offset: int = 0) -> Index:
    """``offset + sum(coordinate * stride)``."""
    total = Index((), offset)
    for coordinate, stride in zip(coordinates, strides, strict=True):
        if stride:
            total = total + coordinate * stride
    return total
