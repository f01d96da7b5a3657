"""Marks of the tests that need a device."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "sanitizer: a subset small enough to run under compute-sanitizer")
