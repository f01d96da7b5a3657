"""What one test run skips for want of a package, the next one runs: nothing is skipped in both unnoticed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

FILES = {
    "test_module.py": """
import pytest
pytest.importorskip("absent")
def test_never_seen(): pass
""",
    "test_function.py": """
import pytest
def test_passes(): pass
@pytest.mark.parametrize("name", ["", " a::b [c] ", "é\\n"])
def test_needs_it(name):
    if name: pytest.importorskip("absent")
""",
    "test_device.py": """
import pytest
@pytest.mark.skip(reason="no GPU: none")
def test_device(): pass
""",
}


def run_pytest(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def test_what_was_skipped_is_required_in_the_next_run(tmp_path: Path) -> None:
    shutil.copy(Path(__file__).parent / "conftest.py", tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    first = run_pytest(tmp_path, "-n", "1", "--skipped-to=skipped")
    assert first.returncode == 0, first.stdout + first.stderr
    assert (tmp_path / "skipped").read_text().count("\n") == 3
    second = run_pytest(tmp_path, "--continue-on-collection-errors", "--require-packages", "@skipped")
    assert second.returncode == 1 and "2 failed, 1 error" in second.stdout, second.stdout + second.stderr
    assert second.stdout.count("No module named 'absent'") >= 3, second.stdout
