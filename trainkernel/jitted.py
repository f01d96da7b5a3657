"""``jit``: a Python function of arrays, traced once per signature, as one kernel.

A signature is the structure of the arguments, the shapes, dtypes and strides of their arrays, and
the static arguments. Python ints and floats are passed by value at each launch: changing one
traces nothing again.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainkernel import structure, tree
from trainkernel.assemble import Assembly, find_live
from trainkernel.compiler import compile
from trainkernel.dtypes import DTYPES, name_of_numpy
from trainkernel.errors import OptionError, TraceError
from trainkernel.ir import Program, ScalarSpec, TensorSpec, dense_strides
from trainkernel.shape_structs import ShapeDtypeStruct
from trainkernel.trace import (
    Array,
    Aval,
    as_value,
    at_user_line,
    aval_of,
    check_open,
    is_scalar,
    is_tracing,
    new_trace,
    parameter,
)


def jit(
    fun: Callable[..., Any] | None = None,
    *,
    donate_argnums: int | Sequence[int] = (),
    donate_argnames: str | Sequence[str] = (),
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    device: str | None = None,
    **options: Any,
) -> Any:
    """Compile a function of arrays to one kernel.

    Parameters
    ----------
    fun : callable
        Arguments and result are trees of arrays. Left out: ``jit`` is a decorator with options.
    donate_argnums, donate_argnames : ints, names
        Arguments whose arrays are updated in place: each becomes the first result of the same shape
        and dtype, and the call returns the caller's own array. On a GPU a NumPy array is copied to
        the device first, and the array there is returned: give it to the next call.
    static_argnums, static_argnames : ints, names
        Arguments that are no arrays: hashable, a new value traces again.
    device : str, optional
        As for ``trainkernel.compile``.
    **options
        Those of ``trainkernel.compile``, such as ``max_launch_ms``, but not ``inplace_outputs``: donated arguments
        say that.

    Arrays that the function closes over are constants, as they are when it is traced. Host arrays
    with negative strides, such as ``x[::-1]``, are copied at each call.

    Results are arrays of the framework of the arguments. On a GPU, NumPy arguments give
    ``DeviceArray``s, which ``numpy.asarray`` reads.

    Returns
    -------
    Jitted
        Called like ``fun``; ``.lower(*args)`` gives the traced step, ``.kernel(*args)`` its Kernel.
    """
    if "inplace_outputs" in options:
        raise OptionError(
            f"jit finds the in-place results itself: use donate_argnums or donate_argnames{at_user_line()}"
        )
    if fun is not None and not callable(fun):
        raise TraceError(f"jit needs a function, got {type(fun).__name__}: {fun!r}{at_user_line()}")
    if fun is None:
        return functools.partial(
            jit,
            donate_argnums=donate_argnums,
            donate_argnames=donate_argnames,
            static_argnums=static_argnums,
            static_argnames=static_argnames,
            device=device,
            **options,
        )
    return Jitted(
        fun,
        _positions(donate_argnums),
        _names(donate_argnames),
        _positions(static_argnums),
        _names(static_argnames),
        device,
        options,
    )


def _positions(value: int | Sequence[int]) -> tuple[int, ...]:
    return (value,) if isinstance(value, int) else tuple(value)


def _names(value: str | Sequence[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


# ---------------------------------------------------------------------------- tracing


@dataclass(frozen=True)
class Result:
    """Where a leaf of the result comes from: a Program output, or an argument that is passed on."""

    output: int | None
    argument: int | None


@dataclass(frozen=True)
class Step:
    """A traced function.

    Attributes
    ----------
    program : Program
        Its inputs are the leaves of the arguments, then the captured constants.
    inplace_outputs : mapping of int to int
    captured : tuple of ndarray
    results : tuple of Result
        One for each leaf of the result.
    structure : TreeDef
        Of the result.
    """

    program: Program
    inplace_outputs: Mapping[int, int]
    captured: tuple[np.ndarray[Any, Any], ...]
    results: tuple[Result, ...]
    structure: tree.TreeDef


@dataclass(frozen=True)
class LeafSpec:
    """What is known of one leaf of the arguments before the call.

    ``by_value`` leaves are Python numbers; ``donated`` ones are updated in place.
    """

    name: str
    aval: Aval
    strides: tuple[int, ...]
    by_value: bool
    donated: bool


def trace_step(fun: Callable[..., Any], arguments: Callable[[Sequence[Any]], Any], leaves: Sequence[LeafSpec]) -> Step:
    """Trace a function of leaves.

    Parameters
    ----------
    fun : callable
        Takes what ``arguments`` makes of the leaves: ``fun(*args, **kwargs)``.
    arguments : callable
        Gives ``(args, kwargs)`` for a list of leaves.
    leaves : sequence of LeafSpec
    """
    with new_trace("jit") as trace:
        parameters = [parameter(leaf.aval, trace) for leaf in leaves]
        args, kwargs = arguments(parameters)
        outputs, treedef = tree.flatten(fun(*args, **kwargs))
        for out in outputs:
            _check_result(out)
        check_open(outputs, "the result of the jitted function")
        assembly = Assembly()
        for leaf, array in zip(leaves, parameters, strict=True):
            _declare(assembly, leaf, array)
        values = [out if isinstance(out, Array) else as_value(out) for out in structure.as_arrays(outputs)]
        places = {id(array): position for position, array in enumerate(parameters)}
        passed = [places.get(id(out)) for out in values]
        passed = [p if p is not None and leaves[p].donated else None for p in passed]
        computed = [out for out, p in zip(values, passed, strict=True) if p is None]
        assembly.nodes(find_live(computed))
        return _finish(assembly, leaves, computed, passed, treedef)


def _check_result(out: Any) -> None:
    if not (isinstance(out, (Array, np.ndarray, np.generic)) or is_scalar(out) or hasattr(out, "__dlpack__")):
        kind = type(out).__name__
        raise TraceError(f"a jitted function returns trees of arrays, got {kind}: {out!r}{at_user_line()}")


def _declare(assembly: Assembly, leaf: LeafSpec, array: Array) -> None:
    name = assembly.fresh(leaf.name)
    if leaf.by_value:
        assembly.add_input(array, ScalarSpec(name, leaf.aval.dtype))
    else:
        assembly.add_input(array, TensorSpec(name, leaf.aval.shape, leaf.strides, 0, leaf.aval.dtype))


def _finish(
    assembly: Assembly,
    leaves: Sequence[LeafSpec],
    computed: Sequence[Any],
    passed: Sequence[int | None],
    treedef: tree.TreeDef,
) -> Step:
    """Pair donated arguments with results, and close the Program."""
    specs = [assembly.tensor(out) for out in computed]
    taken = {p for p in passed if p is not None}
    inplace: dict[int, int] = {}
    bound: set[str] = set()
    declared = {out.buffer: out for item in assembly.items for out in item.outputs}
    for position, leaf in enumerate(leaves):
        if not leaf.donated or position in taken:
            continue
        for place, spec in enumerate(specs):
            if place not in inplace and spec.shape == leaf.aval.shape and spec.dtype == leaf.aval.dtype:
                specs[place] = _own_buffer(assembly, spec, declared, bound)
                bound.add(specs[place].buffer)
                _check_dense(leaf)
                inplace[place] = position
                break
        else:
            _warn_unused(leaf, specs)
    count = iter(range(len(specs)))
    results = tuple(Result(next(count), None) if p is None else Result(None, p) for p in passed)
    return Step(assembly.program(specs), inplace, tuple(assembly.captured), results, treedef)


class DonationWarning(UserWarning):
    """A donated array is not updated: no result that is left has its shape and dtype."""


def _warn_unused(leaf: LeafSpec, results: Sequence[TensorSpec]) -> None:
    same = sorted({spec.dtype for spec in results if spec.shape == leaf.aval.shape})
    found = f"; results of that shape are {', '.join(same)}" if same else ""
    warnings.warn(
        f"donated argument {leaf.name} is not updated in place: no result is left of its shape and dtype, "
        f"{leaf.aval}{found}{at_user_line()}",
        DonationWarning,
        stacklevel=2,
    )


def _check_dense(leaf: LeafSpec) -> None:
    if not TensorSpec(leaf.name, leaf.aval.shape, leaf.strides, 0, leaf.aval.dtype).is_dense:
        raise TraceError(
            f"donated argument {leaf.name} of shape {list(leaf.aval.shape)} has strides {list(leaf.strides)}, and only "
            f"a contiguous array is updated in place; pass np.ascontiguousarray(x){at_user_line()}"
        )


def _own_buffer(
    assembly: Assembly, spec: TensorSpec, declared: Mapping[str, TensorSpec], bound: set[str]
) -> TensorSpec:
    """A result to be stored in place: a whole computed buffer that no other result is stored from."""
    whole = declared.get(spec.buffer)
    if whole is not None and spec.is_dense and spec.num_elements == whole.num_elements and spec.buffer not in bound:
        return spec
    return assembly.copy(spec)


# ---------------------------------------------------------------------------- calling


class Jitted:
    """A function that is compiled at its first call with each signature. Make it by ``jit``."""

    def __init__(
        self,
        fun: Callable[..., Any],
        donate_argnums: tuple[int, ...],
        donate_argnames: tuple[str, ...],
        static_argnums: tuple[int, ...],
        static_argnames: tuple[str, ...],
        device: str | None,
        options: Mapping[str, Any],
    ) -> None:
        functools.update_wrapper(self, fun)
        self._fun = fun
        self._device = device
        self._options = dict(options)
        self._signature = _signature(fun)
        donate_argnums = _from_the_start(self._signature, donate_argnums)
        static_argnums = _from_the_start(self._signature, static_argnums)
        _check_names(self._signature, donate_argnames, "donate_argnames")
        _check_names(self._signature, static_argnames, "static_argnames")
        self._donated_names = set(donate_argnames) | set(_named(self._signature, donate_argnums, "donate_argnums"))
        self._static_names = set(static_argnames) | set(_named(self._signature, static_argnums, "static_argnums"))
        self._donate_argnums, self._static_argnums = set(donate_argnums), set(static_argnums)
        both = sorted(self._donated_names & self._static_names)
        if both:
            raise TraceError(f"{', '.join(both)}: an argument is donated or static, not both{at_user_line()}")
        self._compiled: dict[Any, _Compiled] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_tracing():
            return self._fun(*args, **kwargs)
        call = _Call(self, args, kwargs)
        return self._compile(call)(call.leaves)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def lower(self, *args: Any, **kwargs: Any) -> Step:
        """The traced step for these arguments, with its Program, without compiling it.

        A ``ShapeDtypeStruct`` stands for a contiguous array of its shape and dtype.
        """
        call = _Call(self, args, kwargs, described=True)
        return trace_step(self._fun, call.rebuild, call.specs)

    def kernel(self, *args: Any, **kwargs: Any) -> Any:
        """The Kernel that runs for these arguments, compiled if need be, without running it."""
        return self._compile(_Call(self, args, kwargs)).kernel

    def _compile(self, call: _Call) -> _Compiled:
        key = call.key
        compiled = self._compiled.get(key)
        if compiled is None:
            step = trace_step(self._fun, call.rebuild, call.specs)
            flipped = [index for index, facts in enumerate(call.facts) if _is_flipped(facts)]
            compiled = self._compiled[key] = _Compiled(step, self._device, self._options, flipped)
        return compiled

    @property
    def has_static(self) -> bool:
        return bool(self._static_names or self._static_argnums)

    def is_static(self, place: int | str) -> bool:
        return place in self._static_argnums or self.name_of(place) in self._static_names

    def is_donated(self, place: int | str) -> bool:
        return place in self._donate_argnums or self.name_of(place) in self._donated_names

    def name_of(self, place: int | str) -> str:
        """The parameter's name of a positional or keyword argument."""
        if isinstance(place, str):
            return place
        names = [] if self._signature is None else list(self._signature.parameters)
        return names[place] if place < len(names) else f"arg{place}"


def _signature(fun: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(fun)
    except (TypeError, ValueError):
        return None


def _named(signature: inspect.Signature | None, positions: Iterable[int], what: str) -> Iterable[str]:
    names = [] if signature is None else list(signature.parameters.values())
    variadic = signature is None or any(p.kind is p.VAR_POSITIONAL for p in names)
    for position in positions:
        if position < 0 or (position >= len(names) and not variadic):
            raise TraceError(f"{what} names argument {position}; the function takes {len(names)}{at_user_line()}")
        if position < len(names):
            yield names[position].name


def _from_the_start(signature: inspect.Signature | None, positions: Iterable[int]) -> tuple[int, ...]:
    """Positions without those that count from the end, where it is known how many arguments there are."""
    kinds = [] if signature is None else [p.kind for p in signature.parameters.values()]
    fixed = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    count = 0 if inspect.Parameter.VAR_POSITIONAL in kinds else len([kind for kind in kinds if kind in fixed])
    return tuple([position + count if -count <= position < 0 else position for position in positions])


def _check_names(signature: inspect.Signature | None, given: Iterable[str], what: str) -> None:
    if signature is None or any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()):
        return
    for name in given:
        if name not in signature.parameters:
            known = ", ".join(signature.parameters) or "none"
            raise TraceError(f"{what} names {name!r}; the function's arguments are {known}{at_user_line()}")


class _Call:
    """One call's arguments, taken apart: leaves, what is known of each, and how to put them together again.

    ``key`` is all that a later call of the same signature costs; names are made when it is traced.
    With ``described`` a ShapeDtypeStruct may stand for an array, since none is read.
    """

    def __init__(self, jitted: Jitted, args: Sequence[Any], kwargs: Mapping[str, Any], described: bool = False) -> None:
        self._jitted = jitted
        self._static: list[tuple[int | str, Any]] = []
        self._dynamic: dict[int | str, Any] = {}
        given: list[tuple[int | str, Any]] = [*enumerate(args), *sorted(kwargs.items())]
        for place, value in given:
            is_static = jitted.has_static and jitted.is_static(place)
            if is_static:
                self._static.append((place, value))
            else:
                self._dynamic[place] = value
        self.leaves, self._treedef = tree.flatten(tuple(self._dynamic.values()))
        if described:
            self.leaves = [_undescribed(leaf) for leaf in self.leaves]
        self.leaves = [leaf if isinstance(leaf, np.ndarray) else _as_leaf(leaf, self) for leaf in self.leaves]
        self.facts = tuple([_facts(leaf) for leaf in self.leaves])
        for _, value in self._static:
            _check_hashable(value)
        static = tuple([(place, _exactly(value)) for place, value in self._static])
        self.key = (self._treedef, tuple(self._dynamic), self.facts, static)

    def describe(self, value: Any) -> str:
        """The path of a leaf, for messages: ``params['w']``."""
        leaves = [leaf for argument in self._dynamic.values() for leaf in tree.leaves(argument)]
        return next(name for name, leaf in zip(self._names(), leaves, strict=True) if leaf is value)

    def _names(self) -> list[str]:
        names = []
        for place, value in self._dynamic.items():
            names += [f"{self._jitted.name_of(place)}{path}" for path in tree.paths(value)]
        return names

    @property
    def specs(self) -> list[LeafSpec]:
        """What is known of each leaf."""
        donated: list[bool] = []
        for place, value in self._dynamic.items():
            donated += [self._jitted.is_donated(place)] * len(tree.leaves(value))
        rows = zip(self.leaves, self.facts, self._names(), donated, strict=True)
        return [_leaf_spec(leaf, facts, name, is_donated) for leaf, facts, name, is_donated in rows]

    def rebuild(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """``(args, kwargs)`` with other leaves."""
        values = dict(zip(self._dynamic, tree.unflatten(self._treedef, leaves), strict=True))
        values.update(self._static)
        args = tuple(values[place] for place in sorted(p for p in values if isinstance(p, int)))
        return args, {place: value for place, value in values.items() if isinstance(place, str)}


def _check_hashable(value: Any) -> None:
    try:
        hash(value)
    except TypeError:
        raise TraceError(
            f"a static argument must be hashable, got {type(value).__name__}: {value!r}{at_user_line()}"
        ) from None


def _exactly(value: Any) -> Any:
    """A static value as a key: 1, 1.0 and True are equal and not the same, and so are 0.0 and -0.0."""
    if isinstance(value, (tuple, frozenset)):
        kept = map(_exactly, value)
        return type(value), tuple(kept) if isinstance(value, tuple) else frozenset(kept)
    return type(value), repr(value) if isinstance(value, (float, np.floating)) else value


def _undescribed(leaf: Any) -> Any:
    """An array for a description of one: of its memory nothing is touched."""
    return np.empty(leaf.shape, leaf.dtype) if isinstance(leaf, ShapeDtypeStruct) else leaf


def _as_leaf(value: Any, call: _Call) -> Any:
    """A leaf as kernels take it: an array or a Python number."""
    check_open((value,), "an argument")
    if isinstance(value, (bool, np.generic)):
        return np.asarray(value)
    if is_scalar(value) or hasattr(value, "__dlpack__"):
        return value
    if hasattr(value, "__array__"):
        return np.asarray(value)
    raise TraceError(
        f"argument {call.describe(value)} is {type(value).__name__}: {value!r}; arguments are trees of arrays and "
        f"numbers, anything else must be static (static_argnums, static_argnames){at_user_line()}"
    )


def _facts(leaf: Any) -> Any:
    """What a signature holds of a leaf: ``(shape, dtype, strides in bytes)``, or a Python number's type."""
    if isinstance(leaf, np.ndarray):
        return leaf.shape, leaf.dtype, leaf.strides
    if is_scalar(leaf):
        return type(leaf)
    from trainkernel.runtime.dlpack import view

    seen = view(leaf)
    dtype = DTYPES[seen.dtype].numpy
    return tuple(seen.shape), dtype, tuple(step * dtype.itemsize for step in seen.strides)


def _leaf_spec(leaf: Any, facts: Any, name: str, donated: bool) -> LeafSpec:
    if is_scalar(leaf):
        return LeafSpec(name, aval_of(leaf), (), True, False)
    shape, dtype, strides = facts
    known = name_of_numpy(dtype)
    if known is None:
        raise TraceError(
            f"argument {name} has dtype {dtype}, which is not supported; known: {', '.join(DTYPES)}{at_user_line()}"
        )
    elements = tuple(step // dtype.itemsize for step in strides)
    if _is_flipped(facts):
        if donated or not isinstance(leaf, np.ndarray):
            what = "updated in place" if donated else "read where it lies"
            raise TraceError(
                f"argument {name} has negative strides {strides}, and only an array without them is {what}; "
                f"pass np.ascontiguousarray(x){at_user_line()}"
            )
        elements = dense_strides(shape)  # a call copies it
    return LeafSpec(name, Aval(shape, known), elements, False, donated)


def _is_flipped(facts: Any) -> bool:
    """Whether an array has a negative stride, as ``x[::-1]``."""
    return isinstance(facts, tuple) and any(step < 0 for step in facts[2])


class _Compiled:
    """The kernel of one signature, and how its results make up the function's.

    ``flipped`` are the leaves whose strides no kernel reads: host arrays, copied at each call.
    """

    def __init__(self, step: Step, device: str | None, options: Mapping[str, Any], flipped: Sequence[int] = ()) -> None:
        self.step = step
        self._flipped = tuple(flipped)
        self.kernel = compile(step.program, device=device, inplace_outputs=dict(step.inplace_outputs), **options)

        self._captured: Sequence[Any] = self._on_device(step.captured)

    def _on_device(self, values: Sequence[Any]) -> list[Any]:
        """Host arrays copied to the kernel's GPU; everything else as it is."""
        where = str(self.kernel.device)
        if not where.startswith("cuda:"):
            return list(values)
        from trainkernel.runtime.device_array import device_put

        index = int(where.removeprefix("cuda:"))
        return [device_put(value, index) if isinstance(value, np.ndarray) else value for value in values]

    def __call__(self, leaves: Sequence[Any]) -> Any:
        if self._flipped:
            leaves = list(leaves)
            for index in self._flipped:
                leaves[index] = np.ascontiguousarray(leaves[index])
        leaves = self._on_device(leaves)
        outputs = self.kernel(*leaves, *self._captured)
        results = [
            leaves[result.argument] if result.argument is not None else outputs[result.output]  # type: ignore[index]
            for result in self.step.results
        ]
        return tree.unflatten(self.step.structure, results)


__all__ = ["DonationWarning", "Jitted", "Step", "jit", "trace_step"]
