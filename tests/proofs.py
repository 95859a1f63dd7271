"""The long form of the proofs: counted runs that ``make test`` need not repeat each time.

Imported by the ``conftest.py`` of the folders that have such tests.
"""

from __future__ import annotations

import pytest

__all__ = ["pytest_collection_modifyitems", "pytest_configure"]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "proof: the long form of a proof; runs only with `-m proof`")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "proof" in (config.option.markexpr or ""):
        return
    long_ones = [item for item in items if item.get_closest_marker("proof")]
    if long_ones:
        config.hook.pytest_deselected(items=long_ones)
        items[:] = [item for item in items if not item.get_closest_marker("proof")]
