"""Tasks of a stage that do the same on other tensors: one function serves them all.

An optimizer's step is the same statements for every parameter. Compiled once, with the tensors and
the sizes that differ as arguments, they cost the compiler a part of the time, and a block finds the
task of a piece by a few comparisons. Tasks are alike if their statements are, up to the names of
pointers and values and to integers that may as well be variables.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from trainkernel.codegen.tasks import TaskFunction
from trainkernel.codegen.text import INDENT, block

# Whole tokens, which must be the same: directives, comments, a template's arguments, sizes of arrays,
# members of structs. Then numbers (with the sign of an exponent), words, and other characters alone.
_TOKEN = re.compile(
    r"^\s*#.*|//.*|(?:tk_|Tk)\w*<[^;{}()]*>|\[\d+\]|[A-Za-z_]\w*(?:\.\w+)+"
    r"|\d(?:[eEpP][+-]|[\w.])*|[A-Za-z_]\w*|\s+|."
)
_NAME = re.compile(r"(?:v\d*|b|w)_\w+")
_MAX_INT = 2**31 - 1
_MAX_SIZES = 12
_Key: TypeAlias = tuple[object, ...]


@dataclass(frozen=True)
class _Form:
    """A function's statements in tokens; ``free`` are the places of integers that may be variables.

    Functions with the same ``key`` differ in names and in free integers alone.
    """

    tokens: tuple[str, ...]
    free: tuple[int, ...]
    key: _Key


def _form(function: TaskFunction) -> _Form:
    names = {pointer.name: f"pointer {place}" for place, pointer in enumerate(function.pointers)}
    tokens: list[str] = []
    pattern: list[str] = []
    free: list[int] = []
    before = ""
    for line in function.statements:
        # The compiler may unroll a loop only if it knows how often it runs.
        fixed = line.lstrip().startswith("for (") and before.strip() != "#pragma unroll 1"
        for token in [*_TOKEN.findall(line), "\n"]:
            kind = token
            if _NAME.fullmatch(token):
                kind = names.setdefault(token, f"name {len(names)}")
            elif token.isdigit() and int(token) <= _MAX_INT and not fixed and _may_vary(tokens):
                free.append(len(tokens))
                kind = "integer"
            tokens.append(token)
            pattern.append(kind)
        before = line
    kinds = tuple(pointer.kind for pointer in function.pointers)
    needs = (function.parameters, function.shared_bytes, function.uses_uniform, function.needs_free_shared)
    return _Form(tuple(tokens), tuple(free), (kinds, needs, *pattern))


def _may_vary(tokens: Sequence[str]) -> bool:
    """Whether an integer after these tokens may be a variable: not if it divides anything but the piece."""
    words = [token for token in tokens[-8:] if not token.isspace()]
    if not words or words[-1] not in ("/", "%"):
        return True
    return next((word for word in reversed(words[:-1]) if word != ")"), "") == "piece"


@dataclass(frozen=True)
class Family:
    """A task, or several that are alike, whose pieces follow one another.

    The function is the first one's; ``sizes`` are its integers that differ, by place in its tokens:
    a variable's number; ``values`` are every task's values of the variables.
    """

    functions: tuple[TaskFunction, ...]
    tokens: tuple[str, ...] = ()
    sizes: Mapping[int, int] | None = None
    values: tuple[tuple[str, ...], ...] = ()

    @property
    def num_pieces(self) -> int:
        return sum(function.task.num_pieces for function in self.functions)

    def text(self, first_id: int, stage: int) -> str:
        """The function, after a struct of what differs."""
        leader = self.functions[0]
        if self.sizes is None:
            return leader.text(first_id, stage)
        fields = [f"{leader.pointers[place].kind} {leader.pointers[place].name};" for place in self._different]
        fields += [f"int {_size(number)};" for number in range(len(self.values[0]))]
        task = f"const {_struct(first_id)}& task"
        head = f"__device__ __forceinline__ void {self._name(first_id)}({leader.parameters}, {task})"
        titles = [function.title(first_id + n, stage) for n, function in enumerate(self.functions)]
        lines = [
            f"// What differs between tasks {first_id} to {first_id + len(self.functions) - 1}.",
            *block(f"struct {_struct(first_id)}", fields)[:-1],
            "};",
            "",
            *(line for title in titles for line in title),
            *block(head, self._statements()),
        ]
        return "\n".join(lines)

    def loop(self, first_id: int, stage: int, first: str, arguments: str) -> list[str]:
        """The loop over the pieces of a block, of which ``first`` is the first."""
        if self.sizes is None:
            mark = f"TK_TASK({stage}, {first_id});"
            call = f"{self._name(first_id)}({arguments});"
            return block(f"for (int piece = {first}; piece < {self.num_pieces}; piece += gridDim.x)", [mark, call])
        lines = [f"{_struct(first_id)} task;", "int piece = item;"]
        end = 0
        for n, function in enumerate(self.functions):
            start, end = end, end + function.task.num_pieces
            test = f"if (item < {end})" if n == 0 else "else" if end == self.num_pieces else f"else if (item < {end})"
            inner = [f"TK_TASK({stage}, {first_id + n});"]
            inner += [f"piece -= {start};"] if start else []
            pointers = [function.pointers[place] for place in self._different]
            fields = [f"{pointer.address},  // {pointer.name}" for pointer in pointers]
            fields += [f"{value}," for value in self.values[n]]
            inner += ["task = {", *(INDENT + line for line in fields), "};"]
            chosen = block(test, inner)
            if n:
                lines[-1] += f" {chosen.pop(0)}"
            lines += chosen
        lines.append(f"{self._name(first_id)}({arguments}, task);")
        leader = self.functions[0]
        if leader.needs_free_shared and leader.task.num_pieces == 1:
            # Written for one piece, it has no barrier for the sake of a next one.
            lines.append("__syncthreads();  // shared is free for the next task")
        return block(f"for (int item = {first}; item < {self.num_pieces}; item += gridDim.x)", lines)

    def _name(self, first_id: int) -> str:
        if self.sizes is None:
            return self.functions[0].name(first_id)
        return f"tasks_{first_id}_to_{first_id + len(self.functions) - 1}"

    def _statements(self) -> list[str]:
        assert self.sizes is not None
        own = self.functions[0].pointers
        pointers = {own[place].name for place in self._different}
        same = [pointer.declaration for pointer in own if pointer.name not in pointers]
        words = [
            f"task.{_size(self.sizes[place])}"
            if place in self.sizes
            else f"task.{token}"
            if token in pointers
            else token
            for place, token in enumerate(self.tokens)
        ]
        return same + "".join(words).splitlines()

    @property
    def _different(self) -> list[int]:
        """The places of the pointers that are not the same for all."""
        columns = zip(*(function.pointers for function in self.functions), strict=True)
        return [place for place, column in enumerate(columns) if len({pointer.address for pointer in column}) > 1]


def _struct(first_id: int) -> str:
    return f"TkTask{first_id}"


def _size(number: int) -> str:
    return f"size_{number}"


def find_families(functions: Mapping[int, TaskFunction]) -> dict[int, Family]:
    """Gather tasks that are alike.

    Parameters
    ----------
    functions : mapping of place to TaskFunction
        The functions of a stage's tasks that run by themselves, by their places in the stage.

    Returns
    -------
    dict of int to Family
        By the place of the first task of each family.
    """
    alike: dict[_Key, list[int]] = {}
    forms = {place: _form(function) for place, function in functions.items()}
    for place, form in forms.items():
        alike.setdefault(form.key, []).append(place)
    families: dict[int, Family] = {}
    for places in alike.values():
        family = _family([functions[place] for place in places], [forms[place] for place in places])
        if family is not None:
            families[places[0]] = family
        else:
            families.update({place: Family((functions[place],)) for place in places})
    return families


def _family(functions: Sequence[TaskFunction], forms: Sequence[_Form]) -> Family | None:
    """The family of functions of the same form; None of one function alone, or where too much differs."""
    if len(functions) < 2 or any(not function.task.num_pieces for function in functions):
        return None
    numbers: dict[tuple[str, ...], int] = {}
    sizes: dict[int, int] = {}
    for place, *others in zip(*(form.free for form in forms), strict=True):
        values = (forms[0].tokens[place], *(form.tokens[other] for form, other in zip(forms[1:], others, strict=True)))
        if len(set(values)) > 1:
            sizes[place] = numbers.setdefault(values, len(numbers))
    if len(numbers) > _MAX_SIZES:
        return None
    by_task = tuple(zip(*numbers, strict=True)) if numbers else ((),) * len(functions)
    return Family(tuple(functions), forms[0].tokens, sizes, by_task)
