"""Trees: structures, leaves in order, folds."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any, NamedTuple

import numpy as np
import pytest

import trainkernel as tk
from trainkernel import tree


class Pair(NamedTuple):
    a: Any
    b: Any


TREES: dict[str, tuple[Any, list[Any]]] = {
    "leaf": (7, [7]),
    "dict by sorted key": ({"b": 2, "a": 1}, [1, 2]),
    "nested": ([{"a": (1, 2)}, Pair(3, [4])], [1, 2, 3, 4]),
    "None has no leaf": ((None, 5), [5]),
}


@pytest.mark.parametrize("name", TREES)
def test_the_leaves_and_the_structure_make_the_tree(name: str) -> None:
    given, leaves = TREES[name]
    assert tree.leaves(given) == leaves
    assert tree.unflatten(tree.structure(given), leaves) == given
    assert tree.structure(given) == tree.structure(tree.map(lambda x: -x, given))
    assert tree.structure(given) != tree.structure([given, given])


@pytest.mark.parametrize("name", TREES)
def test_leaves_are_folded_from_the_left(name: str) -> None:
    given, leaves = TREES[name]
    assert tree.reduce(lambda text, leaf: f"{text}{leaf}", given, "") == "".join(map(str, leaves))
    assert tree.reduce(operator.add, given) == sum(leaves)


def test_a_tree_without_leaves_needs_an_initial_value() -> None:
    assert tree.reduce(operator.add, {}, 0) == 0
    with pytest.raises(TypeError, match="initial value"):
        tree.reduce(operator.add, {})


def test_what_counts_as_a_leaf_may_be_said() -> None:
    given = {"layer": (2, 3), "rest": [Pair(4, 5)]}
    is_pair = {"is_leaf": lambda node: isinstance(node, tuple)}
    assert tree.leaves(given, **is_pair) == [(2, 3), Pair(4, 5)]
    assert tree.structure(given, **is_pair) == tree.structure({"layer": 0, "rest": [0]})
    assert tree.map(lambda size, name: (*size, name), given, {"layer": "a", "rest": [["b"]]}, **is_pair) == {
        "layer": (2, 3, "a"),
        "rest": [(4, 5, ["b"])],
    }
    with pytest.raises(ValueError, match="tree 1 has the structure"):
        tree.map(lambda *leaves: leaves, given, {"layer": "a"}, **is_pair)
    assert tree.all({"a": True, "b": (1, None)}) and not tree.all([1, [0]])
    assert not tree.all([()], is_leaf=lambda node: node == ())


@dataclasses.dataclass(frozen=True)
class Layer:
    w: Any
    activation: Any = dataclasses.field(default="tanh", metadata={"static": True})
    b: Any = 0


def test_static_fields_of_a_dataclass_are_part_of_the_structure() -> None:
    given = Layer(2, "relu", 3)
    assert tree.leaves(given) == [2, 3] and tree.paths(given) == [".w", ".b"]
    assert tree.map(lambda leaf: -leaf, given) == Layer(-2, "relu", -3)
    with pytest.raises(TypeError, match="unhashable type: 'list'"):
        tree.leaves(Layer(2, ["relu"]))
    assert tree.structure(Layer(0, 1)) == tree.structure(Layer(1, 1)) != tree.structure(Layer(0, True))


DIFFERENT: dict[str, tuple[Any, Any, str]] = {
    "kind": ({"a": [1]}, {"a": 1}, r"at \['a'\], a leaf instead of a list of 1"),
    "length": ({"a": [1, (2, 3)]}, {"a": [1, (2,)]}, r"at \['a'\]\[1\], a tuple of 1 instead of a tuple of 2"),
    "keys": ([{"w": 1, "b": 2}], [{"w": 1, "c": 2}], r"at \[0\], a dict without 'b' and with 'c'"),
    "missing key": ({"w": 1, "b": 2}, {"w": 1}, "at the root, a dict without 'b'"),
    "None": (Pair(1, 2), Pair(1, None), r"at \.b, None instead of a leaf"),
    "static": ({"m": Layer(1)}, {"m": Layer(1, "relu")}, r"at \['m'\], other static fields"),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_mismatch_says_which_tree_and_where(name: str) -> None:
    wanted, found, message = DIFFERENT[name]
    with pytest.raises(tree.TreeMismatchError, match=f"tree 2 has the structure .*: {message}\n  at .*test_tree.py:"):
        tree.map(lambda *leaves: leaves, wanted, wanted, found)
    assert tree.difference(tree.structure(wanted), tree.structure(wanted)) == ""


def test_a_tree_as_a_row() -> None:
    given = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "b": (np.int32(7), None), "h": np.ones(2, np.float16)}
    row, unravel = tk.flatten_util.ravel_pytree(given)
    assert row.dtype == np.float32 and row.tolist() == [7, 1, 1, 0, 1, 2, 3, 4, 5]
    again = unravel(row * 2)
    assert again["b"] == (14, None) and again["h"].dtype == np.float16
    np.testing.assert_array_equal(again["w"], 2 * given["w"])
    traced = tk.jit(
        lambda x: tk.flatten_util.ravel_pytree(x)[1](tk.flatten_util.ravel_pytree(x)[0]), device="reference"
    )
    np.testing.assert_array_equal(traced(given)["w"], given["w"])
    with pytest.raises(tk.TraceError, match="needs a row of 9 elements, got f32"):
        unravel(row[1:])
    assert tk.flatten_util.ravel_pytree({})[0].shape == (0,)
