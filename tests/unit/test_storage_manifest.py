"""Manifests and the other small documents: whole and as they were written, or refused."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_lite.train.errors import CheckpointConflictError, CheckpointDamagedError, StorageError
from ray_lite.train.storage.envelope import EnvelopeError, open_envelope, seal
from ray_lite.train.storage.manifest import FileEntry, Manifest, UploadedPart, check_relative, merge_parts
from ray_lite.train.storage.run_record import RunRecord

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
_METRICS = st.dictionaries(st.text(max_size=8), _JSON, max_size=4)


def manifest(**changes) -> Manifest:
    values = {
        "report_index": 3,
        "attempt": 2,
        "world_size": 2,
        "created_at": 1.5,
        "metrics": {"loss": 0.1},
        "files": (FileEntry("a/b", 3, "0badcafe"),),
        "dir_name": "checkpoint_000003_attempt_2",
        "ranks": {0: 1},
    }
    return Manifest(**(values | changes))


@given(_METRICS)
def test_metrics_come_back_as_the_same_numbers(metrics):
    read = Manifest.from_bytes(manifest(metrics=metrics).to_bytes())
    assert repr(read.metrics) == repr(metrics)
    assert read == manifest(metrics=read.metrics)


def test_nan_and_infinities_survive():
    read = Manifest.from_bytes(manifest(metrics={"a": math.nan, "b": math.inf, "c": -math.inf, "d": -0.0}).to_bytes())
    assert math.isnan(read.metrics["a"])
    assert (read.metrics["b"], read.metrics["c"], str(read.metrics["d"])) == (math.inf, -math.inf, "-0.0")


@given(st.data())
def test_any_changed_byte_is_found(data):
    whole = manifest().to_bytes()
    position = data.draw(st.integers(0, len(whole) - 1))
    value = data.draw(st.integers(0, 255).filter(lambda value: value != whole[position]))
    changed = whole[:position] + bytes([value]) + whole[position + 1 :]
    with pytest.raises(CheckpointDamagedError, match="the manifest cannot be used"):
        Manifest.from_bytes(changed)


def test_any_truncation_and_any_addition_is_found():
    whole = manifest().to_bytes()
    for length in range(len(whole)):
        with pytest.raises(CheckpointDamagedError):
            Manifest.from_bytes(whole[:length])
    with pytest.raises(CheckpointDamagedError):
        Manifest.from_bytes(whole + b"\x00")


@given(st.binary(max_size=80))
def test_foreign_bytes_are_refused_with_a_reason(data):
    with pytest.raises(EnvelopeError, match="it"):
        open_envelope(data)


@pytest.mark.parametrize(
    "path",
    ["", "/etc/passwd", "../x", "a/../../x", "a//b", "./a", "..", "a/..", "C:\\x", "c:/x", "\\x", "a\\..\\x", "a\0b"],
)
def test_a_manifest_that_names_files_outside_is_refused(path):
    data = seal({**_body(), "files": [[path, 1, "00000000"]]})
    with pytest.raises(CheckpointDamagedError, match="leaves the checkpoint"):
        Manifest.from_bytes(data)


def test_a_manifest_of_a_later_format_says_so():
    with pytest.raises(CheckpointDamagedError, match=r"format is 'ray_lite.checkpoint/9'"):
        Manifest.from_bytes(seal({**_body(), "format": "ray_lite.checkpoint/9"}))


def test_a_manifest_with_fields_of_other_types_is_refused():
    for change in ({"files": 3}, {"files": [[1]]}, {"report_index": "x"}, {"ranks": []}, {"created_at": None}):
        with pytest.raises(CheckpointDamagedError):
            Manifest.from_bytes(seal({**_body(), **change}))


def _body():
    return open_envelope(manifest().to_bytes())


def test_usual_file_names_are_taken():
    for path in ("a", "a/b.pt", "ä b/[c]*?", "..a", "a..", ".hidden", "checkpoint-1"):
        assert check_relative(path) == path


# Merging


def part(**files) -> UploadedPart:
    entries = tuple(FileEntry(name.replace("__", "/"), 1, crc) for name, crc in files.items())
    return UploadedPart("checkpoint_000000", entries)


def test_the_union_over_ranks_keeps_equal_files_once():
    merged = merge_parts({1: part(b="1", same="9"), 0: part(a="0", same="9")})
    assert [entry.path for entry in merged] == ["a", "b", "same"]


def test_different_content_under_one_name_names_ranks_and_file():
    """Case 4, as the issue decides it: refused before anything is committed."""
    with pytest.raises(
        CheckpointConflictError, match=r"ranks 0 and 3 reported different content under the name 'model'"
    ):
        merge_parts({3: part(model="1"), 0: part(model="2"), 1: part(other="3")})


def test_a_file_where_another_rank_has_a_folder_is_refused():
    with pytest.raises(CheckpointConflictError, match=r"rank 1 reported a file 'a'"):
        merge_parts({0: part(a__b="1"), 1: part(a="2")})


def test_different_folders_for_one_report_are_refused():
    with pytest.raises(CheckpointConflictError, match="different folders"):
        merge_parts({0: part(a="1"), 1: UploadedPart("other", ())})


@given(st.dictionaries(st.integers(0, 5), st.dictionaries(st.sampled_from("abc"), st.sampled_from("01")), max_size=4))
def test_merging_takes_all_files_or_refuses(parts):
    values = {}
    for files in parts.values():
        for name, crc in files.items():
            values.setdefault(name, set()).add(crc)
    uploaded = {rank: part(**files) for rank, files in parts.items()}
    if any(len(crcs) > 1 for crcs in values.values()):
        with pytest.raises(CheckpointConflictError):
            merge_parts(uploaded)
    else:
        assert {entry.path: entry.crc32 for entry in merge_parts(uploaded)} == {n: c.pop() for n, c in values.items()}


# The run record


def record(**changes) -> RunRecord:
    values = {
        "name": "run",
        "attempt": 1,
        "state": "running",
        "started_at": 1.0,
        "updated_at": 2.0,
        "world_size": 2,
        "next_report_index": 3,
    }
    return RunRecord(**(values | changes))


@given(_METRICS, st.none() | st.text(max_size=20))
def test_a_record_comes_back_as_it_was(metrics, error):
    read = RunRecord.from_bytes(record(metrics=metrics, error=error).to_bytes())
    assert repr(read) == repr(record(metrics=metrics, error=error))


def test_a_record_is_bounded_whatever_the_run_reports():
    """Case 22."""
    huge = record(
        metrics={"loss": 0.5, "histogram": list(range(500_000))},
        error="first" + "x" * 100_000 + "last",
        config={"lr": 0.1},
    )
    data = huge.to_bytes()
    assert len(data) <= 1 << 20
    read = RunRecord.from_bytes(data)
    assert read.metrics == {"loss": 0.5}
    assert read.error.startswith("first")
    assert read.error.endswith("last")
    assert read.config == {"lr": 0.1}


@pytest.mark.parametrize(
    "data", [b"", b"{", b"{}", b'{"checksum":"crc32:00000000","body":{}}\n', seal({"format": "x"})]
)
def test_a_damaged_record_is_refused(data):
    with pytest.raises(StorageError, match="run record cannot be used"):
        RunRecord.from_bytes(data)


def test_a_record_of_a_newer_version_can_be_read():
    body = open_envelope(record().to_bytes())
    assert RunRecord.from_bytes(seal({**body, "added_later": 1})) == record()
