"""Options that are chosen by measuring: what is tried, what is taken, what is kept."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainkernel import Program, ProgramBuilder, TrainkernelError, compile, compiler, tuning
from trainkernel.codegen import generate
from trainkernel.errors import LaunchError, OptionError
from trainkernel.mlp import mlp_step
from trainkernel.runtime.driver import DeviceFacts
from trainkernel.sample_arrays import sample_inputs
from trainkernel.target import Target
from trainkernel.tuning import Tried, Tuning, alternatives, choose

H200 = DeviceFacts(0, "H200", (9, 0), 132, True, 65536, 232448, 233472, 2048, 13000)


class StubKernel:
    """A kernel that is generated and never run."""

    def __init__(self, program: Program, options: Mapping[str, Any]) -> None:
        self.program, self.options, self.tuning = program, dict(options), None
        self.stats = generate(program, **options)


def _times(table: Mapping[tuple[Any, ...], float]) -> Any:
    def measure(choice: Mapping[str, Any]) -> float:
        time = table[tuple(choice.items())]
        if time < 0:
            raise LaunchError("does not fit")
        return time

    return measure


def _step() -> Program:
    return mlp_step((8, 64, 64, 4), 256, optimizer="sgd").program


def _wide() -> Program:
    b = ProgramBuilder()
    a, w = b.input("a", (512, 512), "bfloat16"), b.input("w", (512, 512), "bfloat16")
    return b.build([b.op("mm", a, w)])


def test_the_fastest_is_taken_and_what_was_faster_alone_is_tried_together() -> None:
    first, second = ("threads_per_block", 256), ("blocks_per_sm", 1)
    third = ("threads_per_block", 512)
    table = {(): 100.0, (first,): 90.0, (second,): 95.0, (third,): -1.0, (first, second): 80.0}
    found = choose(_times(table), [dict([first]), dict([second]), dict([third])], "H200")
    assert found.options == dict([first, second]) and found.device == "H200"
    assert [one.us for one in found.tried] == [100.0, 90.0, 95.0, None, 80.0]
    assert "does not fit" in str(found) and "the cost model's choice: 100.00 us" in str(found)
    assert "taken: {'threads_per_block': 256, 'blocks_per_sm': 1}" in str(found)


def test_the_cost_model_s_choice_stays_unless_another_is_faster_by_more_than_noise() -> None:
    choice = ("blocks_per_sm", 1)
    for time, taken in ((99.0, {}), (101.0, {}), (-1.0, {}), (97.0, dict([choice]))):
        assert choose(_times({(): 100.0, (choice,): time}), [dict([choice])], "H200").options == taken
    with pytest.raises(TrainkernelError, match="could not be measured: does not fit"):
        choose(_times({(): -1.0}), [], "H200")


def test_choices_that_exclude_each_other_are_not_tried_together() -> None:
    one, other = ("region_pieces", 4), ("region_pieces", 16)
    found = choose(_times({(): 10.0, (one,): 8.0, (other,): 7.0}), [dict([one]), dict([other])], "H200")
    assert found.options == dict([other]) and len(found.tried) == 3


def test_what_is_tried() -> None:
    step = StubKernel(_step(), {"target": "sm_90a"})
    (region,) = (split.pieces for split in set(tuning._splits(step.stats.schedule)))
    found = alternatives(step, ())
    assert {"region_pieces": 0} in found and {"region_pieces": 2 * region} in found
    assert {"threads_per_block": 256} in found and {"blocks_per_sm": 2} in found
    assert {"target": "sm_90"} not in found
    assert alternatives(step, ("region_pieces", "threads_per_block", "blocks_per_sm")) == []
    for choice in found:
        generate(_step(), **{"target": "sm_90a", **choice})

    wide = StubKernel(_wide(), {"target": "sm_90a", "gemm_tile_n": 64})
    assert ("tk_wgmma" in wide.stats.source) == ({"target": "sm_90"} in alternatives(wide, ()))
    assert {"target": "sm_90"} not in alternatives(wide, ("target",))


def test_the_choice_is_kept_for_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINKERNEL_CACHE_DIR", str(tmp_path))
    program = _step()
    measured: list[dict[str, Any]] = []

    def launch_us(kernel: StubKernel) -> float:
        measured.append(kernel.options)
        return 1.0 if kernel.options.get("threads_per_block") == 256 else 2.0

    def build(more: Mapping[str, Any]) -> StubKernel:
        return StubKernel(program, {"target": Target.preset("sm_90a"), **more})

    monkeypatch.setattr(tuning, "launch_us", launch_us)
    options = {"target": Target.preset("sm_90a")}
    first = tuning.tune(program, "sm_90a", "H200", options, (), build)
    count = len(measured)
    assert first.options == {"threads_per_block": 256} and count == len(first.tried) > 3
    assert tuning.tune(program, "sm_90a", "H200", options, (), build) == first and len(measured) == count
    assert tuning.tune(program, "sm_90a", "H100", options, (), build).device == "H100" and len(measured) > count
    monkeypatch.setenv("TRAINKERNEL_CACHE", "0")
    count = len(measured)
    assert tuning.tune(program, "sm_90a", "H200", options, (), build) == first and len(measured) > count


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        {"options": {}},
        {"options": {"precision": "tf32"}, "tried": []},
        {"options": {"threads_per_block": "512"}, "tried": []},
        {"options": {"target": "sm_1"}, "tried": []},
        {"options": {}, "tried": [[{}]]},
    ],
)
def test_whatever_is_wrong_with_what_was_kept_it_is_measured_again(data: Any) -> None:
    assert tuning._from_json("H200", data) is None


def test_compile_takes_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    program, built = _step(), []

    def gpu_kernel(program: Program, stats: Any, *_: Any) -> StubKernel:
        built.append(stats.threads_per_block)
        return StubKernel(program, {"target": "sm_90a"})

    def tune(program: Program, arch: str, device: str, options: Any, asked: Any, build: Any) -> Tuning:
        assert (arch, device, asked) == ("sm_90a", "H200", {"region_pieces", "inplace_outputs"})
        return Tuning(device, {"threads_per_block": 128}, (Tried({}, 1.0),))

    monkeypatch.setenv("TRAINKERNEL_CACHE", "0")
    monkeypatch.setattr(compiler, "GpuKernel", gpu_kernel)
    monkeypatch.setattr(compiler.driver, "device_facts", lambda index: H200)
    monkeypatch.setattr(compiler.driver, "require_driver", lambda: None)
    monkeypatch.setattr(tuning, "tune", tune)
    kernel = compile(program, device="cuda:0", tune=True, region_pieces=0, inplace_outputs={})
    assert built == [128] and kernel.tuning.options == {"threads_per_block": 128}
    assert compile(program, device="cuda:0", region_pieces=0).tuning is None and built == [128, 256]


@pytest.mark.parametrize("where", [{"device": "reference"}, {"device": "emulator"}, {"arch": "sm_90a"}])
def test_there_is_nothing_to_measure_without_a_gpu(where: dict[str, str]) -> None:
    with pytest.raises(OptionError, match="tune=True measures kernels on a GPU, and this one is for"):
        compile(_step(), tune=True, **where)


def test_sample_arrays_keep_roots_real() -> None:
    b = ProgramBuilder()
    x, rate, index = b.input("x", (100,)), b.scalar("rate"), b.input("index", (3,), "int32")
    values = sample_inputs(b.build([b.op("mul", x, rate), b.op("take", x, index)]), {}, low=0.0, high=0.1, scalar=1e-3)
    assert values[1] == 1e-3 and 0 <= values[0].min() < values[0].max() <= 0.1 and not np.any(values[2])
