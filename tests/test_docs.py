"""The documentation: its Python blocks run, its table of operations is current, its links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from trainkernel.ops import OPS, table

ROOT = Path(__file__).parent.parent
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")))
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
BLOCKS = [
    (page, number, text) for page in PAGES for number, text in enumerate(BLOCK.findall((ROOT / page).read_text()))
]


PRINTED = {
    ("README.md", 0): r"loss 1\.\S+ to 0\.0.*\nloss \S+ to 0\.00",
    ("README.md", 1): r"loss \S+e-\d\d, w \[",
    ("README.md", 2): r"\d+ grid barriers, \d+ lines of CUDA C\+\+\n\d+ bytes",
}


@pytest.mark.parametrize(("page", "number", "text"), BLOCKS, ids=[f"{page}:{number}" for page, number, _ in BLOCKS])
def test_each_python_block_runs_by_itself(page: str, number: int, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINKERNEL_DEVICE", "reference")
    done = subprocess.run([sys.executable, "-W", "error", "-c", text], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.search(PRINTED.get((page, number), ""), done.stdout), done.stdout


def test_the_table_of_operations_is_current() -> None:
    assert (ROOT / "docs/ops.md").read_text() == table.markdown(), "run python -m trainkernel.ops.table > docs/ops.md"


def test_each_operation_has_a_meaning() -> None:
    assert set(table.MEANINGS) == set(OPS)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files(page: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", (ROOT / page).read_text()):
        if "://" not in target:
            assert (ROOT / page).parent.joinpath(target).exists(), target
