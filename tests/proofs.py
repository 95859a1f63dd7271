"""Tests that `make test` leaves out: the long forms of proofs, and those that need what it does not install.

Imported by the ``conftest.py`` of the folders that have such tests.
"""

from __future__ import annotations

import pytest

__all__ = ["pytest_collection_modifyitems", "pytest_configure"]

LEFT_OUT = {
    "proof": "the long form of a proof; runs only with `-m proof`",
    "ray_data": "needs Ray Data, with which each process of Ray imports pyarrow; runs only with `-m ray_data`",
}


def pytest_configure(config: pytest.Config) -> None:
    for name, why in LEFT_OUT.items():
        config.addinivalue_line("markers", f"{name}: {why}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = config.option.markexpr or ""
    names = [name for name in LEFT_OUT if name not in wanted]
    left_out = [item for item in items if any(item.get_closest_marker(name) for name in names)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
