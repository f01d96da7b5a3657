"""Options and marks shared by all tests."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

# The products of the tests are small, and BLAS threads that wait for each other make them slow on
# a busy machine. Read when NumPy is first imported; processes that the tests start inherit it.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import pytest
from hypothesis import settings

from trainkernel.errors import DeviceError

settings.register_profile("default", deadline=None, derandomize=True)
settings.load_profile("default")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--require-gpu", action="store_true", help="fail instead of skip where a test needs a GPU")
    parser.addoption("--update-golden", action="store_true", help="rewrite the golden files from what is generated now")
    parser.addoption(
        "--skipped-to",
        metavar="FILE",
        type=Path,
        help="name here the tests that were skipped for another reason than a missing GPU: `pytest @FILE` runs them",
    )
    parser.addoption(
        "--require-packages",
        action="store_true",
        help="fail instead of skip where a test needs a package that is not installed",
    )


def gpu_problem() -> str | None:
    """Why this machine cannot run a kernel, or None if it can."""
    from trainkernel.runtime import driver

    try:
        driver.require_driver()
    except DeviceError as error:
        return str(error)
    return None


NO_GPU = "no GPU: "


class SkippedTests:
    """Writes down the modules and tests that were skipped for another reason than ``NO_GPU``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.names: set[str] = set()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self.names.add(report.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and NO_GPU not in str(report.longrepr):
            self.names.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        self.path.write_text("".join(f"{name}\n" for name in sorted(self.names)))


def pytest_configure(config: pytest.Config) -> None:
    # Compiled cubins of a test run stay out of the user's cache unless told otherwise.
    os.environ.setdefault("TRAINKERNEL_CACHE_DIR", str(config.rootpath / ".pytest_cache" / "trainkernel"))
    path = config.getoption("--skipped-to")
    if path is not None and not hasattr(config, "workerinput"):  # the reports of xdist's workers come to one process
        config.pluginmanager.register(SkippedTests(path))
    if config.getoption("--require-packages"):
        # Modules call it while they are collected, tests while they run: here both get an error instead.
        pytest.importorskip = lambda name, *_, **__: importlib.import_module(name)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu") is not None]
    if not marked or config.getoption("--require-gpu"):
        return
    problem = gpu_problem()
    if problem is not None:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=f"{NO_GPU}{problem}"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None and item.config.getoption("--require-gpu"):
        problem = gpu_problem()
        if problem is not None:
            pytest.fail(f"--require-gpu was given and there is no GPU: {problem}", pytrace=False)


@pytest.fixture
def update_golden(pytestconfig: pytest.Config) -> bool:
    """Whether golden files are to be rewritten."""
    return bool(pytestconfig.getoption("--update-golden"))
