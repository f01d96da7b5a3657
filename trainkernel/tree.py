"""Trees of arrays: any nesting of dicts, tuples, lists, named tuples, dataclasses and None.

Thin names over optree, in a namespace of our own: a dataclass is registered there the first time
an instance of it is met. Its fields with ``metadata={"static": True}``, as in JAX, are no leaves but
part of the structure, and must be hashable.
"""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import optree

from trainkernel.errors import TraceError
from trainkernel.trace import at_user_line

_NAMESPACE = "trainkernel"
_registered: set[type] = set()
_registration = threading.Lock()

Tree = Any
TreeDef = optree.PyTreeSpec


IsLeaf = Callable[[Any], bool] | None


def flatten(tree: Tree, is_leaf: IsLeaf = None) -> tuple[list[Any], TreeDef]:
    """The leaves of a tree in order (dicts by sorted key) and its structure.

    ``is_leaf`` says of each node whether it counts as a leaf, here and below.
    """
    while True:
        leaves, treedef = optree.tree_flatten(tree, is_leaf, namespace=_NAMESPACE)
        if not _register_dataclasses(leaves):
            return leaves, treedef


def unflatten(treedef: TreeDef, leaves: Iterable[Any]) -> Tree:
    """The tree of a structure with these leaves."""
    return optree.tree_unflatten(treedef, leaves)


def leaves(tree: Tree, is_leaf: IsLeaf = None) -> list[Any]:
    """The leaves of a tree in order."""
    return flatten(tree, is_leaf)[0]


def structure(tree: Tree, is_leaf: IsLeaf = None) -> TreeDef:
    """The structure of a tree, which ``unflatten`` fills with leaves."""
    return flatten(tree, is_leaf)[1]


def all(tree: Tree, *, is_leaf: IsLeaf = None) -> bool:
    """Whether every leaf of a tree is true."""
    return builtins.all(leaves(tree, is_leaf))


def reduce(function: Callable[[Any, Any], Any], tree: Tree, *initial: Any) -> Any:
    """The leaves in order, folded to one value from the left, as by ``functools.reduce``."""
    return functools.reduce(function, leaves(tree), *initial)


def paths(tree: Tree) -> list[str]:
    """What to write behind a tree to get each leaf: ``['params'][0].w``."""
    flatten(tree)
    return [accessor.codify("") for accessor in optree.tree_accessors(tree, namespace=_NAMESPACE)]


class TreeMismatchError(TraceError):
    """Trees that should have one structure have not."""


def difference(wanted: TreeDef, found: TreeDef) -> str:
    """Where two structures first differ, and how: ``at ['w'], a list of 2 instead of a leaf``; empty if they do not."""
    return _difference(wanted, found, "")


def _difference(wanted: TreeDef, found: TreeDef, path: str) -> str:
    if wanted == found:
        return ""
    where = f"at {path}" if path else "at the root"
    if wanted.type != found.type or wanted.num_children != found.num_children:
        if wanted.type is found.type is dict:
            return f"{where}, {_other_keys(wanted.entries(), found.entries())}"
        return f"{where}, {_kind(found)} instead of {_kind(wanted)}"
    level = wanted.one_level()
    assert level is not None  # only a leaf has none, and leaves are alike
    steps = zip(wanted.children(), found.children(), level.accessors(), strict=True)
    if list(wanted.entries()) == list(found.entries()):
        for one, other, accessor in steps:
            inner = _difference(one, other, path + accessor.codify(""))
            if inner:
                return inner
        return f"{where}, other static fields"
    return f"{where}, {_other_keys(wanted.entries(), found.entries())}"


def _other_keys(wanted: Sequence[Any], found: Sequence[Any]) -> str:
    missing = [repr(key) for key in wanted if key not in found]
    surplus = [repr(key) for key in found if key not in wanted]
    parts = [f"{what} {', '.join(keys)}" for what, keys in (("without", missing), ("with", surplus)) if keys]
    return f"a dict {' and '.join(parts)}" if parts else "a dict in another order"


def _kind(spec: TreeDef) -> str:
    if spec.type in (None, type(None)):
        return "a leaf" if spec.num_leaves else "None"
    size = f" of {spec.num_children}" if spec.type in (list, tuple) else ""
    return f"a {spec.type.__name__}{size}"


def map(function: Callable[..., Any], tree: Tree, *rest: Tree, is_leaf: IsLeaf = None) -> Tree:
    """``function`` of the corresponding leaves of trees of the same structure.

    What ``is_leaf`` makes a leaf of the first tree is one in the others too.

    Raises
    ------
    TreeMismatchError
        If the structures differ: which tree, and the first path where.
    """
    first, treedef = flatten(tree, is_leaf)
    columns = [first]
    for position, other in enumerate(rest):
        values, found = flatten(other, is_leaf)
        if is_leaf is not None:
            with contextlib.suppress(ValueError):
                values, found = treedef.flatten_up_to(other), treedef
        if found != treedef:
            raise TreeMismatchError(
                f"tree {position + 1} has the structure {found}, not that of the first, {treedef}: "
                f"{difference(treedef, found)}{at_user_line()}"
            )
        columns.append(values)
    return unflatten(treedef, [function(*row) for row in zip(*columns, strict=True)])


def map_prefix(function: Callable[..., Any], prefix: Tree, *rest: Tree) -> Tree:
    """``function`` of each leaf of a prefix and what the other trees have in its place, which may be subtrees.

    Raises
    ------
    ValueError
        If ``prefix`` is not a prefix of another tree.
    """
    for each in (prefix, *rest):
        flatten(each)
    return optree.tree_map(function, prefix, *rest, namespace=_NAMESPACE)


def broadcast_prefix(prefix: Tree, tree: Tree, what: str) -> list[Any]:
    """For each leaf of ``tree`` the leaf of ``prefix`` above it; None counts as a leaf of the prefix.

    Raises
    ------
    ValueError
        If ``prefix`` is not a prefix of the tree.
    """
    flatten(tree)
    result: list[Any] = []

    def spread(value: Any, subtree: Any) -> None:
        result.extend([value] * len(leaves(subtree)))

    try:
        optree.tree_map_(spread, prefix, tree, none_is_leaf=True, namespace=_NAMESPACE, is_leaf=lambda x: x is None)
    except ValueError as error:
        raise ValueError(f"{what} {prefix!r} does not fit the arguments: {error}") from None
    return result


def _register_dataclasses(values: Sequence[Any]) -> bool:
    """Register the classes of dataclass instances among leaves; whether there were any."""
    classes = {cls for cls in {type(value) for value in values} if dataclasses.is_dataclass(cls)}
    with _registration:
        for cls in classes - _registered:  # another thread may have met it meanwhile
            fields = dataclasses.fields(cls)
            names = tuple(field.name for field in fields if not field.metadata.get("static"))
            static = tuple(field.name for field in fields if field.metadata.get("static"))
            register: Any = optree.register_pytree_node
            register(cls, _taking_apart(names, static), _rebuilding(cls, names, static), namespace=_NAMESPACE)
            _registered.add(cls)
    return bool(classes)


def _taking_apart(names: Sequence[str], static: Sequence[str]) -> Callable[[Any], Any]:
    def take_apart(instance: Any) -> Any:
        values = [getattr(instance, name) for name in static]
        kept = tuple([(type(value), value) for value in values])  # 1 and True make two structures
        hash(kept)  # a TypeError for a list, which might change and be the same structure still
        return [getattr(instance, name) for name in names], kept, names

    return take_apart


def _rebuilding(cls: Any, names: Sequence[str], static: Sequence[str]) -> Callable[[Any, Iterable[Any]], Any]:
    """Makes an instance with these fields, without running ``__init__``: it may check or convert."""

    def rebuild(kept: Any, children: Iterable[Any]) -> Any:
        instance = object.__new__(cls)
        for name, (_, value) in zip(static, kept, strict=True):
            object.__setattr__(instance, name, value)
        for name, child in zip(names, children, strict=True):
            object.__setattr__(instance, name, child)
        return instance

    return rebuild
