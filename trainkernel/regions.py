"""Block regions: which operations a block computes for its own rows, without waiting for other blocks.

Cut by a label (``trainkernel.alignment``), a step falls into operations whose rows never talk to
each other (a net's forward and backward pass by examples; a whole step by the models of an
ensemble), operations that sum over rows (weight gradients, the loss), and the rest (the update of
the parameters). The first two make a *region*: piece ``c`` of it is a run of rows, and all tasks of
a piece run in one block with block barriers between them. The sums over rows become one partial
result per piece, which the rest adds up in order after a grid barrier. With one piece the whole
step is a region, and no grid barrier is left.

``plan_region`` chooses label and number of pieces by a cost model, from program, target and options
alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from itertools import accumulate
from operator import mul

from trainkernel.access import PICKS, AccessWalker
from trainkernel.alignment import PARTIAL, ROW, accesses, by_alignment
from trainkernel.arithmetic import kind_of, scale_of
from trainkernel.ir import Operation, Program, TensorSpec
from trainkernel.options import Options
from trainkernel.reduction_plans import SPLIT_REDUCTIONS
from trainkernel.region_costs import RegionCost
from trainkernel.region_plans import RegionPlan, Split, is_block_product, num_elements, product_flops
from trainkernel.target import Target

_DRAWING = ("random_bits", *PICKS)
_MIN_MEETINGS = 2
_ONE_BLOCK_MARGIN = 0.85
_MAX_LABELS = 3
_MAX_BATCHES = 2
_MIN_BATCH = 8
_MAX_WAVES = 2
_SLICE_ROWS = (256, 128, 64)


def plan_region(program: Program, target: Target, options: Options) -> RegionPlan | None:
    """The region of a program (of one level, loop bodies apart) that pays, if one does."""
    asked = options.region_pieces
    operations = [item for item in program.operations if isinstance(item, Operation) and num_elements(item)]
    if asked == 0 or not operations:
        return None
    if asked is None and _num_meetings(operations) < _MIN_MEETINGS:
        return None
    model = RegionCost(program, target, options)
    best_us = model.total_us(None) if asked is None else float("inf")
    best: RegionPlan | None = None
    for label in _labels(program, operations):
        choices = list(_divisors(label, target.num_sms)) if asked is None else _asked(label, asked)
        if not choices:
            continue
        for rows, partials in _classifications(Cuts(program, label), model, choices):
            names = rows | partials
            inside = [each for each in operations if each.outputs[0].buffer in names]
            if asked is None and _num_meetings(inside) < _MIN_MEETINGS:
                continue
            for pieces in choices if rows else ():
                plan = model.plan(Split.over(label, pieces, target.num_sms), rows, partials)
                cost = model.total_us(plan)
                # One block needs no grid barrier, and a loop's values stay near it: only what is clearly faster counts.
                margin = _ONE_BLOCK_MARGIN if best is not None and best.split.label == 1 < label else 1.0
                if cost < margin * best_us - 1e-9 and model.fits(plan):
                    best_us, best = cost, plan
    return best


def _classifications(
    cuts: Cuts, model: RegionCost, choices: list[int]
) -> Iterator[tuple[frozenset[str], frozenset[str]]]:
    """What a label cuts; then, one after another, with those products left to the whole grid that are cheaper there."""
    all_rows, partials = classify(cuts, frozenset(), frozenset())
    yield all_rows, partials
    if cuts.label == 1 or not all_rows:
        return
    rows, whole = all_rows, frozenset[str]()
    best_us = model.best_us(cuts.label, choices, rows, partials)
    for operation in model.largest_products():
        name = operation.outputs[0].buffer
        if name not in rows and name not in partials:
            continue
        trial_rows, trial_partials = classify(cuts, whole | {name}, all_rows)
        trial_us = model.best_us(cuts.label, choices, trial_rows, trial_partials)
        if trial_rows and trial_us < best_us:
            rows, partials, whole, best_us = trial_rows, trial_partials, whole | {name}, trial_us
            yield rows, partials


def _num_meetings(operations: list[Operation]) -> int:
    """The operations that others wait for: all but pointwise ones."""
    return sum(kind_of(operation) != "pointwise" for operation in operations)


def _divisors(label: int, num_sms: int) -> Iterator[int]:
    """Numbers of pieces worth a look, fewest first; one piece of a label is the label 1."""
    if label == 1:
        yield 1
    limit = _MAX_WAVES * num_sms
    for pieces in range(2, min(label, limit) + 1):
        if label % pieces == 0 and 8 * pieces >= min(label, limit):
            yield pieces
    for rows in _SLICE_ROWS:
        if label % rows == 0 and label // rows > limit:
            yield label // rows


def _asked(label: int, pieces: int) -> list[int]:
    return [pieces] if label % pieces == 0 and (label == 1) == (pieces == 1) else []


def _labels(program: Program, operations: list[Operation]) -> list[int]:
    """One, the numbers of rows (examples, or examples times places) that most of the work has, and those of batches.

    They are rows of inputs, or of what is drawn from them (random points, a shuffled mini-batch). A batch is what is
    drawn, or an input that is no state; its rows may cut work that has more of them (images, whose places are rows).
    """
    states = {spec.shape for spec in program.outputs}
    inputs = [spec for spec in program.inputs if isinstance(spec, TensorSpec)]
    sizes = {size for spec in inputs for size in _numbers_of_rows(spec)}
    batches = {spec.shape[0] for spec in inputs if spec.ndim and spec.shape not in states}
    drawn = set[str]()
    for operation in operations:
        if _is_drawn(operation, drawn) and kind_of(operation) == "pointwise":
            drawn |= {spec.buffer for spec in operation.outputs}
            sizes |= set(_numbers_of_rows(operation.outputs[0]))
            batches |= set(operation.outputs[0].shape[:1])
    work: dict[int, int] = {}
    for operation in operations:
        leading = operation.outputs[0].shape[:1]
        if leading and leading[0] > 1:
            flops = product_flops(operation) if kind_of(operation) == "product" else 0
            if kind_of(operation) == "reduction":
                flops = sum(spec.num_elements for spec in operation.tensor_inputs)
            work[leading[0]] = work.get(leading[0], 0) + flops

    def cut_work(size: int) -> int:
        return sum(flops for rows, flops in work.items() if rows % size == 0)

    ranked = sorted((size for size in work if work[size] and size in sizes), key=lambda size: (-work[size], -size))
    labels = [1, *ranked[:_MAX_LABELS]]
    others = {size for size in batches - set(labels) if size >= _MIN_BATCH and cut_work(size)}
    return labels + sorted(others, key=lambda size: (-cut_work(size), -size))[:_MAX_BATCHES]


def _is_drawn(operation: Operation, drawn: Set[str]) -> bool:
    """Whether an operation draws its results by random numbers or indices, or continues what is ``drawn``."""
    return operation.op in _DRAWING or any(spec.buffer in drawn for spec in operation.tensor_inputs)


def _numbers_of_rows(spec: TensorSpec) -> list[int]:
    """The products of the first dims of an input."""
    return list(accumulate(spec.shape, mul))


# ---------------------------------------------------------------------------- what a label cuts


class Cuts:
    """What each operation of a program reads of its own rows under a label, found once."""

    def __init__(self, program: Program, label: int) -> None:
        self.label = label
        self.operations = [item for item in program.operations if isinstance(item, Operation) and num_elements(item)]
        self.inputs = {spec.buffer: spec for spec in program.inputs}
        self._declared = {spec.buffer: spec for spec in program.buffers()}
        self._walker = AccessWalker({})
        self._found: dict[tuple[str, str], tuple[frozenset[str], frozenset[str]] | None] = {}

    def reads(self, operation: Operation, role: str) -> tuple[frozenset[str], frozenset[str]] | None:
        """Buffers of which the operation reads its own rows alone, and the others; None if it cannot be cut so."""
        key = operation.outputs[0].buffer, role
        if key not in self._found:
            self._found[key] = self._reads(operation, role)
        return self._found[key]

    def _reads(self, operation: Operation, role: str) -> tuple[frozenset[str], frozenset[str]] | None:
        fits = _computed_in_block(operation, self.label) if role == ROW else _may_be_partial(operation)
        found = accesses(operation, self._walker, self.label, role) if fits else None
        return None if found is None else by_alignment(found, self._declared, self.label)

    def has_row_of_input(self, own: frozenset[str]) -> bool:
        """Whether one of the buffers is an input that has as many rows as the label says."""
        if self.label == 1:
            return True
        inputs = [self.inputs[name] for name in own if name in self.inputs]
        return any(isinstance(spec, TensorSpec) and self.label in _numbers_of_rows(spec) for spec in inputs)


def classify(cuts: Cuts, outside: frozenset[str], all_rows: frozenset[str]) -> tuple[frozenset[str], frozenset[str]]:
    """The buffers computed row by row under a label, and those that sum over rows.

    The operations that make those ``outside`` are left to the whole grid; ``all_rows`` says which of them
    have rows all the same.
    """
    whole: set[str] = set()
    while True:
        walk = _Classification(cuts, whole | outside, outside & all_rows)
        if not walk.misread:
            return walk.result()
        whole |= walk.misread


class _Classification:
    """One walk: every operation takes the first role whose reads stay in its own rows.

    ``weak`` rows come from no operand with rows of its own (a mask, a function of weights alone);
    one of these or a ``shallow`` one that an operation with rows reads elsewhere than in its own is ``misread``, and
    better whole. ``shallow`` rows are pointwise functions of inputs alone (a moment times its decay): no reason to cut
    what continues a result of the whole grid. ``evaluable`` is what every block can evaluate of inputs alone (a weight
    rounded to 16 bits), ``free`` that of it which is no row; ``drawn`` is what random numbers or indices make of it
    (points, a mini-batch), and the rows that continue it.
    """

    def __init__(self, cuts: Cuts, whole: set[str], outside: frozenset[str]) -> None:
        self._cuts = cuts
        self._inputs = frozenset(cuts.inputs)
        self._outside = outside
        self._rows: set[str] = set()
        self._weak: set[str] = set()
        self._shallow: set[str] = set()
        self._partials: set[str] = set()
        self._evaluable: set[str] = set()
        self._free: set[str] = set()
        self._drawn: set[str] = set()
        self.misread: set[str] = set()
        for operation in cuts.operations:
            if operation.outputs[0].buffer not in whole:
                self._place(operation)
            self._note(operation)

    def _place(self, operation: Operation) -> None:
        operands = {spec.buffer for spec in operation.tensor_inputs}
        read_rows = operands & self._rows
        strangers = operands - self._rows - self._inputs - self._outside - self._free
        if (read_rows - self._shallow - (self._weak - self._drawn)) or (operands & self._outside) or not strangers:
            reads = self._cuts.reads(operation, ROW)
            if reads is not None:
                own, astray = reads
                misread = astray & self._rows
                if misread and self._are_better_whole(misread, operands, own):
                    self.misread |= misread
                if not misread and (own & self._outside or not strangers or own & self._rows):
                    self._take(operation, read_rows, own)
                    return
        if read_rows or operands & self._outside:
            reads = self._cuts.reads(operation, PARTIAL)
            if reads is not None and reads[0] & (self._rows | self._outside):
                misread = reads[1] & self._rows
                if not misread:
                    self._partials.add(operation.outputs[0].buffer)
                elif misread <= self._weak & self._evaluable and reads[0] - self._weak:
                    self.misread |= misread

    def _are_better_whole(self, misread: Set[str], operands: Set[str], own: frozenset[str]) -> bool:
        """Whether what an operation reads elsewhere than in its own rows should be no rows, for its own to be some."""
        vague = self._weak | self._shallow
        if not misread <= vague:
            return False
        return self._has_rows(operands & self._rows - vague, own) or (
            misread <= self._evaluable and not operands.isdisjoint(self._drawn)
        )

    def _has_rows(self, read: Set[str], own: frozenset[str]) -> bool:
        """Whether what an operation reads by rows is rows of the batch: of an input, or of others that have them."""
        return bool(read) or bool(own & self._outside) or self._cuts.has_row_of_input(own)

    def _note(self, operation: Operation) -> None:
        """What an operation's results are beside rows or partials."""
        operands = {spec.buffer for spec in operation.tensor_inputs}
        outputs = {spec.buffer for spec in operation.outputs}
        if kind_of(operation) == "pointwise" and operands - self._inputs <= self._evaluable:
            self._evaluable |= outputs
            self._free |= outputs - self._rows
        if _is_drawn(operation, self._drawn) and (outputs <= self._evaluable or outputs <= self._rows):
            self._drawn |= outputs

    def _take(self, operation: Operation, read_rows: set[str], own: frozenset[str]) -> None:
        """An operation computed row by row."""
        outputs = {spec.buffer for spec in operation.outputs}
        self._rows |= outputs
        if not self._has_rows(read_rows - self._weak, own):
            self._weak |= outputs
        if kind_of(operation) == "pointwise" and read_rows <= self._shallow and not own & self._outside:
            self._shallow |= outputs

    def result(self) -> tuple[frozenset[str], frozenset[str]]:
        """Rows and partials, without rows that no other needs: weak ones not computed of drawn ones, shallow ones."""
        loose = self._weak - (self._drawn - self._evaluable)
        kept = self._rows - loose - (self._shallow if self._cuts.label > 1 else set())
        for operation in reversed(self._cuts.operations):
            name = operation.outputs[0].buffer
            if name in kept or name in self._partials:
                kept |= {spec.buffer for spec in operation.tensor_inputs} & self._rows
        return frozenset(kept), frozenset(self._partials)


def _computed_in_block(operation: Operation, label: int) -> bool:
    """Whether an operation can be cut into rows; what cannot runs as a whole in a region of one piece."""
    kind = kind_of(operation)
    return label == 1 or (kind != "scan" and (kind != "product" or is_block_product(operation)))


def _may_be_partial(operation: Operation) -> bool:
    if kind_of(operation) == "product":
        plain = len(operation.tensor_inputs) == 2 and scale_of(operation, "alpha") == 1
        return plain and is_block_product(operation)
    return operation.op in SPLIT_REDUCTIONS
