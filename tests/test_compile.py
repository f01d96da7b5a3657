"""``compile``: which device, which target, and kernels on the host."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from runtime_support import STEP_SOURCE, step_program, step_stub

import trainkernel
from trainkernel import compiler
from trainkernel.compiler import ReferenceWarning, compile
from trainkernel.errors import ArgumentError, CompileError, DeviceError, OptionError
from trainkernel.ir import Program
from trainkernel.jitted import jit
from trainkernel.kernel import HostKernel, Kernel, describe_stage
from trainkernel.runtime import driver
from trainkernel.runtime.driver import DeviceFacts
from trainkernel.target import Target

NO_GPU = driver._Probe(None, 0, "no CUDA device: none here", 0)
H200 = DeviceFacts(0, "NVIDIA H200", (9, 0), 132, True, 65536, 232448, 233472, 2048, 13000)
f32 = np.float32


class Generate:
    """Stands in for ``codegen.generate`` and remembers its options."""

    def __init__(self) -> None:
        self.options: dict[str, Any] = {}

    def __call__(self, program: Program, **options: Any) -> Any:
        self.options = options
        return step_stub(program=program)


def step_in_numpy(program: Program, inputs: Any) -> tuple[np.ndarray[Any, Any], ...]:
    x, w, lr, repeat, _ = inputs
    new_w = w.copy()
    for _ in range(repeat):
        new_w = new_w - f32(lr) * x
    return new_w, new_w[::-1].copy()


def emulated(generated: Any, inputs: Any, *, barrier_timeout_ns: int = 0, ticks_per_launch: Any = None) -> Any:
    assert generated.source == STEP_SOURCE
    new_w, flipped = step_in_numpy(generated.program, inputs)
    inputs[1][...] = new_w
    return SimpleNamespace(outputs=(inputs[1], flipped))


@pytest.fixture
def generate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Generate:
    """No GPU, no environment, an empty cache, and stand-ins for the compiler, the emulator and the reference."""
    stub = Generate()
    monkeypatch.setattr("trainkernel.codegen.generate", stub, raising=False)
    monkeypatch.setattr("trainkernel.reference.evaluate", step_in_numpy)
    monkeypatch.setattr("trainkernel.emulator.emulate", emulated)
    monkeypatch.setattr(driver, "_probe", NO_GPU)
    monkeypatch.setattr(compiler, "_reference_told", False)
    monkeypatch.delenv("TRAINKERNEL_DEVICE", raising=False)
    monkeypatch.setenv("TRAINKERNEL_CACHE_DIR", str(tmp_path / "cache"))
    return stub


def arguments() -> list[Any]:
    return [np.arange(4096, dtype=f32), np.ones(4096, f32), 0.5, 2, 0]


def test_public_names() -> None:
    assert trainkernel.compile is compile
    assert trainkernel.Kernel is Kernel


@pytest.mark.parametrize("device", ["reference", "emulator"])
def test_call_on_the_host(generate: Generate, device: str) -> None:
    kernel = compile(step_program(), device=device)
    assert kernel.device == device
    x, w, *scalars = arguments()
    want = w - f32(0.5) * x - f32(0.5) * x
    new_w, flipped = kernel(x, w, *scalars)
    assert new_w is w
    assert np.array_equal(w, want)
    assert np.array_equal(flipped, want[::-1])
    assert flipped.flags.writeable
    assert x[1] == 1


@pytest.mark.parametrize("device", ["reference", "emulator"])
def test_bind_on_the_host(generate: Generate, device: str) -> None:
    kernel = compile(step_program(), device=device)
    x, w, *scalars = arguments()
    flipped = np.zeros(4096, f32)
    bound = kernel.bind([x, w, *scalars], [None, flipped])
    assert w[1] == 1
    bound.launch()
    bound.set_scalar("repeat", 1)
    bound.set_scalar(2, 1.0)
    bound.launch()
    bound.check()
    assert np.array_equal(w, 1 - 2 * x)
    assert np.array_equal(flipped, w[::-1])
    with pytest.raises(ArgumentError, match=r"no scalar input 'x'; the scalar inputs are: 2 'lr', 3 'repeat'"):
        bound.set_scalar("x", 1)
    for key in ([], None, True, np.arange(2)):
        with pytest.raises(ArgumentError, match="no scalar input"):
            bound.set_scalar(key, 1)
    with pytest.raises(ArgumentError, match="needs an integer"):
        bound.set_scalar("repeat", 0.5)
    with pytest.raises(ArgumentError, match="takes none"):
        bound.launch(stream=1)


@pytest.mark.parametrize("wrong", [None, 5, np.zeros(4096, f32), "text", iter([])])
def test_bind_needs_lists(generate: Generate, wrong: Any) -> None:
    kernel = compile(step_program(), device="reference")
    with pytest.raises(ArgumentError, match=r"inputs: got .*, needs a list or tuple"):
        kernel.bind(wrong, [None, np.zeros(4096, f32)])
    with pytest.raises(ArgumentError, match=r"outputs: got .*, needs a list or tuple"):
        kernel.bind(arguments(), wrong)


def test_nothing_is_written_when_an_argument_is_refused(generate: Generate) -> None:
    kernel = compile(step_program(), device="reference")
    x, w, *scalars = arguments()
    with pytest.raises(ArgumentError, match="input 3 'repeat'"):
        kernel(x, w, 0.5, "twice", 0)
    with pytest.raises(ArgumentError, match="got 4 inputs, needs 5"):
        kernel(x, w, 0.5, 1)
    with pytest.raises(ArgumentError, match="share memory"):
        kernel(w, w, *scalars)
    with pytest.raises(ArgumentError, match="takes none"):
        kernel(x, w, *scalars, stream=5)
    assert np.all(w == 1)


def test_nothing_is_written_when_the_run_fails(generate: Generate, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(program: Program, inputs: Any) -> Any:
        raise FloatingPointError("in the middle")

    monkeypatch.setattr("trainkernel.reference.evaluate", fail)
    x, w, *scalars = arguments()
    with pytest.raises(FloatingPointError):
        compile(step_program(), device="reference")(x, w, *scalars)
    assert np.all(w == 1)


def test_nothing_is_written_when_a_result_cannot_be_delivered(
    generate: Generate, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr("trainkernel.kernel.deliver", fail)
    x, w, *scalars = arguments()
    with pytest.raises(MemoryError):
        compile(step_program(), device="reference")(x, w, *scalars)
    assert np.all(w == 1)


def test_no_device_named_and_no_gpu_runs_the_reference_and_says_so_once(generate: Generate) -> None:
    with pytest.warns(ReferenceWarning, match="no GPU: kernels run as the NumPy reference") as caught:
        kernel = compile(step_program())
    assert caught[0].filename == __file__
    assert kernel.device == "reference"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compile(step_program()).device == "reference"


def test_the_warning_of_a_jitted_function_names_the_line_of_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRAINKERNEL_DEVICE", raising=False)
    monkeypatch.setattr(compiler.driver, "is_available", lambda: False)
    monkeypatch.setattr(compiler, "_reference_told", False)
    with pytest.warns(ReferenceWarning) as caught:
        jit(lambda x: x + 1)(np.ones(3, np.float32))
    assert caught[0].filename == __file__


def test_environment_names_the_device(generate: Generate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINKERNEL_DEVICE", "emulator")
    assert compile(step_program()).device == "emulator"
    assert compile(step_program(), device="reference").device == "reference"
    monkeypatch.setenv("TRAINKERNEL_DEVICE", "tpu")
    with pytest.raises(OptionError, match=r"TRAINKERNEL_DEVICE must be 'cuda', .* got 'tpu'"):
        compile(step_program())


def test_cuda_without_a_gpu_is_the_same_error_each_time(generate: Generate) -> None:
    messages = set()
    for device in ("cuda", "cuda:1", "cuda"):
        with pytest.raises(DeviceError, match="no CUDA device") as caught:
            compile(step_program(), device=device)
        messages.add(str(caught.value))
    assert len(messages) == 1


@pytest.mark.parametrize(
    "device",
    [
        "gpu",
        "cuda:",
        "cuda:x",
        "cuda:-1",
        "cuda:\uff11",
        pytest.param("cuda:" + "9" * 5000, id="long"),
        "cpu",
        "",
        0,
        "1",
        np.array(["a", "b"]),
    ],
)
def test_unknown_devices(generate: Generate, device: Any) -> None:
    with pytest.raises(OptionError, match=r"device must be 'cuda', 'cuda:<index>', 'emulator' or 'reference'"):
        compile(step_program(), device=device)


@pytest.mark.parametrize("value", [0, -1, True, "1", float("nan"), float("inf")])
def test_barrier_timeout_is_checked(generate: Generate, value: Any) -> None:
    with pytest.raises(OptionError, match="barrier_timeout_ms must be None or a positive number"):
        compile(step_program(), device="reference", barrier_timeout_ms=value)


def test_options_are_checked_on_the_reference(generate: Generate) -> None:
    with pytest.raises(OptionError, match=r"'inplace' \(did you mean 'inplace_outputs'\?\); known: .*max_blocks.*tune"):
        compile(step_program(), device="reference", inplace={0: 1})
    compile(step_program(), device="reference", max_blocks=7)
    assert generate.options == {"max_blocks": 7}


def test_architecture_alone(generate: Generate) -> None:
    kernel = compile(step_program(), arch="sm_90a")
    assert kernel.device is None
    assert generate.options["target"] == Target.preset("sm_90a")
    assert kernel.source == STEP_SOURCE
    assert kernel.cubin.startswith(b"\x7fELF")
    assert kernel.cubin is kernel.cubin
    for use in (lambda: kernel(1), lambda: kernel.bind([], [])):
        with pytest.raises(DeviceError, match=r"compiled for arch='sm_90a' alone: .* cannot be called"):
            use()
    with pytest.raises(DeviceError, match=r"compiled for arch='sm_90a' alone uses no GPU.*resource_statistics"):
        kernel.resource_usage()


def test_architecture_without_a_preset_uses_the_portable_target(generate: Generate) -> None:
    kernel = compile(step_program(), arch="sm_121")
    assert generate.options["target"].name == "portable"
    assert kernel.cubin.startswith(b"\x7fELF")


def test_a_given_target_is_kept(generate: Generate) -> None:
    target = Target.preset("sm_80")
    compile(step_program(), arch="sm_90", target=target)
    assert generate.options["target"] is target


def test_a_target_s_name_is_its_preset(generate: Generate, monkeypatch: pytest.MonkeyPatch) -> None:
    compile(step_program(), device="reference", target="sm_90a")
    assert generate.options["target"] == Target.preset("sm_90a")
    older = dataclasses.replace(H200, compute_capability=(8, 0))
    monkeypatch.setattr(driver, "device_facts", lambda index: older)
    monkeypatch.setattr(driver, "require_driver", lambda: None)
    with pytest.raises(OptionError, match="target='sm_90a' does not run on device 0"):
        compile(step_program(), device="cuda:0", target="sm_90a")


def test_a_target_with_instructions_of_its_own_needs_its_architecture(generate: Generate) -> None:
    compile(step_program(), arch="sm_90a", target="sm_90a")
    with pytest.raises(OptionError, match="target='sm_90a' has instructions of sm_90a alone, which arch='sm_90' lacks"):
        compile(step_program(), arch="sm_90", target="sm_90a")


def test_refused_architectures(generate: Generate) -> None:
    with pytest.raises(CompileError, match="arch must look like"):
        compile(step_program(), arch="compute_90")
    with pytest.raises(OptionError, match="older than sm_80"):
        compile(step_program(), arch="sm_75")
    with pytest.raises(CompileError, match="supports sm_75"):
        _ = compile(step_program(), arch="sm_999").cubin
    with pytest.raises(CompileError, match="has no cubin: compile with arch="):
        _ = compile(step_program(), device="reference").cubin


def test_architecture_on_a_host_device(generate: Generate) -> None:
    kernel = compile(step_program(), device="emulator", arch="sm_90")
    assert generate.options["target"].name == "sm_90"
    assert kernel.cubin.startswith(b"\x7fELF")
    assert isinstance(kernel, HostKernel)


@pytest.mark.parametrize(
    ("arch", "target", "want"),
    [
        (None, None, "sm_90a"),
        ("sm_90a", None, "sm_90a"),
        ("sm_90", None, "sm_90"),
        (None, "sm_90a", "sm_90a"),
        (None, "sm_90", "sm_90a"),
        (None, "sm_80", "sm_90a"),
        (None, "portable", "sm_90a"),
        ("sm_80", None, None),
        ("sm_100", None, None),
        ("sm_90a", "sm_80", "sm_90a"),
    ],
)
def test_architecture_on_a_device(arch: str | None, target: str | None, want: str | None) -> None:
    preset = None if target is None else Target.preset(target)
    if want is None:
        with pytest.raises(OptionError, match="does not run on device 0"):
            compiler._arch_on_device(H200, arch, preset)
    else:
        assert compiler._arch_on_device(H200, arch, preset) == want


def test_kernels_print_without_a_driver(generate: Generate) -> None:
    kernel = compile(step_program(), arch="sm_90")
    assert repr(kernel) == (
        "Kernel(arch='sm_90', 5 inputs, 0 operations, 2 outputs, 1 grid barriers, 256 threads per block, "
        "256 bytes of workspace)"
    )
    assert "device='reference'" in repr(compile(step_program(), device="reference"))
    assert (kernel.schedule, kernel.plan, kernel.stats.max_work_blocks) == ("the schedule", "the plan", 16)


def test_stages_have_names() -> None:
    stats = step_stub()
    assert describe_stage(stats, 0) == "stage 0 (update)"
    assert describe_stage(stats, 3) == "stage 3"


def test_importing_the_compiler_loads_no_cuda_module() -> None:
    code = (
        "import sys, trainkernel.compiler\n"
        "print(sorted({name.split('.')[0] for name in sys.modules} & {'cuda', 'torch', 'jax', 'cupy'}))"
    )
    result = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stdout.strip() == "[]", result.stderr
