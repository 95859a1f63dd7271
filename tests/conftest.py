"""What every test runs under: warnings are errors (pyproject.toml), and properties that repeat.

Environment read here: ``HYPOTHESIS_PROFILE``, "repeatable" (the default) or "explore".
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import servers
from hypothesis import HealthCheck, settings
from servers import Server, SshServer

# The same examples on every machine and in every run: a red test means that the change under test made it red.
# No deadline: the time of one example says more about the machine than about us.
settings.register_profile("repeatable", derandomize=True, deadline=None, print_blob=True, database=None)
# To look for new failures: HYPOTHESIS_PROFILE=explore make tests. What it finds becomes an @example.
settings.register_profile(
    "explore", max_examples=2_000, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


# Storage servers: each starts when the first test asks for it, and ends with the session.


def _wake_fsspec() -> None:
    """Start the threads in which fsspec's drivers run, so that no test is blamed for them."""
    from fsspec.asyn import get_loop

    loop = get_loop()
    # The loop asks for names in threads of its own, which would come one by one.
    pool = ThreadPoolExecutor(1, thread_name_prefix="fsspec")
    pool.submit(int).result()
    loop.call_soon_threadsafe(loop.set_default_executor, pool)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[Server]:
    _wake_fsspec()
    with servers.s3() as server:
        yield server


@pytest.fixture(scope="session")
def azure_server() -> Iterator[Server]:
    _wake_fsspec()
    with servers.azure() as server:
        yield server


@pytest.fixture(scope="session")
def google_server() -> Iterator[Server]:
    _wake_fsspec()
    with servers.google() as server:
        yield server


@pytest.fixture(scope="session")
def sshd_server() -> Iterator[SshServer]:
    _wake_fsspec()
    with servers.sshd() as server:
        yield server


@pytest.fixture(scope="session")
def sftp_server(sshd_server: SshServer) -> Iterator[Server]:
    with servers.sftp(sshd_server) as server:
        yield server


@pytest.fixture(scope="session")
def sshfs_server(sshd_server: SshServer) -> Iterator[Server]:
    with servers.sshfs(sshd_server) as server:
        yield server
