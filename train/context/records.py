"""The lines that travel from a worker to the controller, and lie in the journal meanwhile.

Two kinds, told apart by their first key:

``{"i": 7, "t": 1790000000.25, "m": {...}}``, then, when a checkpoint is attached, a tab and
``{"dir": ..., "files": [[path, size_bytes, crc32], ...]}``, ``{"pending": true}`` or ``{"failed": why}``
    report 7 of this rank. The part before the tab is exactly the line that the history keeps.
    ``"pending"`` beside ``"files"``: they are durable, and only checksums are missing.
``{"p": 7, ...}``
    the upload that was pending with report 7 has ended.
"""

from __future__ import annotations

import json
from typing import Any

import attrs

from ..storage.manifest import FileEntry
from ..storage.store import UploadedPart

__all__ = ["Part", "Record", "encode_part", "encode_report", "encode_upload_end", "parse_record"]


@attrs.frozen
class Part:
    """What one rank attached to one report: files in storage, or the lack of them.

    Attributes:
        uploaded: Files that are durable; while pending, some of them without a checksum.
        is_pending: The end of the upload follows in a record of its own.
        failure: Why there are no files.
    """

    uploaded: UploadedPart | None = None
    is_pending: bool = False
    failure: str | None = None


@attrs.frozen
class Record:
    """One parsed line.

    Attributes:
        report_index: Number of the report in the run, from 0.
        line: The history line, or None for the end of an upload.
        part: The files attached, or None.
    """

    report_index: int
    line: bytes | None
    part: Part | None


def encode_report(report_index: int, time_s: float, metrics_json: str, part: Part | None = None) -> bytes:
    """A report as one line."""
    line = f'{{"i":{report_index},"t":{time_s:.6f},"m":{metrics_json}}}'
    return (line if part is None else f"{line}\t{encode_part(part)}").encode("ascii")


def encode_upload_end(report_index: int, part: Part) -> bytes:
    """The end of a pending upload as one line."""
    return f'{{"p":{report_index}}}\t{encode_part(part)}'.encode("ascii")


def encode_part(part: Part) -> str:
    """A part as JSON text."""
    if part.uploaded is not None:
        files = [[entry.path, entry.size_bytes, entry.crc32] for entry in part.uploaded.files]
        content: dict[str, Any] = {"dir": part.uploaded.dir_name, "files": files}
        if part.is_pending:
            content["pending"] = True
    elif part.is_pending:
        content = {"pending": True}
    else:
        content = {"failed": part.failure or "unknown"}
    return json.dumps(content, separators=(",", ":"))


def parse_record(record: bytes) -> Record:
    """The record that a line holds; only what stands behind the tab is decoded in full.

    The index is read from the front of the line, so that a metrics-only report costs a
    few hundred nanoseconds here, whatever its metrics.
    """
    line, tab, part_text = record.partition(b"\t")
    report_index = int(line[5 : line.index(b"," if line[2:3] == b"i" else b"}", 5)])
    part = _decode_part(part_text) if tab else None
    return Record(report_index, line if line[2:3] == b"i" else None, part)


def _decode_part(text: bytes) -> Part:
    content = json.loads(text)
    if "dir" in content:
        files = tuple(FileEntry(path=path, size_bytes=size, crc32=crc32) for path, size, crc32 in content["files"])
        uploaded = UploadedPart(dir_name=content["dir"], files=files)
        return Part(uploaded=uploaded, is_pending=content.get("pending", False))
    if content.get("pending"):
        return Part(is_pending=True)
    return Part(failure=content["failed"])
