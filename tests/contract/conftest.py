"""The places and servers of the contract, and proof that no thread is left behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from places import KINDS, SERVERS, Place, make_place
from servers import Server


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    yield make_place(request.param, request, tmp_path)
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.fixture(params=SERVERS)
def server(request: pytest.FixtureRequest) -> Server:
    return request.getfixturevalue(f"{request.param}_server")


@pytest.fixture(autouse=True)
def no_threads_left() -> Iterator[None]:
    """Transfers, retries and histories end with the call or the writer that began them."""
    before = set(threading.enumerate())
    yield
    left = [thread for thread in threading.enumerate() if thread not in before and thread.name.startswith("ray_lite")]
    for thread in left:
        thread.join(10)
    assert not [thread for thread in left if thread.is_alive()]
