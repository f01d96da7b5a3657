"""The command line."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from trainkernel import Program, ProgramBuilder, cli
from trainkernel.errors import DeviceError
from trainkernel.mlp import mlp_step
from trainkernel.runtime import driver


@pytest.fixture
def program_file(tmp_path: Path) -> Path:
    path = tmp_path / "program.json"
    path.write_text(mlp_step((6, 5, 3), 4, loss="cross_entropy", optimizer="adam").program.to_json())
    return path


@pytest.fixture
def loop_file(tmp_path: Path) -> Path:
    inner = ProgramBuilder()
    w, x = inner.input("w", (4,)), inner.input("x", (4,))
    body = inner.build([inner.op("sub", w, inner.op("mul", x, 0.1))])
    b = ProgramBuilder()
    start, rows = b.input("start", (4,)), b.input("rows", (7, 4))
    path = tmp_path / "loop.json"
    path.write_text(b.build(b.loop(body, [start, rows], num_carry=1, num_xs=1, length=7)).to_json())
    return path


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line of the error."""
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("trainkernel: ")
    assert captured.err.count("\n") == 1
    assert "Traceback" not in captured.err
    return captured.err


def test_compile_writes_every_stage(program_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "a" / "b"
    arguments = ["compile", str(program_file), "--arch", "sm_80", "-o", str(out), "--inplace", "1:4"]
    assert cli.main([*arguments, "--threads-per-block", "128", "--fuse-epilogues", "off"]) == 0
    names = {path.name for path in out.iterdir()}
    texts = {"program.json", "settings.json", "schedule.txt", "plan.txt", "trainkernel_step.cu"}
    assert names == texts | {"trainkernel_step.cubin"}
    assert (out / "trainkernel_step.cubin").read_bytes()[:4] == b"\x7fELF"
    assert Program.from_json((out / "program.json").read_text()) == Program.from_json(program_file.read_text())
    said = capsys.readouterr().out
    assert "128 threads per block" in said
    assert "registers per thread" in said
    first = (out / "trainkernel_step.cu").read_bytes()
    assert cli.main([*arguments, "--threads-per-block", "128", "--fuse-epilogues", "off"]) == 0
    assert (out / "trainkernel_step.cu").read_bytes() == first


def test_a_written_directory_is_compiled_as_it_was(
    program_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, again, other = (str(tmp_path / name) for name in ("first", "again", "other"))
    options = ["--inplace", "1:4", "--threads-per-block", "128", "--fuse-epilogues", "off"]
    assert cli.main(["compile", str(program_file), "--arch", "sm_80", "-o", first, *options]) == 0
    assert cli.main(["compile", first, "-o", again]) == 0
    for path in Path(first).iterdir():
        assert (Path(again) / path.name).read_bytes() == path.read_bytes(), path.name
    assert cli.main(["compile", again, "-o", other, "--threads-per-block", "512"]) == 0
    assert json.loads((Path(other) / "settings.json").read_text()) == {
        "arch": "sm_80",
        "inplace_outputs": {"1": 4},
        "threads_per_block": 512,
        "fuse_epilogues": False,
    }
    capsys.readouterr()
    assert cli.main(["inspect", first]) == 0
    assert "== schedule for sm_80" in capsys.readouterr().out


def test_the_portable_target_is_kept(program_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, again = str(tmp_path / "first"), str(tmp_path / "again")
    assert cli.main(["compile", str(program_file), "--arch", "portable", "-o", first]) == 0
    assert cli.main(["compile", first, "-o", again]) == 0
    assert (Path(first) / "plan.txt").read_bytes() == (Path(again) / "plan.txt").read_bytes()


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"arch": 3, "inplace_outputs": {}}', '{"arch": "sm_80"}'])
def test_wrong_settings_are_one_line(
    text: str, program_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "settings.json").write_text(text)
    assert "settings.json: not settings with" in fails(capsys, "inspect", str(tmp_path))


def test_inspect_prints_program_stages_and_plan(program_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", str(program_file)]) == 0
    said = capsys.readouterr().out
    for text in (
        "== program",
        "grad_w0",
        "== schedule for sm_90a",
        "== stages",
        "at least us",
        "stage 0 (block): region of label 1, 1 pieces of 1 rows, 9 parts",
        "== memory plan",
        "== counts",
    ):
        assert text in said


def test_inspect_goes_into_loops(loop_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", str(loop_file), "--target", "portable"]) == 0
    assert "7 times" in capsys.readouterr().out


def test_inspect_writes_a_page_and_a_trace(loop_file: Path, tmp_path: Path) -> None:
    page, trace = tmp_path / "stages.html", tmp_path / "stages.json"
    assert cli.main(["inspect", str(loop_file), "--html", str(page), "--trace", str(trace)]) == 0
    assert "estimated, not measured" in page.read_text()
    assert json.loads(trace.read_text())["otherData"]["source"] == "estimated"


def test_measuring_without_a_gpu_is_one_line(
    program_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_driver() -> None:
        raise DeviceError("no CUDA device: it is made up")

    monkeypatch.setattr(driver, "require_driver", no_driver)
    assert "no CUDA device" in fails(capsys, "inspect", str(program_file), "--measure")


def test_a_program_can_come_from_standard_input(
    program_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(program_file.read_bytes())))
    assert cli.main(["inspect", "-"]) == 0
    assert "grad_w0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["inspect", "{folder}/missing.json"], "missing.json: No such file"),
        (["inspect", "{folder}/empty"], "empty/program.json: No such file"),
        (["inspect", "{folder}"], "settings.json: No such file"),
        (["inspect", "{folder}/bad.json"], "bad.json: not the JSON text of a Program"),
        (["inspect", "{folder}/binary.json"], "binary.json: "),
        (["inspect", "{folder}/broken.json"], "unknown op"),
        (["inspect", "{program}", "--target", "sm_70"], "sm_70"),
        (["inspect", "{program}", "--target", "hopper"], "hopper"),
        (["inspect", "{program}", "--inplace", "1"], "--inplace needs OUTPUT_INDEX:INPUT_INDEX"),
        (["inspect", "{program}", "--inplace", "9" * 5000 + ":1"], "--inplace needs OUTPUT_INDEX:INPUT_INDEX"),
        (["inspect", "{program}", "--inplace", "1:4", "--inplace", "1:5"], "names input 4 and input 5 for output 1"),
        (["inspect", "{program}", "--arch", "sm_" + "9" * 5000], "arch must look like"),
        (["compile", "{program}", "-o", ""], "the directory to write to is an empty text"),
        (["inspect", "{program}", "--inplace", "1:0"], "inplace_outputs {1: 0}"),
        (["inspect", "{program}", "--steps", "0"], "--steps must be at least 1"),
        (["inspect", "{program}", "--device", "cuda"], "pass both"),
        (["inspect", "{program}", "--measure", "--device", "emulator"], "--measure runs the kernel on a GPU"),
        (["inspect", "{program}", "--html", "{folder}/none/a.html"], "none/a.html: No such file"),
        (["inspect", "{program}", "--threads-per-block", "100"], "threads_per_block must be one of"),
        (["compile", "{program}", "-o", "{program}"], "File exists"),
        (["compile", "{program}", "-o", "{folder}/out", "--arch", "compute_90"], "compute_90"),
        (["demo", "--steps", "0"], "--steps"),
        (["demo", "--device", "tpu"], "tpu"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], message: str, program_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "broken.json").write_text(program_file.read_text().replace('"op": "exp"', '"op": "frobnicate"'))
    filled = [text.format(folder=tmp_path, program=program_file) for text in arguments]
    assert message in fails(capsys, *filled)


@pytest.mark.parametrize("arguments", [[], ["fly"], ["compile"], ["inspect", "x", "--threads-per-block", "many"]])
def test_usage_errors_have_exit_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_as_a_module_without_traceback(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "trainkernel", "inspect", str(tmp_path / "nothing.json")], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "nothing.json" in done.stderr


@pytest.mark.parametrize(
    ("redirection", "code", "message"),
    [(">&-", 0, ""), ("- <&-", 2, "trainkernel: -: standard input is closed\n"), ("| head -1", 0, "")],
)
def test_closed_streams(redirection: str, code: int, message: str, program_file: Path) -> None:
    program = "" if redirection.startswith("-") else str(program_file)
    command = f"set -o pipefail; {sys.executable} -m trainkernel inspect {program} {redirection}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (code, message)
