"""Tasks that do the same on other tensors: one function serves them all.

An optimizer's step is the same statements for every parameter, a layer's those of the layer before.
Compiled once, with the tensors and the sizes that differ as arguments, they cost the compiler a part
of the time. Alike tasks of one stage are a family: a block finds the task of a piece by a few
comparisons. A function that several stages call is not inlined. Tasks are alike if their statements
are, up to the names of pointers and values and to integers that may as well be variables.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
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


_Member: TypeAlias = tuple[TaskFunction, _Form]


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


@dataclass(frozen=True, eq=False)
class SharedFunction:
    """A function that serves one task, or several that are alike.

    The statements are the first task's; ``sizes`` are its integers that differ, by place in its tokens:
    a variable's number; ``values`` are every task's values of the variables.
    """

    functions: tuple[TaskFunction, ...]
    tokens: tuple[str, ...] = ()
    sizes: Mapping[int, int] | None = None
    values: tuple[tuple[str, ...], ...] = ()

    def name(self, first_id: int) -> str:
        """The function's name; ``first_id`` is its first task's."""
        leader = self.functions[0]
        return leader.name(first_id) if self.sizes is None else f"tasks_{first_id}_{leader.task.name}"

    def text(self, ids: Sequence[int], stages: Sequence[int], inlined: bool) -> str:
        """The function, after a struct of what differs; ``ids`` and ``stages`` are its tasks'.

        It is inlined if only one stage calls it, or else if it is to be ``inlined``.
        """
        leader = self.functions[0]
        if self.sizes is None:
            return leader.text(ids[0], stages[0])
        fields = [f"{leader.pointers[place].kind} {leader.pointers[place].name};" for place in self.different]
        fields += [f"int {_size(number)};" for number in range(len(self.values[0]))]
        inline = "__forceinline__" if inlined or len(set(stages)) == 1 else "TK_NOINLINE"
        head = f"__device__ {inline} void {self.name(ids[0])}({leader.parameters}, {_struct_name(ids[0])} task)"
        titles = [function.title(*where) for function, *where in zip(self.functions, ids, stages, strict=True)]
        lines = [
            f"// What differs between tasks {', '.join(map(str, ids))}.",
            *block(f"struct {_struct_name(ids[0])}", fields)[:-1],
            "};",
            "",
            *(line for title in titles for line in title),
            *block(head, self._statements()),
        ]
        return "\n".join(lines)

    def call(self, number: int, first_id: int, arguments: str) -> list[str]:
        """The statements that call the function for a task; slabs of a region begin at ``shared``."""
        if self.sizes is None:
            return [f"{self.name(first_id)}({arguments});"]
        fields = [INDENT + re.sub(r"\bslabs\b", "shared", line) for line in self.fields(number)]
        name = _struct_name(first_id)
        return [f"const {name} task = {{", *fields, "};", f"{self.name(first_id)}({arguments}, task);"]

    def fields(self, number: int) -> list[str]:
        """The values of the struct's fields for a task, one per line."""
        pointers = self.functions[number].pointers
        fields = [f"{pointers[place].address},  // {pointers[place].name}" for place in self.different]
        return fields + [f"{value}," for value in self.values[number]]

    def _statements(self) -> list[str]:
        assert self.sizes is not None
        own = self.functions[0].pointers
        pointers = {own[place].name for place in self.different}
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
    def different(self) -> list[int]:
        """The places of the pointers that are not the same for all."""
        columns = zip(*(function.pointers for function in self.functions), strict=True)
        return [place for place, column in enumerate(columns) if len({pointer.address for pointer in column}) > 1]


@dataclass(frozen=True)
class Family:
    """Tasks of one stage that share a function: ``members`` are their places among its tasks, in order."""

    shared: SharedFunction
    members: tuple[int, ...]

    @property
    def functions(self) -> list[TaskFunction]:
        return [self.shared.functions[member] for member in self.members]

    @property
    def num_pieces(self) -> int:
        return sum(function.task.num_pieces for function in self.functions)

    def loop(
        self, ids: Sequence[int], first_id: int, stage: int, first: str, distance: str, arguments: str
    ) -> list[str]:
        """The loop over the pieces of a block.

        ``ids`` are those of the family's tasks, ``first_id`` that of the function's first task; ``first``
        is the block's first piece, ``distance`` that to its next one.
        """
        if len(self.members) == 1:
            inner = [f"TK_TASK({stage}, {ids[0]});", *self.shared.call(self.members[0], first_id, arguments)]
            return block(f"for (int piece = {first}; piece < {self.num_pieces}; piece += {distance})", inner)
        lines = [f"{_struct_name(first_id)} task;", "int piece = item;"]
        end = 0
        for n, (member, function) in enumerate(zip(self.members, self.functions, strict=True)):
            start, end = end, end + function.task.num_pieces
            test = f"if (item < {end})" if n == 0 else "else" if end == self.num_pieces else f"else if (item < {end})"
            inner = [f"TK_TASK({stage}, {ids[n]});"]
            inner += [f"piece -= {start};"] if start else []
            inner += ["task = {", *self._fields(member), "};"]
            chosen = block(test, inner)
            if n:
                lines[-1] += f" {chosen.pop(0)}"
            lines += chosen
        lines.append(f"{self.shared.name(first_id)}({arguments}, task);")
        leader = self.functions[0]
        if leader.needs_free_shared and leader.task.num_pieces == 1:
            # Written for one piece, it has no barrier for the sake of a next one.
            lines.append("__syncthreads();  // shared is free for the next task")
        return block(f"for (int item = {first}; item < {self.num_pieces}; item += {distance})", lines)

    def _fields(self, member: int) -> list[str]:
        return [INDENT + line for line in self.shared.fields(member)]


def _struct_name(first_id: int) -> str:
    """The struct of what differs between the tasks of a function, of which the first has this id."""
    return f"TkTask{first_id}"


def _size(number: int) -> str:
    return f"size_{number}"


def share_functions(functions: Iterable[TaskFunction]) -> list[SharedFunction]:
    """Gather tasks that are alike, in the order of the first of each.

    Parameters
    ----------
    functions : iterable of TaskFunction
        The functions of the tasks that run by themselves, in the order of execution.
    """
    kinds: dict[_Key, list[list[_Member]]] = {}
    for function in functions:
        form = _form(function)
        groups = kinds.setdefault(form.key, [])
        group = next((group for group in groups if _may_join(function, form, group)), None)
        if group is None:
            groups.append([(function, form)])
        else:
            group.append((function, form))
    return [_shared(group) for groups in kinds.values() for group in groups]


def _may_join(function: TaskFunction, form: _Form, group: Sequence[_Member]) -> bool:
    """Whether a function may be served by what serves a group of the same form."""
    if not function.task.num_pieces or not group[0][0].task.num_pieces:
        return False
    return len(set(_different_integers([*(other for _, other in group), form]).values())) <= _MAX_SIZES


def _different_integers(forms: Sequence[_Form]) -> dict[int, tuple[str, ...]]:
    """The integers that differ between forms: by place in the first one's tokens, the values of all."""
    different = {}
    for place, *others in zip(*(form.free for form in forms), strict=True):
        values = (forms[0].tokens[place], *(form.tokens[other] for form, other in zip(forms[1:], others, strict=True)))
        if len(set(values)) > 1:
            different[place] = values
    return different


def _shared(group: Sequence[_Member]) -> SharedFunction:
    """What serves functions of the same form."""
    functions, forms = zip(*group, strict=True)
    if len(group) == 1:
        return SharedFunction(functions)
    different = _different_integers(forms)
    variables = list(dict.fromkeys(different.values()))
    sizes = {place: variables.index(values) for place, values in different.items()}
    by_task = tuple(zip(*variables, strict=True)) if variables else ((),) * len(functions)
    return SharedFunction(functions, forms[0].tokens, sizes, by_task)


def find_families(shared: Sequence[SharedFunction], functions: Sequence[TaskFunction]) -> list[Family]:
    """The families of a stage's tasks.

    Parameters
    ----------
    shared : sequence of SharedFunction
        Of the whole kernel.
    functions : sequence of TaskFunction
        Those of the stage's tasks that run by themselves.
    """
    wanted = {id(function) for function in functions}
    members = [[n for n, function in enumerate(one.functions) if id(function) in wanted] for one in shared]
    return [Family(one, tuple(places)) for one, places in zip(shared, members, strict=True) if places]
