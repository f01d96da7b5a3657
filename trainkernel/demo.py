"""``python -m trainkernel demo``: a digit classifier whose whole training step is one kernel.

On a GPU every step is one cooperative launch on device memory. Without one the reference trains,
the emulator runs some steps of the generated source where a C++ compiler is found, and NVRTC
compiles that source for a named architecture; each is said in plain words.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, Protocol, TextIO

import numpy as np
from numpy.typing import NDArray

from trainkernel import cli, reference
from trainkernel.compiler import Kernel
from trainkernel.compiler import compile as compile_program
from trainkernel.data import load_digits
from trainkernel.errors import CompileError, OptionError
from trainkernel.ir import TensorSpec
from trainkernel.mlp import MlpStep, mlp_forward, mlp_step
from trainkernel.runtime import driver
from trainkernel.runtime.device_array import DeviceArray, device_put
from trainkernel.runtime.streams import LEGACY_STREAM

Array = NDArray[Any]

LAYERS = (64, 128, 64, 10)
BATCH = 128
NUM_TRAIN = 1437
LEARNING_RATE = 3e-3
SEED = 0
COMPARED_STEPS = 3
TIMED_STEPS = 200
PLOT_COLUMNS, PLOT_ROWS = 60, 8


@dataclass(frozen=True)
class Digits:
    """The fixed split: images ``float32[n, 64]``, one-hot targets ``float32[n, 10]``, labels."""

    train_images: Array
    train_targets: Array
    test_images: Array
    test_labels: Array

    @staticmethod
    def load() -> Digits:
        images, labels = load_digits()
        order = np.random.default_rng(SEED).permutation(len(images))
        train, test = order[:NUM_TRAIN], order[NUM_TRAIN:]
        one_hot = np.eye(LAYERS[-1], dtype=np.float32)
        return Digits(images[train], one_hot[labels[train]], images[test], labels[test])

    def batches(self) -> Iterator[tuple[Array, Array]]:
        """Mini-batches for ever; each epoch shuffles anew and drops the incomplete last batch."""
        generator = np.random.default_rng(SEED)
        while True:
            order = generator.permutation(NUM_TRAIN)
            for start in range(0, NUM_TRAIN - BATCH + 1, BATCH):
                chosen = order[start : start + BATCH]
                yield self.train_images[chosen], self.train_targets[chosen]


class Trainer(Protocol):
    """Whatever runs steps: it owns the state."""

    def step(self, x: Array, target: Array) -> float:
        """Run one step and return its loss."""

    def state(self) -> dict[str, Array]:
        """The state by name, in NumPy."""


class HostTrainer:
    """Steps on NumPy arrays; ``run`` maps inputs to outputs and may update state in place."""

    def __init__(self, model: MlpStep, run: Callable[[Sequence[Any]], Sequence[Any]]) -> None:
        self._model, self._run = model, run
        self._inputs = model.initial_inputs(SEED, learning_rate=LEARNING_RATE)

    def step(self, x: Array, target: Array) -> float:
        index = self._model.input_index
        self._inputs[index["x"]], self._inputs[index["target"]] = x, target
        outputs = self._run(self._inputs)
        self._inputs = self._model.next_inputs(self._inputs, outputs)
        return float(outputs[self._model.output_index["loss"]])

    def state(self) -> dict[str, Array]:
        return {name: np.array(self._inputs[self._model.input_index[name]]) for name in self._model.state}


class GpuTrainer:
    """Steps on arrays in device memory, bound to the kernel once."""

    def __init__(self, model: MlpStep, kernel: Kernel) -> None:
        self._model = model
        self._device_index = int(str(kernel.device).removeprefix("cuda:"))
        initial = model.initial_inputs(SEED, learning_rate=LEARNING_RATE)
        self._arrays: dict[str, DeviceArray] = {}
        inputs = list(initial)
        for position, (spec, value) in enumerate(zip(model.program.inputs, initial, strict=True)):
            if isinstance(spec, TensorSpec):
                inputs[position] = self._arrays[spec.buffer] = device_put(value, self._device_index)
        loss = self._arrays["loss"] = DeviceArray((), "float32", self._device_index)
        outputs: list[Any] = [loss, *(None for _ in model.state)]
        self._bound = kernel.bind(inputs, outputs)
        self._num_steps = 0

    def step(self, x: Array, target: Array) -> float:
        self._arrays["x"].write(x)
        self._arrays["target"].write(target)
        self.launch()
        return float(self._arrays["loss"])

    def launch(self) -> None:
        """Put one step on the stream, on the batch that is on the device."""
        self._num_steps += 1
        self._bound.set_scalar("step", float(self._num_steps))
        self._bound.launch()

    def wait(self) -> None:
        """Wait for all launches."""
        with driver.using_device(self._device_index) as cuda:
            driver.check(cuda.cuStreamSynchronize(LEGACY_STREAM), "cuStreamSynchronize")

    def state(self) -> dict[str, Array]:
        return {name: np.asarray(self._arrays[name]) for name in self._model.state}


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
        Directory for the program, schedule, plan, source and cubin.

    Raises
    ------
    TrainkernelError
        For a wrong option, or a device that cannot be used.
    """
    if not isinstance(steps, int) or steps < 1:
        raise OptionError(f"--steps must be an int of at least 1, got {steps!r}")
    digits = Digits.load()
    model = mlp_step(LAYERS, BATCH, loss="cross_entropy", optimizer="adamw", dtype=dtype)
    say = _Printer(out)
    say(f"digits: {NUM_TRAIN:,} images to train, {len(digits.test_labels)} to test, 8x8 pixels")
    say(f"model:  {'-'.join(map(str, LAYERS))}, relu, softmax cross-entropy, AdamW, {dtype} products, batch {BATCH}")
    say(
        f"step:   one Program of {len(model.program.operations)} operations, {len(model.state)} arrays updated in place"
    )
    session = _open_session(model, device, arch)
    say(f"device: {session.description}")
    for line in _kernel_report(session):
        say(line)
    if save is not None:
        names = cli.write_artifacts(save, session.kernel.stats, session.cubin)
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
    for line in (*_time_launches(session, digits), *_compare(session, model, digits)):
        say(line)
    accuracy = _accuracy(trainer.state(), digits, dtype)
    say(f"test accuracy: {100 * accuracy:.1f} %")
    return accuracy


@dataclass(frozen=True)
class _Session:
    """What runs where.

    Attributes
    ----------
    kernel : Kernel
    cubin : bytes or None
        None where NVRTC is missing; ``resources`` says so then.
    runs_on, description, resources : str
        For the report.
    new_trainer : callable
        A trainer at the initial state, on the device that trains.
    new_compared : callable or None
        A trainer that runs the generated source, or None with the reason in ``not_compared``.
    """

    kernel: Kernel
    cubin: bytes | None
    runs_on: str
    description: str
    resources: str
    new_trainer: Callable[[], Trainer]
    new_compared: Callable[[], Trainer] | None
    not_compared: str = ""


def _open_session(model: MlpStep, device: str | None, arch: str) -> _Session:
    inplace = dict(model.inplace_outputs)
    if device is None:
        device = os.environ.get("TRAINKERNEL_DEVICE") or ("cuda" if driver.is_available() else "reference")
    if device not in ("emulator", "reference"):
        kernel = compile_program(model.program, device=device, inplace_outputs=inplace)
        facts = driver.device_facts(int(str(kernel.device).removeprefix("cuda:")))

        def on_gpu() -> Trainer:
            return GpuTrainer(model, kernel)

        place = f"{kernel.device} ({facts.name}, {facts.arch})"
        return _Session(kernel, kernel.cubin, place, place, str(kernel.resource_usage()), on_gpu, on_gpu)

    kernel = compile_program(model.program, device=device, arch=arch, inplace_outputs=inplace)
    try:
        cubin = kernel.cubin
        registers = cli.describe_resources(kernel.source, arch, kernel.stats.entry)
        resources = f"NVRTC compiled {len(cubin):,} bytes for {arch}: {registers}"
    except CompileError as error:
        cubin, resources = None, f"not compiled for {arch}: {error}"

    def on_reference() -> Trainer:
        return HostTrainer(model, lambda inputs: reference.run(model.program, inputs))

    def on_emulator() -> Trainer:
        emulated = compile_program(model.program, device="emulator", arch=arch, inplace_outputs=inplace)
        emulated(*model.initial_inputs(SEED))  # builds it, so that no timed step does
        return HostTrainer(model, lambda inputs: emulated(*inputs))

    missing = _emulator_problem()
    if device == "emulator":
        if missing:
            raise CompileError(missing)
        description = (
            "no GPU is used; the emulator runs the generated source on the CPU, once the C++ compiler built it"
        )
        return _Session(kernel, cubin, "the emulator", description, resources, on_emulator, on_emulator)
    description = "no GPU is used; the NumPy reference trains on the CPU"
    if missing:
        reason = f"the generated source was not run: {missing}"
        return _Session(kernel, cubin, "the reference", description, resources, on_reference, None, reason)
    description += ", and the emulator runs the generated source for comparison"
    return _Session(kernel, cubin, "the reference", description, resources, on_reference, on_emulator)


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
    for number, (x, target) in zip(range(1, steps + 1), digits.batches(), strict=False):
        start = time.perf_counter()
        losses.append(trainer.step(x, target))
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


def _compare(session: _Session, model: MlpStep, digits: Digits) -> Iterator[str]:
    """The greatest differences of loss and state from the reference after some steps of both."""
    if session.new_compared is None:
        yield f"check:  {session.not_compared}"
        return
    compared = session.new_compared()
    expected = HostTrainer(model, lambda inputs: reference.run(model.program, inputs))
    worst_loss = 0.0
    for _, (x, target) in zip(range(COMPARED_STEPS), digits.batches(), strict=False):
        worst_loss = max(worst_loss, abs(compared.step(x, target) - expected.step(x, target)))
    state, expected_state = compared.state(), expected.state()
    worst = {
        name: float(np.abs(state[name].astype(np.float64) - expected_state[name]).max()) for name in model.parameters
    }
    name = max(worst, key=lambda key: worst[key])
    where = "the emulator" if isinstance(compared, HostTrainer) else session.runs_on
    yield (
        f"check:  after {COMPARED_STEPS} steps of the generated source on {where}, the greatest difference from the "
        f"reference is {worst_loss:.1e} in the loss and {worst[name]:.1e} in a parameter ({name})"
    )


def _accuracy(state: dict[str, Array], digits: Digits, dtype: str) -> float:
    predictor = mlp_forward(LAYERS, len(digits.test_labels), dtype=dtype)
    inputs = [digits.test_images, *(state[name] for name in predictor.parameters)]
    (prediction,) = reference.run(predictor.program, inputs)
    return float(np.mean(prediction.argmax(axis=1) == digits.test_labels))


# ---------------------------------------------------------------------------- text


class _Printer:
    """Lines to a stream, and a progress bar that is redrawn on a terminal and plain elsewhere."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._terminal = out.isatty()
        self._drawn_at = 0.0

    def __call__(self, line: str) -> None:
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
