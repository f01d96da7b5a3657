"""``python -m trainkernel demo``: a digit classifier whose whole training step is one kernel.

On a GPU every step is one cooperative launch on device memory. Without one the reference trains,
the emulator runs some steps of the generated source where a C++ compiler is found, and NVRTC
compiles that source for a named architecture; each is said in plain words.
"""

from __future__ import annotations

import os
import shutil
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, Protocol, TextIO

import numpy as np
from numpy.typing import NDArray

from trainkernel import cli, digits_step, tree
from trainkernel.compiler import Kernel
from trainkernel.data import load_digits
from trainkernel.digits_step import LAYERS
from trainkernel.errors import CompileError, OptionError
from trainkernel.jitted import Jitted, Step
from trainkernel.runtime import driver
from trainkernel.runtime.device_array import DeviceArray, device_put
from trainkernel.runtime.streams import LEGACY_STREAM

Array = NDArray[Any]

BATCH = 128
NUM_TRAIN = 1437
SEED = 0
COMPARED_STEPS = 3
TIMED_STEPS = 200
PLOT_COLUMNS, PLOT_ROWS = 60, 8
NARROWEST = 80


@dataclass(frozen=True)
class Digits:
    """The fixed split: images ``float32[n, 64]`` and labels ``int32[n]``."""

    train_images: Array
    train_labels: Array
    test_images: Array
    test_labels: Array

    @staticmethod
    def load() -> Digits:
        images, labels = load_digits()
        labels = labels.astype(np.int32)
        order = np.random.default_rng(SEED).permutation(len(images))
        train, test = order[:NUM_TRAIN], order[NUM_TRAIN:]
        return Digits(images[train], labels[train], images[test], labels[test])

    def batches(self) -> Iterator[tuple[Array, Array]]:
        """Mini-batches for ever; each epoch shuffles anew and drops the incomplete last batch."""
        generator = np.random.default_rng(SEED)
        while True:
            order = generator.permutation(NUM_TRAIN)
            for start in range(0, NUM_TRAIN - BATCH + 1, BATCH):
                chosen = order[start : start + BATCH]
                yield self.train_images[chosen], self.train_labels[chosen]


def initial_arguments() -> tuple[Any, ...]:
    """Parameters, the optimizer's state, and room for a batch: the arguments of the first step."""
    params = digits_step.initial_params(SEED)
    state = digits_step.optimizer.init(params)
    return params, state, np.zeros((BATCH, LAYERS[0]), np.float32), np.zeros(BATCH, np.int32)


class Trainer(Protocol):
    """Whatever runs steps: it owns the state."""

    def step(self, images: Array, labels: Array) -> float:
        """Run one step and return its loss."""

    def params(self) -> digits_step.Params:
        """The parameters, in NumPy."""


class HostTrainer:
    """Steps on NumPy arrays, which the jitted step updates in place."""

    def __init__(self, jitted: Jitted) -> None:
        self._jitted = jitted
        self._params, self._state, *_ = initial_arguments()

    def step(self, images: Array, labels: Array) -> float:
        loss, self._params, self._state = self._jitted(self._params, self._state, images, labels)
        return float(loss)

    def params(self) -> digits_step.Params:
        params: digits_step.Params = self._params
        return params


class GpuTrainer:
    """Steps on arrays in device memory, bound to the kernel once.

    The kernel's inputs are the leaves of the arguments in order, then captured constants; its first
    output is the loss, and all others are parameters and state, which are updated in place.
    """

    def __init__(self, step: Step, kernel: Kernel) -> None:
        self._device_index = int(str(kernel.device).removeprefix("cuda:"))
        leaves, self._treedef = tree.flatten(initial_arguments())
        self._leaves = [device_put(leaf, self._device_index) for leaf in leaves]
        captured = [device_put(value, self._device_index) for value in step.captured]
        outputs: list[Any] = [
            None if index in step.inplace_outputs else DeviceArray(spec.shape, spec.dtype, self._device_index)
            for index, spec in enumerate(step.program.outputs)
        ]
        place = step.results[0].output
        assert place is not None
        self._loss = outputs[place]
        self._bound = kernel.bind([*self._leaves, *captured], outputs)

    def step(self, images: Array, labels: Array) -> float:
        _, _, images_there, labels_there = tree.unflatten(self._treedef, self._leaves)
        images_there.write(images)
        labels_there.write(labels)
        self.launch()
        return float(self._loss)

    def launch(self) -> None:
        """Put one step on the stream, on the batch that is on the device."""
        self._bound.launch()

    def wait(self) -> None:
        """Wait for all launches."""
        with driver.using_device(self._device_index) as cuda:
            driver.check(cuda.cuStreamSynchronize(LEGACY_STREAM), "cuStreamSynchronize")

    def params(self) -> digits_step.Params:
        params: digits_step.Params
        params, *_ = tree.unflatten(self._treedef, [np.asarray(leaf) for leaf in self._leaves])
        return params


# ---------------------------------------------------------------------------- the demo


def run_demo(
    *,
    device: str | None = None,
    steps: int = cli.DEMO_STEPS,
    dtype: str = "float32",
    arch: str = cli.DEFAULT_ARCH,
    save: str | None = None,
    out: TextIO,
) -> float:
    """Train, report to ``out``, and return the accuracy on the test images (0 to 1).

    Parameters
    ----------
    device : str, optional
        ``"cuda:0"``, ``"emulator"`` or ``"reference"``; left out, the environment's
        ``TRAINKERNEL_DEVICE``, else a GPU if there is one, else the reference.
    steps : int
    dtype : {"float32", "bfloat16"}
    arch : str
        What the kernel is generated and compiled for where no GPU runs it.
    save : str, optional
        Directory for the program, its settings, schedule, plan, source and cubin.

    Raises
    ------
    TrainkernelError
        For a wrong option, or a device that cannot be used.
    """
    if not isinstance(steps, int) or steps < 1:
        raise OptionError(f"--steps must be an int of at least 1, got {steps!r}")
    digits = Digits.load()
    say = _Printer(out)
    say(f"digits: {NUM_TRAIN:,} images to train, {len(digits.test_labels)} to test, 8x8 pixels")
    session = _open_session(dtype, device, arch, say)
    program = session.step.program
    say(f"model:  {'-'.join(map(str, LAYERS))}, relu, softmax cross-entropy, AdamW, {dtype} products, batch {BATCH}")
    say(
        f"step:   one Program of {len(program.operations)} operations, "
        f"{len(session.step.inplace_outputs)} arrays updated in place"
    )
    say(f"device: {session.description}")
    for line in _kernel_report(session):
        say(line)
    if save is not None:
        names = cli.write_artifacts(save, session.kernel, session.cubin)
        say(f"saved:  {save}: {', '.join(names)}")

    trainer = session.new_trainer()
    say("")
    losses, us_per_step = _train(trainer, digits, steps, say)
    say("")
    for line in plot(losses):
        say(line)
    say("")
    copies = ", copying the batch in and the loss out" if isinstance(trainer, GpuTrainer) else ""
    say(f"time:   {us_per_step:,.0f} us per step on {session.runs_on}{copies}")
    for line in (*_time_launches(session, digits), *_compare(session, digits)):
        say(line)
    scores = digits_step.predict(trainer.params(), digits.test_images, dtype)
    accuracy = float(np.mean(scores.argmax(axis=1) == digits.test_labels))
    say(f"test accuracy: {100 * accuracy:.1f} %")
    return accuracy


@dataclass(frozen=True)
class _Session:
    """What runs where.

    Attributes
    ----------
    step : Step
        The traced step.
    kernel : Kernel
    cubin : bytes or None
        None where NVRTC is missing; ``resources`` says so then.
    runs_on, description, resources : str
        For the report.
    new_trainer, on_reference : callable
        A trainer at the initial state, on the device that trains and on the reference.
    new_compared : callable or None
        A trainer that runs the generated source, or None with the reason in ``not_compared``.
    """

    step: Step
    kernel: Kernel
    cubin: bytes | None
    runs_on: str
    description: str
    resources: str
    new_trainer: Callable[[], Trainer]
    on_reference: Callable[[], Trainer]
    new_compared: Callable[[], Trainer] | None
    not_compared: str = ""


def _open_session(dtype: str, device: str | None, arch: str, say: _Printer) -> _Session:
    if device is None:
        device = os.environ.get("TRAINKERNEL_DEVICE") or ("cuda" if driver.is_available() else "reference")

    def on_reference() -> Trainer:
        return HostTrainer(digits_step.compiled_step(dtype, device="reference", arch=arch))

    arguments = initial_arguments()
    if device not in ("emulator", "reference"):
        jitted = digits_step.compiled_step(dtype, device=device)
        step, kernel = jitted.lower(*arguments), jitted.kernel(*arguments)
        facts = driver.device_facts(int(str(kernel.device).removeprefix("cuda:")))

        def on_gpu() -> Trainer:
            return GpuTrainer(step, kernel)

        place = f"{kernel.device} ({facts.name}, {facts.arch})"
        usage = str(kernel.resource_usage())
        return _Session(step, kernel, kernel.cubin, place, place, usage, on_gpu, on_reference, on_gpu)

    jitted = digits_step.compiled_step(dtype, device=device, arch=arch)
    step, kernel = jitted.lower(*arguments), jitted.kernel(*arguments)
    cubin, resources = _compiled_for(kernel, arch)

    from trainkernel.emulator import compiler

    def on_emulator() -> Trainer:
        say("building the emulated kernel ...")
        emulated = digits_step.compiled_step(dtype, device="emulator", arch=arch)
        emulated(*initial_arguments())  # builds it, so that no timed step does
        return HostTrainer(emulated)

    if compiler.is_available():
        say("building the emulator (5 to 20 s the first time) ...")
    missing = _emulator_problem()
    if device == "emulator":
        if missing:
            raise CompileError(missing)
        description = (
            "no GPU is used; the emulator runs the generated source on the CPU, once the C++ compiler built it"
        )
        where = "the emulator"
        return _Session(step, kernel, cubin, where, description, resources, on_emulator, on_reference, on_emulator)
    description = "no GPU is used; the NumPy reference trains on the CPU"
    where = "the reference"
    if missing:
        reason = f"the generated source was not run: {missing}"
        return _Session(step, kernel, cubin, where, description, resources, on_reference, on_reference, None, reason)
    description += ", and the emulator runs the generated source for comparison"
    return _Session(step, kernel, cubin, where, description, resources, on_reference, on_reference, on_emulator)


def _compiled_for(kernel: Kernel, arch: str) -> tuple[bytes | None, str]:
    """The cubin for an architecture and its registers in words, or None and the reason."""
    try:
        cubin = kernel.cubin
        registers = cli.describe_resources(kernel.source, arch, kernel.stats.entry)
    except CompileError as error:
        return None, f"not compiled for {arch}: {error}"
    return cubin, f"NVRTC compiled {len(cubin):,} bytes for {arch}: {registers}"


def _emulator_problem() -> str:
    """Why the emulator cannot run; empty if it can."""
    from trainkernel.emulator import compiler

    try:
        compiler.load_runtime()
    except CompileError as error:
        return str(error)
    return "" if compiler.is_available() else "the emulator does not know this machine's processor"


def _kernel_report(session: _Session) -> list[str]:
    stats = session.kernel.stats
    lines = [f"kernel: generated for {stats.target.name}", *(f"        {line}" for line in cli.describe_counts(stats))]
    for stage in sorted({task.stage for task in stats.tasks}):
        names = [task.name for task in stats.tasks if task.stage == stage]
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        lines.append(f"        stage {stage}: {shown}")
    return [*lines, f"        {session.resources}"]


# ---------------------------------------------------------------------------- training and checks


def _train(trainer: Trainer, digits: Digits, steps: int, say: _Printer) -> tuple[list[float], float]:
    """Losses of all steps, and microseconds per step."""
    per_epoch = NUM_TRAIN // BATCH
    losses: list[float] = []
    seconds = 0.0
    for number, (images, labels) in zip(range(1, steps + 1), digits.batches(), strict=False):
        start = time.perf_counter()
        losses.append(trainer.step(images, labels))
        seconds += time.perf_counter() - start
        say.progress(number, steps, f"epoch {ceil(number / per_epoch)}  loss {losses[-1]:.4f}")
    return losses, seconds / steps * 1e6


def _time_launches(session: _Session, digits: Digits) -> Iterator[str]:
    """On a GPU: the time per step of launches in a row, on a state of their own."""
    trainer = session.new_trainer() if session.kernel.arch and str(session.kernel.device).startswith("cuda") else None
    if not isinstance(trainer, GpuTrainer):
        return
    trainer.step(*next(digits.batches()))
    start = time.perf_counter()
    for _ in range(TIMED_STEPS):
        trainer.launch()
    trainer.wait()
    microseconds = (time.perf_counter() - start) / TIMED_STEPS * 1e6
    yield f"        {microseconds:,.1f} us per step of {TIMED_STEPS} launches in a row"


def _compare(session: _Session, digits: Digits) -> Iterator[str]:
    """The greatest differences of loss and parameters from the reference after some steps of both."""
    if session.new_compared is None:
        yield f"check:  {session.not_compared}"
        return
    compared, expected = session.new_compared(), session.on_reference()
    worst_loss = 0.0
    for _, (images, labels) in zip(range(COMPARED_STEPS), digits.batches(), strict=False):
        worst_loss = max(worst_loss, abs(compared.step(images, labels) - expected.step(images, labels)))
    found, wanted = compared.params(), expected.params()
    pairs = zip(tree.paths(found), tree.leaves(found), tree.leaves(wanted), strict=True)
    worst, name = max((float(np.abs(got.astype(np.float64) - want).max()), path) for path, got, want in pairs)
    where = "the emulator" if isinstance(compared, HostTrainer) else session.runs_on
    yield (
        f"check:  after {COMPARED_STEPS} steps of the generated source on {where}, the greatest difference from the "
        f"reference is {worst_loss:.1e} in the loss and {worst:.1e} in a parameter (params{name})"
    )


# ---------------------------------------------------------------------------- text


class _Printer:
    """Lines to a stream, and a progress bar that is redrawn on a terminal and plain elsewhere."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._terminal = out.isatty()
        self._drawn_at = 0.0

    def __call__(self, line: str) -> None:
        columns = max(NARROWEST, shutil.get_terminal_size().columns)
        if len(line) > columns:
            line = textwrap.fill(
                line, columns, subsequent_indent=" " * 8, break_long_words=False, break_on_hyphens=False
            )
        print(line, file=self._out, flush=True)

    def progress(self, done: int, total: int, text: str) -> None:
        """Show that ``done`` of ``total`` steps are behind us."""
        last = done == total
        if self._terminal:
            now = time.monotonic()
            if last or now - self._drawn_at > 0.05:
                self._drawn_at = now
                filled = 30 * done // total
                bar = "#" * filled + "-" * (30 - filled)
                columns = shutil.get_terminal_size().columns - 1  # a line that wraps is not redrawn
                line = f"[{bar}] {done}/{total}  {text}"[:columns]
                print(f"\r{line}\x1b[K", end="\n" if last else "", file=self._out, flush=True)
        elif last or done * 5 // total != (done - 1) * 5 // total:
            self(f"step {done}/{total}  {text}")


def plot(values: Sequence[float], columns: int = PLOT_COLUMNS, rows: int = PLOT_ROWS) -> list[str]:
    """A curve over zero as lines of text; each column is the mean of its share of the values, in the nearest row."""
    columns = min(columns, len(values))
    shares = np.array_split(np.asarray(values, np.float64), columns)
    means = np.array([share.mean() for share in shares])
    finite = means[np.isfinite(means)]
    if finite.size == 0:
        return ["loss: no finite value"]
    top = float(finite.max()) or 1.0
    lines = []
    for row in reversed(range(rows)):
        cells = ""
        for mean in means:
            height = mean / top * (rows - 1) if np.isfinite(mean) else -1.0
            cells += "*" if row == round(height) else " "
        lines.append(f"{top * row / (rows - 1):6.2f} |{cells}".rstrip())
    lines.append(f"  loss +{'-' * columns} {len(values)} step{'s' if len(values) > 1 else ''}")
    return lines
