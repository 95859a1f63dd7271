"""Small JSON documents that know whether they are whole.

A document is ``{"checksum":"crc32:89abcdef","body":...}``. The checksum covers the bytes of the
body exactly as they are stored, so nothing has to be parsed or re-encoded to check it, and a
cut, padded or flipped document is found before anything believes it.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any

__all__ = ["EnvelopeError", "open_envelope", "seal"]

_HEAD = b'{"checksum":"crc32:'
_MIDDLE = b'","body":'
_TAIL = b"}\n"
_BODY_START = len(_HEAD) + 8 + len(_MIDDLE)


class EnvelopeError(ValueError):
    """The bytes are not a whole document; the text says in which way."""


def seal(body: Mapping[str, Any]) -> bytes:
    """The stored form of ``body``.

    NaN and the infinities become Python's tokens ``NaN`` and ``Infinity``, so that they come
    back as the same numbers. A value that JSON cannot hold is stored as its ``repr``.
    """
    encoded = json.dumps(body, separators=(",", ":"), default=repr).encode("ascii")
    return b"%b%08x%b%b%b" % (_HEAD, zlib.crc32(encoded), _MIDDLE, encoded, _TAIL)


def open_envelope(data: bytes) -> dict[str, Any]:
    """The body stored in ``data``.

    Raises:
        EnvelopeError: The document is empty, cut short, changed, or something else altogether.
    """
    if not data:
        raise EnvelopeError("it is empty")
    if not data.startswith(_HEAD) or data[_BODY_START - len(_MIDDLE) : _BODY_START] != _MIDDLE:
        raise EnvelopeError("it does not begin as this library writes it")
    if not data.endswith(_TAIL):
        raise EnvelopeError("its end is missing")
    encoded = data[_BODY_START : -len(_TAIL)]
    if b"%08x" % zlib.crc32(encoded) != data[len(_HEAD) : len(_HEAD) + 8]:
        raise EnvelopeError("its checksum does not match")
    try:
        body = json.loads(encoded)
    except ValueError as error:
        raise EnvelopeError(f"it is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise EnvelopeError("it is not a JSON object")
    return body
