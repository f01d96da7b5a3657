"""Traced arrays: what a Python function of arrays leaves behind.

While a step is traced, each operation makes a ``Node`` and returns its results as ``Array``s; no
value exists. A node holds its operands, so the arrays a function returns are a directed acyclic
graph back to its parameters. ``jit`` turns such a graph into a Program; ``grad`` walks it
backwards and adds nodes; ``vmap`` and ``scan`` walk it forwards.

Each level of tracing (a jit, a grad, a vmap, the body of a scan) is a ``Trace``. An array knows
the traces whose parameters it depends on: that is what a transformation has to walk, everything
else is a constant to it, so a loop's body keeps only what changes from step to step.

Outside of any trace an operation is evaluated at once, on NumPy arrays, by the reference.
"""

from __future__ import annotations

import functools
import itertools
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from trainkernel.dtypes import DTYPES, name_of_numpy
from trainkernel.errors import ProgramError, TraceError
from trainkernel.ir import TensorSpec
from trainkernel.ops import OPS
from trainkernel.reference import apply

Shape = tuple[int, ...]
NO_TRACES: frozenset[Trace] = frozenset()

_SKIPPED = (str(Path(__file__).parent), str(Path(np.__file__).parent), "<")
_serials = itertools.count()


class Trace:
    """One level of tracing.

    Attributes
    ----------
    kind : str
        ``"jit"``, ``"grad"``, ``"vmap"``, ``"scan"``, ...
    is_open : bool
        Its parameters may still be used.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.is_open = True


class _Levels(threading.local):
    """The open traces of this thread, outermost first."""

    def __init__(self) -> None:
        self.open: list[Trace] = []
        self.recomputation: object = None


_levels = _Levels()


def is_tracing() -> bool:
    """Whether any trace is open in this thread."""
    return bool(_levels.open)


@contextmanager
def new_trace(kind: str) -> Iterator[Trace]:
    """Open a trace for the time of the block."""
    trace = Trace(kind)
    _levels.open.append(trace)
    try:
        yield trace
    finally:
        _levels.open.remove(trace)
        trace.is_open = False


@contextmanager
def recomputation() -> Iterator[None]:
    """Nodes traced in the block are computed anew, though equal ones exist: what a checkpoint is for."""
    before = _levels.recomputation
    _levels.recomputation = object()
    try:
        yield
    finally:
        _levels.recomputation = before


@dataclass(frozen=True)
class Aval:
    """What is known of a value that does not exist yet: shape, dtype, and whether it is weak.

    A weak value comes from a Python scalar: beside an array it takes the array's dtype.
    """

    shape: Shape
    dtype: str
    weak: bool = False

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec.dense("x", self.shape, self.dtype)

    def __str__(self) -> str:
        dims = ",".join(str(size) for size in self.shape)
        return f"{'~' if self.weak else ''}{DTYPES[self.dtype].short}[{dims}]"


class Node:
    """One operation of a traced function; ``op`` is an entry of the op table or a structural op.

    Structural ops are ``"parameter"`` (no operands), ``"alias"`` (an operand under a new trace),
    ``"loop"`` and ``"call"``, whose ``attrs`` hold a ``Body``.
    """

    __slots__ = ("attrs", "inputs", "location", "op", "outputs", "recomputation", "serial")

    def __init__(self, op: str, inputs: Sequence[Any], attrs: Mapping[str, Any], location: str | None) -> None:
        self.op = op
        self.inputs = tuple(inputs)
        self.attrs = attrs
        self.location = location
        self.recomputation = _levels.recomputation
        self.serial = next(_serials)
        self.outputs: tuple[Array, ...] = ()

    def __repr__(self) -> str:
        results = ", ".join(str(out.aval) for out in self.outputs)
        return f"{results} = {self.op}({', '.join(_brief(operand) for operand in self.inputs)})"


def _brief(operand: Any) -> str:
    return str(operand.aval) if isinstance(operand, Array) else repr(operand)


def _numpy(name: str) -> Any:
    """A function of trainkernel.numpy, which stands on this module."""
    return getattr(import_module("trainkernel.numpy"), name)


def _operators(name: str) -> tuple[Any, Any]:
    """An operator and its reflection; NotImplemented for what is no array."""

    def operator(self: Array, other: Any) -> Any:
        return _numpy(name)(self, other) if _is_operand(other) else NotImplemented

    def reflected(self: Array, other: Any) -> Any:
        return _numpy(name)(other, self) if _is_operand(other) else NotImplemented

    return operator, reflected


def _is_operand(value: Any) -> bool:
    return isinstance(value, (Array, np.ndarray, np.generic, bool, int, float)) or hasattr(value, "__dlpack__")


class Array:
    """A value of a function that is being traced: it has a shape and a dtype, and no elements.

    It has NumPy's operators, methods and indexing, and they trace. To look at a value, return it
    from the function.
    """

    __slots__ = ("aval", "node", "position", "traces")
    __array_priority__ = 1000

    def __init__(self, node: Node, position: int, aval: Aval, traces: frozenset[Trace]) -> None:
        self.node = node
        self.position = position
        self.aval = aval
        self.traces = traces

    @property
    def shape(self) -> Shape:
        return self.aval.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return DTYPES[self.aval.dtype].numpy

    @property
    def ndim(self) -> int:
        return len(self.aval.shape)

    @property
    def size(self) -> int:
        return self.aval.spec.num_elements

    def __repr__(self) -> str:
        return f"Array({self.aval}, traced by {self.node.op})"

    # A traced value has no elements: whatever needs them says so, with the user's line.

    def __bool__(self) -> bool:
        raise _no_value(self, "its truth", "use trainkernel.numpy.where, tk.cond, or make the argument static")

    def __int__(self) -> int:
        raise _no_value(self, "an int of it", "make the argument static (static_argnums)")

    def __float__(self) -> float:
        raise _no_value(self, "a float of it", "return it from the function and convert it there")

    def __index__(self) -> int:
        raise _no_value(self, "an index of it", "make the argument static, or index with arrays (x[i], take)")

    def __format__(self, spec: str) -> str:
        if spec:
            raise _no_value(self, f"its text as {spec!r}", "return it from the function and format it there")
        return repr(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _no_value(self, "a pickle of it", "return it from the function and pickle it there")

    def __copy__(self) -> Array:
        return self

    def __deepcopy__(self, memo: Any) -> Array:
        return self

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise _no_value(self, "a NumPy array of it", "use trainkernel.numpy instead of numpy here")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        """NumPy's own functions and operators on traced arrays are those of trainkernel.numpy."""
        function = getattr(import_module("trainkernel.numpy"), ufunc.__name__, None)
        if "out" in kwargs:
            raise TraceError(
                f"numpy.{ufunc.__name__} cannot write {self.aval} to an array, since it is traced: write y = y + x, "
                f"not y += x, and no out={at_user_line()}"
            )
        if method != "__call__" or kwargs or function is None:
            raise _no_value(self, f"numpy.{ufunc.__name__} of it", "use trainkernel.numpy instead of numpy here")
        return function(*inputs)

    # Operators, methods and indexing are those of trainkernel.numpy.

    __add__, __radd__ = _operators("add")
    __sub__, __rsub__ = _operators("subtract")
    __mul__, __rmul__ = _operators("multiply")
    __truediv__, __rtruediv__ = _operators("divide")
    __floordiv__, __rfloordiv__ = _operators("floor_divide")
    __mod__, __rmod__ = _operators("remainder")
    __pow__, __rpow__ = _operators("power")
    __matmul__, __rmatmul__ = _operators("matmul")
    __and__, __rand__ = _operators("bitwise_and")
    __or__, __ror__ = _operators("bitwise_or")
    __xor__, __rxor__ = _operators("bitwise_xor")
    __lshift__, __rlshift__ = _operators("left_shift")
    __rshift__, __rrshift__ = _operators("right_shift")
    __eq__, _ = _operators("equal")
    __ne__, _ = _operators("not_equal")
    __lt__, _ = _operators("less")
    __le__, _ = _operators("less_equal")
    __gt__, _ = _operators("greater")
    __ge__, _ = _operators("greater_equal")
    __hash__ = object.__hash__

    def __divmod__(self, other: Any) -> Any:
        return _numpy("divmod")(self, other)

    def __rdivmod__(self, other: Any) -> Any:
        return _numpy("divmod")(other, self)

    def __round__(self, ndigits: int = 0) -> Any:
        return _numpy("round")(self, ndigits)

    def __neg__(self) -> Any:
        return _numpy("negative")(self)

    def __pos__(self) -> Any:
        return self

    def __abs__(self) -> Any:
        return _numpy("abs")(self)

    def __invert__(self) -> Any:
        return _numpy("bitwise_not")(self)

    def __getitem__(self, index: Any) -> Any:
        return _numpy("get_item")(self, index)

    def __setitem__(self, index: Any, value: Any) -> None:
        raise TraceError(
            f"{self.aval} is traced and cannot be changed in place: use x = x.at[index].set(value){at_user_line()}"
        )

    def __delitem__(self, index: Any) -> None:
        raise TraceError(f"{self.aval} is traced and keeps its shape: join slices of it instead{at_user_line()}")

    def __iter__(self) -> Iterator[Any]:
        return (self[position] for position in range(len(self)))

    def __getattr__(self, name: str) -> Any:
        named = import_module("trainkernel.numpy.methods")
        if name in named.METHODS:
            return functools.partial(named.METHODS[name], self)
        if name in named.PROPERTIES:
            return named.PROPERTIES[name](self)
        raise AttributeError(f"a traced array has no attribute {name!r}")

    def __len__(self) -> int:
        if not self.aval.shape:
            raise TypeError("a 0-d array has no length")
        return self.aval.shape[0]


def _no_value(array: Array, what: str, advice: str) -> TraceError:
    check_open((array,), what)
    return TraceError(f"{array.aval} is traced: it has no value yet, so {what} cannot be had; {advice}{at_user_line()}")


@dataclass(frozen=True, eq=False)
class Body:
    """A traced function with no free variables: ``outputs`` depend on ``parameters`` alone."""

    parameters: tuple[Array, ...]
    outputs: tuple[Any, ...]

    def call(self, arguments: Sequence[Any]) -> list[Any]:
        """Trace the body again, on these arguments."""
        known = {id(parameter): argument for parameter, argument in zip(self.parameters, arguments, strict=True)}
        replay(nodes_between(self.outputs, self.parameters), known)
        return [known.get(id(out), out) for out in self.outputs]


# ---------------------------------------------------------------------------- the user's line


class _Skipped(dict[str, bool]):
    """Whether a file is of the package or of NumPy, by its name: every node asks for a dozen frames."""

    def __missing__(self, name: str) -> bool:
        self[name] = skipped = name.startswith(_SKIPPED)
        return skipped


_is_skipped = _Skipped()


def user_location() -> str | None:
    """File and line of the innermost caller outside of the package and of NumPy."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not _is_skipped[frame.f_code.co_filename]:
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return None


def at_user_line() -> str:
    """The user's line as the last line of a message; empty if there is none."""
    location = user_location()
    return f"\n  at {location}" if location else ""


# ---------------------------------------------------------------------------- values


def is_scalar(value: Any) -> bool:
    """Whether a value is a Python number, which is weak."""
    return isinstance(value, (bool, int, float)) and not isinstance(value, np.generic)


def as_value(value: Any) -> Any:
    """The value as the front end computes with it: Array, ndarray or Python number.

    Raises
    ------
    TraceError
        For anything that is no array, or of an unknown dtype.
    """
    if isinstance(value, Array) or is_scalar(value):
        return value
    if isinstance(value, np.ndarray):
        array: Any = value
    elif isinstance(value, np.generic) or hasattr(value, "__array__"):
        array = np.asarray(value)
    elif hasattr(value, "__dlpack__"):
        array = np.from_dlpack(value)
    elif isinstance(value, (list, tuple)):
        return from_sequence(value)
    else:
        raise TraceError(f"expected an array or a number, got {type(value).__name__}: {value!r}{at_user_line()}")
    if name_of_numpy(array.dtype) is None:
        known = ", ".join(DTYPES)
        raise TraceError(f"arrays of dtype {array.dtype} are not supported; known: {known}{at_user_line()}")
    return array


def from_sequence(value: Sequence[Any], dtype: str | None = None) -> Any:
    """A nested list of numbers as an array: int32, float32 or bool, or with all digits that ``dtype`` may need.

    Raises
    ------
    TraceError
        For a list of traced arrays, for anything else that holds no numbers, and for an integer that does not
        fit int32, or ``dtype`` if that is an integer's.
    """
    if any(isinstance(each, Array) for each in value):
        raise TraceError(
            f"expected an array or a number, got a {type(value).__name__} of traced arrays: make one array of them "
            f"with trainkernel.numpy.stack or array{at_user_line()}"
        )
    array = np.asarray(value)
    if array.dtype.kind == "f" or array.size == 0:
        return array.astype(np.float32 if dtype is None else np.float64)
    if array.dtype.kind in "iu":
        wanted = np.dtype(np.int32) if dtype is None else DTYPES[dtype].numpy
        _check_fits(array, wanted if wanted.kind in "iu" else np.dtype(np.int64))
        return array.astype(np.int32 if dtype is None else np.int64)
    return as_value(array)


def _check_fits(array: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> None:
    """Refuse integers that would wrap around."""
    bounds = np.iinfo(dtype)
    for extreme in (int(array.min()), int(array.max())):
        if not bounds.min <= extreme <= bounds.max:
            raise TraceError(f"a list of numbers holds {extreme}, which is not a number of {dtype}{at_user_line()}")


def aval_of(value: Any) -> Aval:
    """Shape and dtype of an Array, ndarray or Python number (int32 or float32, weak)."""
    if isinstance(value, Array):
        return value.aval
    for kind, aval in _NUMBERS:
        if isinstance(value, kind):
            return aval
    return Aval(value.shape, str(name_of_numpy(value.dtype)))


_NUMBERS = (
    (bool, Aval((), "bool", True)),
    (int, Aval((), "int32", True)),
    (float, Aval((), "float32", True)),
)


def traces_of(values: Iterable[Any]) -> frozenset[Trace]:
    """The traces that any of the values depends on."""
    result = NO_TRACES
    for value in values:
        if isinstance(value, Array) and value.traces is not result and not value.traces <= result:
            result = result | value.traces if result else value.traces
    return result


def check_open(values: Iterable[Any], what: str) -> None:
    """Refuse arrays that outlived the function that they were traced in.

    Raises
    ------
    TraceError
        A leaked tracer.
    """
    checked = NO_TRACES
    for value in values:
        if isinstance(value, Array) and value.traces is not checked:
            checked = value.traces
            for trace in checked:
                if not trace.is_open and trace.kind != "grad":
                    raise TraceError(
                        f"{what} uses {value.aval}, which was traced by a {trace.kind} that is over: the array leaked "
                        "out of its function. Return it from there instead of keeping it in a variable outside"
                        f"{at_user_line()}"
                    )


# ---------------------------------------------------------------------------- making nodes


def make(
    op: str, inputs: Sequence[Any], attrs: Mapping[str, Any], avals: Sequence[Aval], location: str | None = None
) -> tuple[Array, ...]:
    """A node and its results; its location is the user's line where none is given."""
    check_open(inputs, op)
    node = Node(op, inputs, attrs, user_location() if location is None else location)
    traces = traces_of(inputs)
    node.outputs = tuple([Array(node, position, aval, traces) for position, aval in enumerate(avals)])
    return node.outputs


def parameter(aval: Aval, trace: Trace) -> Array:
    """A parameter of a function that is being traced."""
    node = Node("parameter", (), {}, user_location())
    node.outputs = (Array(node, 0, aval, frozenset((trace,))),)
    return node.outputs[0]


def alias(value: Any, trace: Trace | None) -> Array:
    """The value as a parameter of ``trace``: what depends on it is what the trace has to walk.

    Without a trace it is a traced array and no parameter, so its operators are the package's.
    """
    node = Node("alias", (value,), {}, user_location())
    traces = traces_of((value,))
    node.outputs = (Array(node, 0, aval_of(value), traces if trace is None else traces | {trace}),)
    return node.outputs[0]


def bind(op: str, inputs: Sequence[Any], attrs: Mapping[str, Any], dtypes: Sequence[str]) -> tuple[Any, ...]:
    """Apply an op of the table: trace it, or outside of any trace evaluate it.

    Parameters
    ----------
    op : str
    inputs : sequence of Array, ndarray or Python number
        Broadcast and of their final dtypes already.
    attrs : mapping
    dtypes : sequence of str
        Of the results.

    Raises
    ------
    TraceError
        If the shapes do not fit.
    """
    entry = OPS[op]
    inputs = _without_generics(inputs)
    known = [operand.aval if isinstance(operand, Array) else aval_of(operand) for operand in inputs]
    try:
        results = entry.shape([aval.shape for aval in known], attrs)
    except ProgramError as error:
        raise TraceError(f"{op}: {error}{at_user_line()}") from None
    data = known if entry.data_operands is None else [known[position] for position in entry.data_operands]
    weak = op not in ("compare", "cast") and bool(data) and all(aval.weak for aval in data)
    avals = [Aval(tuple(shape), dtype, weak) for shape, dtype in zip(results, dtypes, strict=True)]
    return _bind_to(op, inputs, attrs, avals)


def bind_to(op: str, inputs: Sequence[Any], attrs: Mapping[str, Any], avals: Sequence[Aval]) -> tuple[Any, ...]:
    """``bind`` for results of known shapes."""
    return _bind_to(op, _without_generics(inputs), attrs, avals)


def _without_generics(inputs: Sequence[Any]) -> list[Any]:
    """NumPy's scalars as arrays: some of them are Python floats too, which would be weak."""
    return [np.asarray(operand) if isinstance(operand, np.generic) else operand for operand in inputs]


def _bind_to(
    op: str, inputs: Sequence[Any], attrs: Mapping[str, Any], avals: Sequence[Aval], location: str | None = None
) -> tuple[Any, ...]:
    if _levels.open or any(isinstance(operand, Array) for operand in inputs):
        return make(op, inputs, attrs, avals, location)
    if OPS[op].kind == "view":
        return OPS[op].reference(inputs, attrs, [aval.shape for aval in avals])
    with np.errstate(all="ignore"):
        return tuple(apply(op, list(inputs), attrs, [aval.spec for aval in avals]))


# ---------------------------------------------------------------------------- walking


def nodes_between(outputs: Iterable[Any], parameters: Iterable[Array]) -> list[Node]:
    """The nodes on the way from parameters to outputs, in the order in which they were traced."""
    wanted = {leaf.node for leaf in parameters}
    depends: dict[Node, bool] = dict.fromkeys(wanted, True)
    stack = [out.node for out in outputs if isinstance(out, Array)]
    while stack:
        node = stack[-1]
        if node in depends:
            stack.pop()
            continue
        pending = [
            operand.node for operand in node.inputs if isinstance(operand, Array) and operand.node not in depends
        ]
        if pending:
            stack.extend(pending)
            continue
        depends[node] = any(isinstance(operand, Array) and depends[operand.node] for operand in node.inputs)
        stack.pop()
    found = [node for node, does in depends.items() if does and node not in wanted]
    return sorted(found, key=lambda node: node.serial)


def nodes_of(outputs: Iterable[Any]) -> list[Node]:
    """Every node behind the outputs, in the order in which they were traced."""
    seen: set[Node] = set()
    stack = [out.node for out in outputs if isinstance(out, Array)]
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack.extend([operand.node for operand in node.inputs if isinstance(operand, Array)])
    return sorted(seen, key=lambda node: node.serial)


def replay(nodes: Sequence[Node], known: dict[int, Any]) -> None:
    """Trace nodes again with operands replaced by what is known of them, by id; adds the results."""
    for node in nodes:
        inputs = [known.get(id(operand), operand) for operand in node.inputs]
        if node.op == "alias":
            results: tuple[Any, ...] = (inputs[0],)
        elif node.op in OPS:
            results = _bind_to(node.op, inputs, node.attrs, [out.aval for out in node.outputs], node.location)
        else:
            results = make(node.op, inputs, node.attrs, [out.aval for out in node.outputs], node.location)
        known.update([(id(out), result) for out, result in zip(node.outputs, results, strict=True)])


def close(outputs: Sequence[Any], trace: Trace, parameters: Sequence[Array]) -> tuple[Body, list[Any]]:
    """A traced function as a Body, and its free variables, which come first among its parameters.

    What does not depend on ``trace`` is a constant of the body: it is computed outside of it.
    """
    nodes = nodes_between(outputs, parameters)
    inside = set(nodes) | {leaf.node for leaf in parameters}
    free: dict[int, Any] = {}
    for operand in itertools.chain(itertools.chain.from_iterable(node.inputs for node in nodes), outputs):
        if not is_scalar(operand) and not (isinstance(operand, Array) and operand.node in inside):
            free.setdefault(id(operand), operand)
    constants = list(free.values())
    known: dict[int, Any] = {id(value): parameter(aval_of(value), trace) for value in constants}
    fresh = [parameter(leaf.aval, trace) for leaf in parameters]
    known.update((id(old), new) for old, new in zip(parameters, fresh, strict=True))
    replay(nodes, known)
    closed = tuple(known.get(id(out), out) for out in outputs)
    return Body(tuple(known[id(value)] for value in constants) + tuple(fresh), closed), constants
