"""The cache of compiled Programs: what is found, what its name depends on, and that it hides no error."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from samples import SAMPLES

import trainkernel as tk
from trainkernel import codegen, compiler, program_cache
from trainkernel.errors import OptionError, ProgramError, VerificationError
from trainkernel.facts import LaunchFacts
from trainkernel.ir import Loop, Operation, Program, TensorSpec
from trainkernel.kernel import Kernel
from trainkernel.program_cache import CachedProgram, find_program, program_key
from trainkernel.runtime import build, nvrtc
from trainkernel.runtime.cache import CubinCache, pack_entry
from trainkernel.target import Target

ARCH = "sm_90"


def program(name: str = "x", op: str = "neg", size: int = 8) -> Program:
    b = tk.ProgramBuilder()
    x = b.input(name, (size,))
    return b.build([b.op(op, x)])


class Counter:
    """``compile_cubin`` and ``generate`` that count, the first without NVRTC."""

    def __init__(self) -> None:
        self.compiled = self.generated = 0
        self._generate = codegen.generate

    def compile_cubin(self, source: str, arch: str) -> bytes:
        self.compiled += 1
        return f"{arch} {self.compiled}".encode()

    def generate(self, *args: Any, **options: Any) -> Any:
        self.generated += 1
        return self._generate(*args, **options)


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache."""
    path = tmp_path / "cache"
    monkeypatch.setenv("TRAINKERNEL_CACHE_DIR", str(path))
    monkeypatch.delenv("TRAINKERNEL_CACHE", raising=False)
    monkeypatch.delenv("TRAINKERNEL_DEVICE", raising=False)
    return path


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Counter:
    """An empty cache, and a count of what is done without it."""
    counter = Counter()
    monkeypatch.setattr(nvrtc, "compile_cubin", counter.compile_cubin)
    monkeypatch.setattr("trainkernel.codegen.generate", counter.generate)
    return counter


def build_once(given: Program, **options: Any) -> Kernel:
    kernel = tk.compile(given, arch=ARCH, **options)
    _ = kernel.cubin
    return kernel


def entry_of(given: Program, folder: Path, **options: Any) -> Path:
    """The file of a Program's entry."""
    key = program_key(given, ARCH, {"target": Target.preset(ARCH), **options})
    path = None if key is None else CubinCache(folder).path_of(key)
    assert path is not None
    return path


# ---------------------------------------------------------------------------- what is found


def test_a_hit_runs_no_stage(count: Counter) -> None:
    cubin = build_once(program()).cubin
    assert (count.generated, count.compiled) == (1, 1)
    kernel = tk.compile(program(), arch=ARCH)
    assert kernel.cubin == cubin
    assert "1 operations, 1 outputs, 0 grid barriers, 256 threads per block" in repr(kernel)
    assert (count.generated, count.compiled) == (1, 1)
    assert kernel.source == kernel.stats.source
    assert (count.generated, count.compiled) == (2, 1)


@pytest.mark.parametrize("name", list(SAMPLES))
def test_what_is_generated_later_is_what_was_stored(count: Counter, name: str) -> None:
    sample = SAMPLES[name]()
    first = build_once(sample.program, **sample.options)
    found = tk.compile(sample.program, arch=ARCH, **sample.options)
    assert (count.generated, found.cubin) == (1, first.cubin)
    assert found.stats == first.stats
    assert (found.source, found.schedule, found.plan) == (first.source, first.schedule, first.plan)


def test_a_step_with_scalars_loops_and_donated_arrays_is_found(count: Counter) -> None:
    def train(w: Any, rate: float, steps: int) -> Any:
        return tk.fori_loop(0, steps, lambda _, w: w - rate * w, w)

    step = tk.jit(train, donate_argnums=0).lower(np.ones((4, 4), np.float32), 0.5, 3)
    inplace = dict(step.inplace_outputs)
    first = build_once(step.program, inplace_outputs=inplace)
    found = tk.compile(step.program, arch=ARCH, inplace_outputs=inplace)
    inplace.clear()
    assert found._facts == LaunchFacts.of(first.stats)
    assert found._facts.inplace_outputs == {0: 0}
    assert [scalar.name for scalar in found._facts.scalars] == ["rate", "steps"]
    assert found.stats == first.stats


def test_a_kernel_of_a_host_device_is_found_and_runs(count: Counter) -> None:
    build_once(program())
    for device in ("reference", "emulator"):
        kernel = tk.compile(program(), device=device, arch=ARCH)
        assert kernel.cubin
        assert np.array_equal(kernel(np.ones(8, np.float32))[0], np.full(8, -1, np.float32))
    assert count.compiled == 1


def test_the_time_of_a_launch_is_no_part_of_the_key(count: Counter) -> None:
    def build(**options: Any) -> Any:
        kernel = tk.compile(program(), arch=ARCH, **options)
        assert kernel.cubin
        return kernel

    plain = build()
    assert build(max_launch_ms=None).cubin == plain.cubin
    assert count.generated == 1
    first = build(max_launch_ms=5)
    assert build(max_launch_ms=50.0)._facts == LaunchFacts.of(first.stats) != LaunchFacts.of(plain.stats)
    assert count.generated == 2


def test_facts_survive_json() -> None:
    for make in SAMPLES.values():
        sample = make()
        for parts in (None, True):
            facts = LaunchFacts.of(codegen.generate(sample.program, parts=parts, **sample.options))
            assert LaunchFacts.from_json(json.loads(json.dumps(facts.to_json()))) == facts
            assert bool(facts.segments) == bool(parts)


# ---------------------------------------------------------------------------- the key


def changed_programs() -> dict[str, Program]:
    plain = program()
    (neg,) = plain.operations
    assert isinstance(neg, Operation)
    out = plain.outputs[0]
    b = tk.ProgramBuilder()
    x = b.input("x", (8,))
    raised = [b.build([b.op("pow", x, exponent=exponent)]) for exponent in (2, 2.0)]
    return {
        "as it is": plain,
        "name of an input": program("y"),
        "op": program(op="exp"),
        "size": program(size=9),
        "name of an operation": dataclasses.replace(plain, operations=(dataclasses.replace(neg, name="other"),)),
        "outputs": dataclasses.replace(plain, outputs=(out, out)),
        "view": dataclasses.replace(plain, outputs=(TensorSpec(out.buffer, (4,), (2,), 1),)),
        "attribute of int": raised[0],
        "attribute of float": raised[1],
    }


def test_every_part_of_a_program_is_in_its_key() -> None:
    keys = {name: program_key(changed, ARCH, {}) for name, changed in changed_programs().items()}
    assert None not in keys.values()
    assert len(set(keys.values())) == len(keys)


def test_every_part_of_a_loop_is_in_its_key() -> None:
    body = program("c")
    x, out = TensorSpec.dense("x", (8,)), TensorSpec.dense("out", (8,))
    loop = Loop("loop", body, (x,), (out,), 1, 0, 3)
    changes: list[dict[str, Any]] = [
        {},
        {"name": "other"},
        {"body": program("c", "exp")},
        {"length": 4},
        {"length": "x"},
        {"reverse": True},
        {"num_carry": 0},
        {"num_xs": 1},
    ]
    keys = [program_key(Program((x,), (dataclasses.replace(loop, **c),), (out,)), ARCH, {}) for c in changes]
    assert None not in keys
    assert len(set(keys)) == len(changes)


def test_locations_are_not_in_the_key() -> None:
    (neg,) = program().operations
    moved = dataclasses.replace(program(), operations=(dataclasses.replace(neg, location="elsewhere.py:1"),))
    assert program_key(moved, ARCH, {}) == program_key(program(), ARCH, {})


def test_options_target_and_arch_are_in_the_key() -> None:
    portable = Target.preset("portable")
    given: list[tuple[str, dict[str, Any]]] = [
        (ARCH, {}),
        ("sm_90a", {}),
        (ARCH, {"target": portable}),
        (ARCH, {"target": dataclasses.replace(portable, num_sms=7)}),
        (ARCH, {"max_blocks": 1}),
        (ARCH, {"max_blocks": True}),
        (ARCH, {"blocks_per_sm": 1}),
        (ARCH, {"inplace_outputs": {0: 0}}),
        (ARCH, {"inplace_outputs": {False: 0}}),
        (ARCH, {"inplace_outputs": {0: 1}}),
    ]
    keys = [program_key(program(), arch, options) for arch, options in given]
    assert None not in keys
    assert len(set(keys)) == len(given)
    assert program_key(program(), ARCH, {"max_blocks": None}) == keys[0]


def test_nvrtc_and_the_package_are_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [program_key(program(), ARCH, {})]
    monkeypatch.setattr(build, "nvrtc_identity", lambda: "13.99.1")
    keys.append(program_key(program(), ARCH, {}))
    monkeypatch.setattr(program_cache, "package_digest", lambda: "other")
    keys.append(program_key(program(), ARCH, {}))
    assert len(set(keys)) == 3
    monkeypatch.setattr(program_cache, "package_digest", lambda: None)
    assert program_key(program(), ARCH, {}) is None


class Three(int):
    pass


@pytest.mark.parametrize("size", [np.int64(3), Three(3), 3.0, True])
def test_a_program_with_other_numbers_has_another_key_or_none(size: Any) -> None:
    x = TensorSpec("x", (size,), (1,))
    plain = TensorSpec("x", (3 if size != 1 else 1,), (1,))
    key = program_key(Program((x,), (), (x,)), ARCH, {})
    assert key is None or key != program_key(Program((plain,), (), (plain,)), ARCH, {})


def test_what_is_no_program_has_no_key() -> None:
    plain = program()
    (neg,) = plain.operations
    given: list[Any] = [
        None,
        dataclasses.replace(plain, operations=(5,)),
        dataclasses.replace(plain, inputs=("x",)),
        dataclasses.replace(plain, operations=(dataclasses.replace(neg, inputs=("x",)),)),
        dataclasses.replace(plain, operations=(dataclasses.replace(neg, attrs={"f": print}),)),
    ]
    assert [program_key(wrong, ARCH, {}) for wrong in given] == [None] * len(given)
    assert program_key(plain, ARCH, {"target": object()}) is None


def test_the_digest_is_of_every_module_that_generating_needs() -> None:
    code = (
        "import sys, trainkernel.codegen as c, trainkernel as tk\n"
        "b = tk.ProgramBuilder()\n"
        "c.generate(b.build([b.op('neg', b.input('x', (4,)))]))\n"
        "print(*(m.__file__ for n, m in sys.modules.items() if n.partition('.')[0] == 'trainkernel'), sep='\\n')"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    package = Path(tk.__file__).parent
    # The package itself imports these two; nothing that generates does.
    allowed = {str(package / name) for name in ("__init__.py", "reference.py")}
    assert set(done.stdout.split()) - allowed <= set(program_cache.source_files())
    templates = {str(path) for path in (package / "codegen" / "cuda").iterdir()}
    assert templates <= set(program_cache.source_files())


def test_files_that_are_younger_than_the_process_turn_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    program_cache.package_digest.cache_clear()
    monkeypatch.setattr(tk, "IMPORTED_NS", 1)
    try:
        assert program_cache.package_digest() is None
    finally:
        program_cache.package_digest.cache_clear()
    monkeypatch.undo()
    assert program_cache.package_digest() is not None


# ---------------------------------------------------------------------------- entries that are of no use


def flip(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize("damage", [lambda data: b"", flip, lambda data: data[:-1], lambda data: data + b"x"])
def test_a_damaged_entry_is_a_miss_and_is_replaced(
    count: Counter, folder: Path, damage: Callable[[bytes], bytes]
) -> None:
    build_once(program())
    path = entry_of(program(), folder)
    path.write_bytes(damage(path.read_bytes()))
    kernel = tk.compile(program(), arch=ARCH)
    assert count.generated == 2
    assert kernel.cubin
    assert tk.compile(program(), arch=ARCH).cubin == kernel.cubin
    assert count.generated == 2


@pytest.mark.parametrize(
    "change",
    [
        {"facts": None},
        {"facts": {}},
        {"entry": 5},
        {"max_blocks": "1"},
        {"workspace_bytes": True},
        {"uses_tensor_table": 1},
        {"slots": 1},
        {"slots": [["input", 0, "x"]]},
        {"slots": [["input", "0", "x", 4]]},
        {"scalars": [5]},
        {"tasks": [[]]},
        {"tasks": [["0", "name"]]},
        {"tasks": [[0, 1]]},
        {"inplace_outputs": {"0": 0}},
        {"segments": [[1]]},
        {"segments": [[None, None]]},
        {"segments": [[1, 2]]},
        {"segments": [[1, None, "3"]]},
        {"ticks_offset_bytes": "8"},
        {"one more": 1},
    ],
)
def test_an_entry_with_other_facts_is_a_miss(count: Counter, folder: Path, change: dict[str, Any]) -> None:
    stats = build_once(program()).stats
    path = entry_of(program(), folder)
    facts = {**LaunchFacts.of(stats).to_json(), **change}
    metadata = {"facts": change.get("facts", facts), "source": ""}
    path.write_bytes(pack_entry(path.parent.name + path.stem, b"cubin", metadata))
    assert tk.compile(program(), arch=ARCH).cubin != b"cubin"
    assert count.generated == 2


def test_another_program_s_entry_is_a_miss(count: Counter, folder: Path) -> None:
    build_once(program())
    path = entry_of(program("y"), folder)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    os.rename(entry_of(program(), folder), path)
    tk.compile(program("y"), arch=ARCH)
    assert count.generated == 2


def test_an_entry_that_others_can_write_is_a_miss(count: Counter, folder: Path) -> None:
    build_once(program())
    os.chmod(entry_of(program(), folder), 0o622)
    tk.compile(program(), arch=ARCH)
    assert count.generated == 2


def test_entries_are_private(count: Counter, folder: Path) -> None:
    build_once(program())
    path = entry_of(program(), folder)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_cannot_be_written_costs_only_the_cache(
    count: Counter, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRAINKERNEL_CACHE_DIR", str(tmp_path / "file"))  # also for root, whom modes do not stop
    assert build_once(program()).cubin
    assert build_once(program()).cubin
    assert (count.generated, count.compiled) == (2, 2)


def test_a_cache_that_is_off_is_not_used(count: Counter, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("TRAINKERNEL_CACHE", "0")
    build_once(program())
    build_once(program())
    assert (count.generated, count.compiled) == (2, 2)
    assert not folder.exists()


def test_the_bound_of_the_folder_holds(count: Counter, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("TRAINKERNEL_CACHE_MAX_BYTES", "4000")
    for size in range(1, 9):
        build_once(program(size=size))
    assert sum(path.stat().st_size for path in folder.rglob("*.tkc")) <= 4000
    monkeypatch.setenv("TRAINKERNEL_CACHE_MAX_BYTES", "some")
    with pytest.raises(OptionError, match="must be a number of bytes"):
        tk.compile(program(), arch=ARCH)


def test_a_cubin_of_another_nvrtc_is_not_stored(count: Counter, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(build, "_loaded_version", lambda: "12.1")
    build_once(program())
    assert not entry_of(program(), folder).exists()


def test_another_kernel_than_the_one_found_is_refused(count: Counter, monkeypatch: pytest.MonkeyPatch) -> None:
    build_once(program())
    kernel = tk.compile(program(), arch=ARCH)
    changed = dataclasses.replace(codegen.generate(program(), target=Target.preset(ARCH)), source="other")
    monkeypatch.setattr("trainkernel.codegen.generate", lambda *args, **options: changed)
    with pytest.raises(VerificationError, match="is not the one that is generated now"):
        _ = kernel.source


# ---------------------------------------------------------------------------- errors


def test_no_error_is_hidden(count: Counter) -> None:
    build_once(program())
    with pytest.raises(OptionError, match="unknown option"):
        tk.compile(program(), arch=ARCH, blocks=1)
    with pytest.raises(OptionError, match="max_blocks"):
        tk.compile(program(), arch=ARCH, max_blocks=True)
    with pytest.raises(OptionError, match="inplace_outputs"):
        tk.compile(program(), arch=ARCH, inplace_outputs=[(0, 0)])
    with pytest.raises(OptionError, match="barrier_timeout_ms"):
        tk.compile(program(), arch=ARCH, barrier_timeout_ms=-1)
    with pytest.raises(OptionError, match="target"):
        tk.compile(program(), arch=ARCH, target=5)
    x = TensorSpec("x", (8.0,), (1,))  # type: ignore[arg-type]
    with pytest.raises(ProgramError):
        tk.compile(Program((x,), (), (x,)), arch=ARCH)
    with pytest.raises(ProgramError):
        tk.compile(None, arch=ARCH)  # type: ignore[arg-type]


def test_a_program_that_is_refused_is_refused_again(count: Counter) -> None:
    wrong = dataclasses.replace(program(), outputs=(TensorSpec.dense("missing", (8,)),))
    for _ in range(2):
        with pytest.raises(ProgramError, match="missing"):
            tk.compile(wrong, arch=ARCH)


def test_without_an_architecture_nothing_is_looked_for(count: Counter, folder: Path) -> None:
    tk.compile(program(), device="reference")
    assert not folder.exists()
    found = find_program(program(), None, {}, lambda: None)
    assert found == CachedProgram(found.generate)


def test_a_kernel_looks_for_its_program_once(count: Counter, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(*args: Any) -> CachedProgram:
        calls.append(args)
        return find_program(*args)

    monkeypatch.setattr(compiler, "find_program", counted)
    build_once(program())
    assert len(calls) == 1


# ---------------------------------------------------------------------------- processes

COMPILE = """
import sys
import trainkernel as tk
b = tk.ProgramBuilder()
x = b.input("x", (8,))
kernel = tk.compile(b.build([b.op("neg", x)]), arch="sm_90")
sys.stdout.buffer.write(kernel.cubin)
sys.stdout.flush()
print([name for name in ("trainkernel.codegen", "cuda.bindings.nvrtc") if name in sys.modules], file=sys.stderr)
"""


def compile_in_processes(count: int) -> list[tuple[bytes, str]]:
    started = [
        subprocess.Popen([sys.executable, "-c", COMPILE], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(count)
    ]
    results = [process.communicate(timeout=120) for process in started]
    assert [process.returncode for process in started] == [0] * count, results
    return [(cubin, log.decode()) for cubin, log in results]


def test_processes_race_and_a_later_one_imports_no_compiler(folder: Path) -> None:
    first, second = compile_in_processes(2)
    assert first[0] == second[0]
    assert first[0].startswith(b"\x7fELF")
    assert not list(folder.rglob("tmp-*"))
    ((cubin, log),) = compile_in_processes(1)
    assert cubin == first[0]
    assert log.strip() == "[]"
