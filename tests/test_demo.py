"""The demo: its data, its text, and its promise."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import trainkernel as tk
from trainkernel import OptionError, Program, cli, demo, digits_step, tree, validate
from trainkernel.data import load_digits
from trainkernel.errors import CompileError

ACCURACY = re.compile(r"test accuracy: (\d+\.\d) %")
KERNEL_LINES = ("stages", "grid barrier", "workspace", "registers", "us per step on", "greatest difference")


def run(**options: Any) -> tuple[float, list[str]]:
    out = io.StringIO()
    accuracy = demo.run_demo(out=out, **options)
    return accuracy, out.getvalue().splitlines()


def unwrapped(lines: list[str]) -> list[str]:
    """Lines as they were before they were wrapped: a line further in goes on from the one before."""
    return re.sub(r"\n {8}", " ", "\n".join(lines)).splitlines()


def difference(lines: list[str]) -> float:
    (line,) = [line for line in unwrapped(lines) if line.startswith("check:")]
    found = re.search(r"is (\S+) in the loss and (\S+) in a parameter", line)
    assert found, line
    return max(float(found[1]), float(found[2]))


def test_the_digits_are_the_ones_we_name() -> None:
    images, labels = load_digits()
    assert (images.shape, images.dtype) == ((1797, 64), np.float32)
    assert images.min() == 0
    assert images.max() == 1
    assert np.bincount(labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert int((images * 16).sum()) == 561718


def test_the_digits_match_scikit_learn() -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    reference = datasets.load_digits()
    images, labels = load_digits()
    assert np.array_equal(images * 16, reference.data)
    assert np.array_equal(labels, reference.target)


def test_the_split_is_fixed_and_has_no_overlap() -> None:
    digits, again = demo.Digits.load(), demo.Digits.load()
    assert len(digits.train_images) == demo.NUM_TRAIN
    assert len(digits.train_images) + len(digits.test_images) == 1797
    assert np.array_equal(digits.test_images, again.test_images)
    (x, labels), (x_again, _) = next(digits.batches()), next(again.batches())
    assert np.array_equal(x, x_again)
    assert (x.shape, x.dtype) == ((demo.BATCH, 64), np.float32)
    assert (labels.shape, labels.dtype) == ((demo.BATCH,), np.int32)


def test_an_epoch_shows_each_image_at_most_once() -> None:
    digits = demo.Digits.load()
    per_epoch = demo.NUM_TRAIN // demo.BATCH
    rows = np.concatenate([x for _, (x, _) in zip(range(per_epoch), digits.batches(), strict=False)])
    assert len(np.unique(rows, axis=0)) == len(rows) == per_epoch * demo.BATCH


def test_the_demo_keeps_its_promise() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "trainkernel", "demo", "--device", "reference"],
        capture_output=True,
        text=True,
        check=True,
    )
    lines = done.stdout.splitlines()
    found = ACCURACY.fullmatch(lines[-1])
    assert found, lines[-1]
    assert float(found[1]) >= 95.0
    assert max(map(len, lines)) <= 80
    said = "\n".join(unwrapped(lines))
    for text in KERNEL_LINES:
        assert text in said, text
    # Adam divides a gradient by its own size: one that is rounding noise may move its weight by 3e-5.
    assert difference(lines) < 1e-4
    assert lines[1].startswith("building the emulator")
    assert "no GPU is used" in said
    assert done.stderr == ""


def test_bfloat16_and_saved_files(tmp_path: Path) -> None:
    accuracy, lines = run(device="reference", steps=60, dtype="bfloat16", save=str(tmp_path / "out"))
    assert accuracy > 0.9
    assert difference(lines) < 0.02
    files = {path.name: path for path in (tmp_path / "out").iterdir()}
    assert set(files) == {
        "program.json",
        "settings.json",
        "schedule.txt",
        "plan.txt",
        "trainkernel_step.cu",
        "trainkernel_step.cubin",
    }
    program = Program.from_json(files["program.json"].read_text())
    validate(program)
    arguments = demo.initial_arguments()
    assert program == digits_step.compiled_step("bfloat16").lower(*arguments).program
    assert files["trainkernel_step.cubin"].read_bytes()[:4] == b"\x7fELF"
    assert "__global__" in files["trainkernel_step.cu"].read_text()
    assert cli.main(["compile", str(tmp_path / "out"), "-o", str(tmp_path / "again")]) == 0
    for name, path in files.items():
        assert (tmp_path / "again" / name).read_bytes() == path.read_bytes(), name


class OnHost(np.ndarray):
    """What a DeviceArray does, on the host."""

    def write(self, values: Any) -> None:
        np.copyto(self, values, casting="no")


def test_what_is_bound_on_a_gpu_is_what_the_kernel_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "device_put", lambda values, index: np.array(values).view(OnHost))
    monkeypatch.setattr(demo, "DeviceArray", lambda shape, dtype, index: np.zeros(shape, dtype).view(OnHost))
    jitted = digits_step.compiled_step(device="reference")
    arguments = demo.initial_arguments()
    step, kernel = jitted.lower(*arguments), jitted.kernel(*arguments)
    bound = SimpleNamespace(device="cuda:0", bind=kernel.bind)
    trainer, expected = demo.GpuTrainer(step, bound), demo.HostTrainer(jitted)
    for _, (images, labels) in zip(range(3), demo.Digits.load().batches(), strict=False):
        assert trainer.step(images, labels) == expected.step(images, labels)
    for found, wanted in zip(tree.leaves(trainer.params()), tree.leaves(expected.params()), strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_all_products_of_a_bfloat16_step_are_on_tensor_cores() -> None:
    kernel = digits_step.compiled_step("bfloat16", device="reference", arch="sm_90a").kernel(*demo.initial_arguments())
    assert kernel.stats.tensor_core_operations == 8
    assert kernel.stats.direct_state_commits == len(kernel.stats.inplace_outputs) == 19
    assert {spec.dtype for spec in kernel.program.inputs} == {"float32", "int32"}


def test_the_gradient_of_a_bfloat16_product_rounds_operands_only() -> None:
    generator = np.random.default_rng(0)
    x, w, c = (generator.standard_normal(shape).astype(np.float32) for shape in ((4, 8), (8, 3), (4, 3)))

    def rounded(a: Any) -> Any:
        return a.astype(ml_dtypes.bfloat16).astype(np.float64)

    value, pull_back = tk.vjp(digits_step.bfloat16_product, x, w)
    grad_x, grad_w = pull_back(c)
    np.testing.assert_allclose(value, rounded(x) @ rounded(w), rtol=1e-6)
    np.testing.assert_allclose(grad_x, rounded(c) @ rounded(w).T, rtol=1e-6)
    np.testing.assert_allclose(grad_w, rounded(x).T @ rounded(c), rtol=1e-6)


def test_the_emulator_can_train() -> None:
    _, lines = run(device="emulator", steps=2)
    assert any("the emulator runs the generated source" in line for line in unwrapped(lines))
    assert ACCURACY.fullmatch(lines[-1])


def test_the_environment_names_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINKERNEL_DEVICE", "emulator")
    _, lines = run(steps=1)
    assert any("us per step on the emulator" in line for line in lines)
    assert any(line.endswith(" 1 step") for line in lines)
    monkeypatch.setenv("TRAINKERNEL_DEVICE", "tpu")
    with pytest.raises(OptionError, match="'tpu'"):
        run(steps=1)


def test_without_a_compiler_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "_emulator_problem", lambda: "no C++ compiler here")
    monkeypatch.setattr("trainkernel.emulator.compiler.find_compiler", lambda: None)
    _, lines = run(device="reference", steps=2)
    assert "check:  the generated source was not run: no C++ compiler here" in lines
    assert not any("building the emulator" in line for line in lines)
    with pytest.raises(CompileError, match="no C"):
        run(device="emulator", steps=2)


def test_a_compiler_that_does_not_compile_costs_only_the_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    from trainkernel.emulator import compiler

    monkeypatch.setenv("CXX", "true")
    monkeypatch.setattr(compiler, "_load_runtime", compiler._load_runtime.__wrapped__)
    _, lines = run(device="reference", steps=2)
    assert "check:  the generated source was not run: the C++ compiler 'true' accepted its runtime" in "\n".join(
        unwrapped(lines)
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "--steps must be"),
        ({"device": "tpu"}, "'tpu'"),
        ({"dtype": "float64"}, "dtype must be one of"),
        ({"arch": "sm_70"}, "sm_70"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(**{"device": "reference", **options})


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_demo_on_a_gpu(dtype: str) -> None:
    accuracy, lines = run(dtype=dtype)
    assert accuracy >= 0.95
    assert difference(lines) < (1e-4 if dtype == "float32" else 0.05)
    assert any("us per step of" in line for line in lines)
    assert any(line.startswith("device: cuda:0") for line in lines)


def test_steps_must_be_an_int() -> None:
    with pytest.raises(OptionError):
        run(device="reference", steps=2.5)


def test_plot() -> None:
    lines = demo.plot([3.0, 2.0, 1.0, 0.0], columns=4, rows=4)
    assert [line.split("|")[-1] for line in lines[:4]] == ["*", " *", "  *", "   *"]
    assert [line.split("|")[0].strip() for line in lines[:4]] == ["3.00", "2.00", "1.00", "0.00"]
    assert lines[-1].endswith("4 steps")
    assert len(demo.plot([1.0] * 1000)) == demo.PLOT_ROWS + 1
    assert demo.plot([float("nan")]) == ["loss: no finite value"]
    assert "*" in "".join(demo.plot([0.0, 0.0]))
    assert "*" in "".join(demo.plot([float("inf"), 1.0]))


def test_long_lines_are_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    line = "check:  " + " ".join(["words"] * 32)
    for columns, num_lines in (("20", 3), ("120", 2), ("400", 1)):
        monkeypatch.setenv("COLUMNS", columns)
        out = io.StringIO()
        demo._Printer(out)(line)
        lines = out.getvalue().splitlines()
        assert len(lines) == num_lines
        assert max(map(len, lines)) <= max(80, int(columns))
        assert unwrapped(lines) == [line]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_does_not_wrap_on_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    terminal = Terminal()
    demo._Printer(terminal).progress(100, 100, "loss 1.0")
    assert terminal.getvalue() == "\r[" + "#" * 18 + "\x1b[K\n"


def test_progress_is_redrawn_on_a_terminal_and_plain_elsewhere() -> None:
    terminal, plain = Terminal(), io.StringIO()
    for out in (terminal, plain):
        say = demo._Printer(out)
        for step in range(1, 101):
            say.progress(step, 100, "loss 1.0")
    assert terminal.getvalue().startswith("\r[")
    assert terminal.getvalue().endswith("\n")
    assert terminal.getvalue().count("\n") == 1
    assert plain.getvalue().splitlines() == [f"step {step}/100  loss 1.0" for step in (20, 40, 60, 80, 100)]
