"""Storage paths: one canonical form, or a refusal that gives the reason."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_lite.train.errors import ConfigError, ConfigTypeError
from ray_lite.train.storage.uri import check_name, is_local, is_uri, join, redact, resolve_storage_path, split_protocol


@pytest.mark.parametrize(
    "written",
    ["out", "./out", "out/", pathlib.Path("out"), "a/../out", "out//", "file:///{cwd}/out", "FILE:///{cwd}/out/"],
)
def test_every_spelling_of_a_local_folder_is_one_absolute_path(written, tmp_path, monkeypatch):
    """Case 29: resolved once, against the folder of this process."""
    monkeypatch.chdir(tmp_path)
    if isinstance(written, str):
        written = written.replace("/{cwd}", str(tmp_path))
    assert resolve_storage_path(written) == f"{tmp_path}/out"


def test_home_is_expanded(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert resolve_storage_path("~/out") == "/home/me/out"


@pytest.mark.parametrize(
    ("written", "canonical"),
    [
        ("/tmp/a//b/", "/tmp/a/b"),
        ("//tmp/a", "/tmp/a"),
        ("/tmp/a?b#c[1]* %20é", "/tmp/a?b#c[1]* %20é"),
        ("file:///tmp/a%20b", "/tmp/a b"),
        ("file://localhost/tmp/a", "/tmp/a"),
        ("s3://bucket", "s3://bucket"),
        ("S3://Bucket/a b/%41/[x]*é/", "s3://Bucket/a b/%41/[x]*é"),
        (pathlib.Path("s3://bucket/runs"), "s3://bucket/runs"),
        ("memory://a", "memory://a"),
        ("memory:///a/", "memory://a"),
        ("sftp://me@host/abs/x", "sftp://me@host/abs/x"),
        ("abfs://container@account.dfs.core.windows.net/x", "abfs://container@account.dfs.core.windows.net/x"),
    ],
)
def test_canonical_forms(written, canonical):
    """Case 31 and the issue's list of hard URIs."""
    assert resolve_storage_path(written) == canonical


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        ("", "must not be empty"),
        ("  ", "must not be empty"),
        ("a\x00b", "NUL"),
        ("s3://", "names no bucket"),
        ("s3:/bucket/x", "write 's3://bucket/x'"),
        ("s3://bucket//x", "empty folder name"),
        ("s3://bucket/../x", "must not hold"),
        ("s3://bucket/x#1", "'#'"),
        (" s3://bucket/x", "blanks"),
        ("s3://bucket/x\n", "blanks"),
        ("file://host/x", "three slashes"),
        ("simplecache::s3://bucket/x", "one URI"),
        ("~no_such_user_here/x", "no such user"),
    ],
)
def test_what_cannot_be_kept_exactly_is_refused_with_the_reason(written, reason):
    with pytest.raises(ConfigError, match=reason):
        resolve_storage_path(written)


@pytest.mark.parametrize("written", [None, 3, b"/tmp/x", ["/tmp"]])
def test_other_types_are_refused(written):
    with pytest.raises(ConfigTypeError, match="storage_path must be"):
        resolve_storage_path(written)


def test_a_query_is_refused_and_translated_into_storage_options():
    """Case 32: it is never part of an object's key."""
    with pytest.raises(ConfigError) as caught:
        resolve_storage_path("s3://bucket/pre?endpoint_override=http://127.0.0.1:5000&secret_key=hunter2")
    assert "storage_options" in str(caught.value)
    assert "endpoint_override -> endpoint_url" in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_a_password_is_refused_and_not_shown():
    with pytest.raises(ConfigError) as caught:
        resolve_storage_path("sftp://me:hunter2@host/x")
    assert "hunter2" not in str(caught.value)
    assert "storage_options" in str(caught.value)


@pytest.mark.skipif(os.name == "nt", reason="drives exist there")
def test_a_windows_path_is_no_folder_name_here():
    with pytest.raises(ConfigError, match="drive letter"):
        resolve_storage_path(r"C:\Users\x")


def test_drive_letters_are_no_protocols():
    """Case 33."""
    assert not is_uri(r"C:\a")
    assert not is_uri("c:/a")
    assert is_uri("s3://a")
    assert is_uri("file:///c:/a")
    assert split_protocol("C:/a") == ("file", "C:/a")
    assert join(r"C:\a", "n", "checkpoint_0") == "C:/a/n/checkpoint_0"


def test_join_never_doubles_a_slash():
    assert join("/a/", "/b/", "c") == "/a/b/c"
    assert join("/", "b") == "/b"
    assert join("memory://", "b") == "memory://b"
    assert join("s3://b", "x y", "z") == "s3://b/x y/z"


def test_redact_hides_passwords_and_queries():
    assert redact("sftp://me:pw@host/x") == "sftp://me:***@host/x"
    assert redact("s3://b/x?key=1&secret=2") == "s3://b/x?key=***&secret=***"
    assert redact("/tmp/a?b=c") == "/tmp/a?b=c"


_SEGMENT = st.text(
    st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="/\\?#:@"), min_size=1, max_size=8
).filter(lambda text: text.strip() == text and text not in (".", "..") and not text.startswith("~"))


@given(st.lists(_SEGMENT, min_size=1, max_size=4), st.sampled_from(["/", "s3://", "memory://", "gs://"]))
def test_a_canonical_path_stays_what_it_is(segments, start):
    path = start + "/".join(segments)
    assert resolve_storage_path(path) == path
    assert resolve_storage_path(path + "/") == path
    assert is_local(path) == (start == "/")


@given(st.text(max_size=20))
def test_any_text_is_a_canonical_path_or_a_config_error(text):
    try:
        path = resolve_storage_path(text)
    except ConfigError:
        return
    assert resolve_storage_path(path) == path


@pytest.mark.parametrize("name", ["", " ", ".", "..", ".hidden", "a/b", "a\\b", "a\x00b", "a\nb", "x" * 201, "\udc80"])
def test_names_that_could_leave_the_folder_are_refused(name):
    with pytest.raises(ConfigError, match="run name must"):
        check_name("run name", name)


def test_usual_names_are_taken():
    for name in ("digits", "run 1", "été", "a.b", "x" * 200, "a?b[c]*"):
        assert check_name("run name", name) == name
    with pytest.raises(ConfigTypeError):
        check_name("run name", 3)


def test_the_module_loads_nothing_heavy():
    code = (
        "import sys; import ray_lite.train.storage.uri; "
        "print([name for name in ('fsspec', 'ray', 'torch', 'numpy') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
