"""Real storage servers on loopback, as child processes of the tests.

Each server comes with a second, plain client that knows nothing of fsspec: what it sees is
what is stored, and what it changes happens behind the library's back.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import attrs
from waiting import wait_until

BUCKET = "bucket"
_REPOSITORY = Path(__file__).resolve().parent.parent
_AZURITE = _REPOSITORY / "build/servers/node_modules/.bin/azurite-blob"
# The published key of every Azure storage emulator; there is no other account.
_AZURE_ACCOUNT = "devstoreaccount1"
AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


class Raw(Protocol):
    """A plain client. Keys are relative to the bucket, or to the folder that is served."""

    def read(self, key: str) -> bytes: ...

    def write(self, key: str, data: bytes) -> None: ...

    def remove(self, key: str) -> None: ...

    def keys(self, prefix: str) -> list[str]:
        """Every file whose key begins with ``prefix``, sorted."""


@attrs.frozen
class Server:
    """A running server and how to reach it."""

    protocol: str
    base: str
    """URI or path that all storage paths begin with."""
    options: dict[str, Any] = attrs.field(repr=False)
    """What fsspec needs."""
    raw: Raw = attrs.field(repr=False)
    secrets: tuple[str, ...] = attrs.field(default=(), repr=False)
    """Texts that must appear nowhere."""
    wrong_options: dict[str, Any] = attrs.field(factory=dict, repr=False)
    """Well-formed options that the server refuses; empty where it looks at none."""
    refuse_strangers: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    """While it is open, credentials are looked at."""
    missing: str = ""
    """URI in a bucket that is not there."""


# Child processes.


def _descendants(pid: int) -> set[tuple[int, str]]:
    """The process and all below it, each with its start time, which makes the number unique."""
    parents: dict[int, tuple[int, str]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
                if fields[0] != b"Z":
                    parents[int(name)] = (int(fields[1]), fields[19].decode())
    found, size = {pid}, 0
    while len(found) != size:
        size = len(found)
        found |= {child for child, (parent, _) in parents.items() if parent in found}
    return {(child, parents[child][1]) for child in found if child in parents}


def _living(processes: set[tuple[int, str]]) -> set[tuple[int, str]]:
    return {process for process in processes if process in _descendants(process[0])}


@contextlib.contextmanager
def child(
    command: Sequence[str], ready: str, *, environment: Mapping[str, str] | None = None, timeout_s: float = 60.0
) -> Iterator[re.Match[str] | None]:
    """Run a server until the end of the ``with`` block, and make sure that nothing of it is left.

    Yields the match of ``ready`` in the server's output; None when it ended before that.
    """
    # The kernel stops the server even when the tests themselves are killed.
    guard = [setpriv, "--pdeathsig", "TERM"] if (setpriv := shutil.which("setpriv")) else []
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [*guard, *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )

        def seen() -> re.Match[str] | None:
            output.seek(0)
            return re.search(ready, output.read())

        family: set[tuple[int, str]] = set()
        try:
            wait_until(lambda: seen() or process.poll() is not None, f"{command[0]} is ready", timeout_s)
            found = seen()
            yield found
            if found is not None and process.poll() is not None:
                output.seek(0)
                raise AssertionError(f"{command[0]} ended by itself: {output.read()[-2000:]}")
        finally:
            family = _descendants(process.pid)
            process.terminate()
            # sshd leaves each connection to a process of its own, which lives as long as its client.
            for pid, _ in family:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)
            left = set()
            try:
                wait_until(lambda: not _living(family), "the server's processes end", 10)
            except AssertionError:
                left = _living(family)
                for pid, _ in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
        assert not left, f"{command[0]} left processes behind: {left}"


@contextlib.contextmanager
def child_on_free_port(command: Callable[[int], Sequence[str]], ready: str) -> Iterator[int]:
    """As ``child``, for servers that cannot take port 0: another port is tried when one was taken meanwhile."""
    for _ in range(10):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        with child(command(port), ready) as found:
            if found is not None:
                yield port
                return
    raise AssertionError(f"no server could be started (run `make servers`): {' '.join(command(0))}")


# S3.


class _RawS3:
    def __init__(self, endpoint: str) -> None:
        import boto3

        self._client = boto3.client(
            "s3",
            endpoint_url=endpoint,
            aws_access_key_id="raw",
            aws_secret_access_key="raw",
            region_name="us-east-1",
        )
        self._client.create_bucket(Bucket=BUCKET)

    def read(self, key: str) -> bytes:
        return self._client.get_object(Bucket=BUCKET, Key=key)["Body"].read()

    def write(self, key: str, data: bytes) -> None:
        self._client.put_object(Bucket=BUCKET, Key=key, Body=data)

    def remove(self, key: str) -> None:
        self._client.delete_object(Bucket=BUCKET, Key=key)

    def keys(self, prefix: str) -> list[str]:
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        return sorted(item["Key"] for page in pages for item in page.get("Contents", ()))

    def num_parts(self, key: str) -> int:
        """Parts that the object was sent in; 1 for a plain PUT."""
        return int(self._client.head_object(Bucket=BUCKET, Key=key)["ETag"].strip('"').partition("-")[2] or 1)

    def open_uploads(self) -> list[str]:
        return [item["Key"] for item in self._client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", ())]


@contextlib.contextmanager
def s3() -> Iterator[Server]:
    """moto's server."""
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    with child(command, r"Running on (http://127\.0\.0\.1:\d+)") as found:
        assert found is not None, "the S3 test server does not start: run `make servers`"
        endpoint = found.group(1)

        @contextlib.contextmanager
        def refuse_strangers() -> Iterator[None]:
            _request("POST", f"{endpoint}/moto-api/reset-auth", b"0")
            try:
                yield
            finally:
                _request("POST", f"{endpoint}/moto-api/reset-auth", b"inf")

        secret = "s3-secret-0b8f1"
        options = {"key": "s3-key-77d1", "secret": secret, "endpoint_url": endpoint}
        yield Server(
            "s3",
            f"s3://{BUCKET}",
            {**options, "client_kwargs": {"region_name": "us-east-1"}},
            _RawS3(endpoint),
            secrets=(secret,),
            wrong_options={**options, "client_kwargs": {"region_name": "us-east-1"}},
            refuse_strangers=refuse_strangers,
            missing="s3://nobucket/x",
        )


# Azure.


class _RawAzure:
    def __init__(self, connection_string: str) -> None:
        from azure.storage.blob import BlobServiceClient

        self._container = BlobServiceClient.from_connection_string(connection_string).create_container(BUCKET)

    def read(self, key: str) -> bytes:
        return self._container.download_blob(key).readall()

    def write(self, key: str, data: bytes) -> None:
        self._container.upload_blob(key, data, overwrite=True)

    def remove(self, key: str) -> None:
        self._container.delete_blob(key)

    def keys(self, prefix: str) -> list[str]:
        return sorted(self._container.list_blob_names(name_starts_with=prefix))

    def close(self) -> None:
        self._container.close()


@contextlib.contextmanager
def azure() -> Iterator[Server]:
    """azurite, which `make servers` installs."""
    assert _AZURITE.exists(), f"the Azure test server is missing at {_AZURITE}: run `make servers` (needs Node.js)"
    command = [str(_AZURITE), "--blobPort", "0", "--inMemoryPersistence", "--skipApiVersionCheck", "--silent"]
    with child(command, r"successfully listens on (http://127\.0\.0\.1:\d+)") as found:
        assert found is not None, "azurite does not start"
        endpoint = f"{found.group(1)}/{_AZURE_ACCOUNT}"

        def connection(key: str) -> str:
            return (
                f"DefaultEndpointsProtocol=http;AccountName={_AZURE_ACCOUNT};AccountKey={key};BlobEndpoint={endpoint};"
            )

        raw = _RawAzure(connection(AZURE_KEY))
        yield Server(
            "abfs",
            f"abfs://{BUCKET}",
            {"account_name": _AZURE_ACCOUNT, "connection_string": connection(AZURE_KEY)},
            raw,
            secrets=(AZURE_KEY,),
            wrong_options={
                "account_name": _AZURE_ACCOUNT,
                "connection_string": connection("d3JvbmcgYWNjb3VudCBrZXk="),
            },
            missing="abfs://nobucket/x",
        )
        raw.close()


# Google.


def _request(method: str, url: str, data: bytes | None = None) -> bytes:
    request = urllib.request.Request(url, data, {"Content-Type": "application/octet-stream"}, method=method)
    with urllib.request.urlopen(request, timeout=30) as response:
        return response.read()


class _RawGoogle:
    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint

    def _object(self, key: str) -> str:
        return f"{self._endpoint}/storage/v1/b/{BUCKET}/o/{urllib.parse.quote(key, safe='')}"

    def read(self, key: str) -> bytes:
        return _request("GET", f"{self._object(key)}?alt=media")

    def write(self, key: str, data: bytes) -> None:
        name = urllib.parse.quote(key, safe="")
        _request("POST", f"{self._endpoint}/upload/storage/v1/b/{BUCKET}/o?uploadType=media&name={name}", data)

    def remove(self, key: str) -> None:
        _request("DELETE", self._object(key))

    def keys(self, prefix: str) -> list[str]:
        import json

        query = urllib.parse.urlencode({"prefix": prefix, "maxResults": 10_000})
        found = json.loads(_request("GET", f"{self._endpoint}/storage/v1/b/{BUCKET}/o?{query}"))
        assert "nextPageToken" not in found
        return sorted(item["name"] for item in found.get("items", ()))


@contextlib.contextmanager
def google() -> Iterator[Server]:
    """gcp-storage-emulator. It looks at no credentials, and writes with a precondition overwrite all the same."""
    # Read when gcsfs is imported. With it, gcsfs asks over gRPC what kind of bucket this is, which the emulator
    # does not speak, and waits a minute for the answer.
    os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"

    def command(port: int) -> list[str]:
        where = ["--host", "127.0.0.1", "--port", str(port)]
        return [sys.executable, "-m", "gcp_storage_emulator", "start", "-M", *where, "--default-bucket", BUCKET]

    try:
        with child_on_free_port(command, r"All services started") as port:
            endpoint = f"http://127.0.0.1:{port}"
            raw = _RawGoogle(endpoint)
            # "Started" comes from another thread than the one that listens.
            wait_until(lambda: _answers(lambda: raw.keys("")), "the GCS emulator answers")
            yield Server(
                "gs", f"gs://{BUCKET}", {"endpoint_url": endpoint, "token": "anon"}, raw, missing="gs://nobucket/x"
            )
    finally:
        del os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"]


def _answers(call: Callable[[], object]) -> bool:
    try:
        call()
    except (urllib.error.URLError, ConnectionError):
        return False
    return True


# SSH.


class RawFolder:
    """Plain files of this machine."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, key: str) -> Path:
        return self._folder / key

    def read(self, key: str) -> bytes:
        return (self._folder / key).read_bytes()

    def write(self, key: str, data: bytes) -> None:
        path = self._folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def remove(self, key: str) -> None:
        (self._folder / key).unlink()

    def keys(self, prefix: str) -> list[str]:
        names = (path.relative_to(self._folder).as_posix() for path in self._folder.rglob("*") if path.is_file())
        return sorted(name for name in names if name.startswith(prefix))


_SSHD_CONFIG = """
ListenAddress 127.0.0.1
HostKey {folder}/host
AuthorizedKeysFile {folder}/authorized
PidFile none
StrictModes no
UsePAM no
UseDNS no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
Subsystem sftp internal-sftp
"""


@attrs.frozen
class SshServer:
    """A running sshd that lets this user in."""

    port: int
    folder: Path
    """Where tests may write; everything else of the machine is served too."""
    key: str
    wrong_key: str


@contextlib.contextmanager
def sshd() -> Iterator[SshServer]:
    """OpenSSH's server, for this user alone, with keys of its own."""
    program = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
    assert program is not None, "the SSH test server is missing: run `make servers`, or install openssh-server"
    with tempfile.TemporaryDirectory(prefix="ray_lite_sshd_") as name:
        folder = Path(name)
        for key in ("host", "user", "stranger"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)], check=True)
        shutil.copy(folder / "user.pub", folder / "authorized")
        (folder / "config").write_text(_SSHD_CONFIG.format(folder=folder))
        if os.getuid() == 0:
            # Where sshd locks its unprivileged half in; Debian's service makes it too.
            os.makedirs("/run/sshd", mode=0o755, exist_ok=True)

        def command(port: int) -> list[str]:
            return [program, "-D", "-e", "-f", str(folder / "config"), "-p", str(port)]

        data = folder / "data"
        data.mkdir()
        with child_on_free_port(command, r"Server listening on 127\.0\.0\.1") as port:
            yield SshServer(port, data, str(folder / "user"), str(folder / "stranger"))


@contextlib.contextmanager
def sftp(server: SshServer) -> Iterator[Server]:
    """``sftp://`` by fsspec's own driver (paramiko), also where sshfs has taken the protocol over."""
    import fsspec
    from fsspec.implementations.sftp import SFTPFileSystem

    before = fsspec.get_filesystem_class("sftp")
    fsspec.register_implementation("sftp", SFTPFileSystem, clobber=True)
    options = {"port": server.port, "username": getpass.getuser(), "look_for_keys": False, "allow_agent": False}
    try:
        yield Server(
            "sftp",
            f"sftp://127.0.0.1{server.folder}",
            {**options, "key_filename": server.key},
            RawFolder(server.folder),
            secrets=(server.key,),
            wrong_options={**options, "key_filename": server.wrong_key},
        )
    finally:
        for filesystem in SFTPFileSystem._cache.values():
            filesystem.client.close()
        SFTPFileSystem.clear_instance_cache()
        fsspec.register_implementation("sftp", before, clobber=True)


@contextlib.contextmanager
def sshfs(server: SshServer) -> Iterator[Server]:
    """``ssh://`` by sshfs (asyncssh)."""
    from sshfs import SSHFileSystem

    options = {"port": server.port, "username": getpass.getuser(), "agent_path": None}
    try:
        yield Server(
            "ssh",
            f"ssh://127.0.0.1{server.folder}",
            {**options, "client_keys": [server.key]},
            RawFolder(server.folder),
            secrets=(server.key,),
            wrong_options={**options, "client_keys": [server.wrong_key]},
        )
    finally:
        # An instance closes its connection when it is collected.
        SSHFileSystem.clear_instance_cache()
