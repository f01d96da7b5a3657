"""Golden files of four small programs: program, schedule, plan and source, byte for byte.

``pytest --update-golden`` rewrites them; read the difference before it is committed.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness import check
from samples import SAMPLES

from trainkernel.codegen import generate

GOLDEN = Path(__file__).parent / "golden"


def _texts(name: str) -> dict[str, str]:
    sample = SAMPLES[name]()
    generated = generate(sample.program, **sample.options)
    parts = {
        "program": str(sample.program),
        "schedule": str(generated.schedule),
        "plan": str(generated.plan),
        "statistics": str(generated),
    }
    text = "".join(f"== {title}\n{part}\n\n" for title, part in parts.items())
    return {f"{name}.txt": text, f"{name}.cu": generated.source}


@pytest.mark.parametrize("name", list(SAMPLES))
def test_golden(name: str, update_golden: bool) -> None:
    for file, text in _texts(name).items():
        path = GOLDEN / file
        if update_golden:
            assert not os.environ.get("CI"), "golden files are rewritten by people, not by CI"
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.exists(), f"{path} is missing; run pytest --update-golden"
        assert path.read_text(encoding="utf-8") == text, (
            f"{file} has changed; see git diff after pytest --update-golden"
        )


@pytest.mark.parametrize("name", list(SAMPLES))
def test_samples_are_right(name: str) -> None:
    sample = SAMPLES[name]()
    check(sample.program, sample.inputs(), num_blocks=4, **sample.options)


SCRIPT = """
import hashlib, sys
sys.path.insert(0, {tests!r})
from samples import SAMPLES
from trainkernel.codegen import generate
digest = hashlib.sha256()
for make in SAMPLES.values():
    sample = make()
    generated = generate(sample.program, **sample.options)
    digest.update((generated.source + str(generated.schedule) + str(generated.plan) + str(generated)).encode())
print(digest.hexdigest())
"""


def test_the_same_bytes_under_every_hash_seed() -> None:
    tests = Path(__file__).parent
    digest = hashlib.sha256()
    for make in SAMPLES.values():
        sample = make()
        generated = generate(sample.program, **sample.options)
        digest.update((generated.source + str(generated.schedule) + str(generated.plan) + str(generated)).encode())
    found = set()
    for seed in ("0", "1", "4242"):
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(tests.parent)}
        command = [sys.executable, "-c", SCRIPT.format(tests=str(tests))]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        found.add(done.stdout.strip())
    assert found == {digest.hexdigest()}
