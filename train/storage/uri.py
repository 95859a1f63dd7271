"""Storage paths as text: what a user may write, and its one canonical form.

Nothing here touches a disk, and fsspec is not imported, so that the configs can check a
path when they are built. A canonical path is either an absolute local path or
``protocol://...``; both without a trailing slash and without empty segments.
"""

from __future__ import annotations

import os
import re
from urllib.parse import parse_qsl, unquote

from ..errors import ConfigError, ConfigTypeError

__all__ = [
    "check_name",
    "check_name_below",
    "display_name",
    "is_local",
    "is_uri",
    "join",
    "parent",
    "redact",
    "resolve_storage_path",
    "split_protocol",
]

# A scheme of one letter is a Windows drive, so a protocol has at least two characters.
_URI = re.compile(r"^([A-Za-z][A-Za-z0-9+.\-]+)://(.*)$", re.DOTALL)
_COLLAPSED_URI = re.compile(r"^([A-Za-z][A-Za-z0-9+.\-]+):/([^/].*)$", re.DOTALL)
_DRIVE = re.compile(r"^[A-Za-z]:([\\/]|$)")
_USER_INFO = re.compile(r"^([^/@:]*):([^/@]*)@")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_LOCAL_PROTOCOLS = ("file", "local")
_MAX_NAME_BYTES = 200

# Options of a Ray Train URI (they are Arrow's) and what s3fs calls the same thing.
_QUERY_TO_OPTION = {
    "endpoint_override": "endpoint_url",
    "region": "client_kwargs={'region_name': ...}",
    "access_key": "key",
    "secret_key": "secret",
    "anonymous": "anon",
}


def is_uri(path: str) -> bool:
    """Whether ``path`` begins with a protocol; a drive letter (``C:/a``) is not one."""
    return _URI.match(path) is not None


def split_protocol(path: str) -> tuple[str, str]:
    """Protocol (lower case, ``"file"`` for a local path) and the rest, which keeps a drive letter."""
    match = _URI.match(path)
    if match is None:
        return "file", path
    return match.group(1).lower(), match.group(2)


def is_local(path: str) -> bool:
    """Whether ``path`` lies on a disk that the operating system itself opens."""
    return split_protocol(path)[0] in _LOCAL_PROTOCOLS


def join(base: str, *parts: str) -> str:
    """``base`` and ``parts`` with one ``/`` between each; backslashes of a drive path become ``/``."""
    if _DRIVE.match(base):
        base = base.replace("\\", "/")
    joined = base
    for part in parts:
        stripped = part.strip("/")
        if stripped:
            joined = f"{joined}{stripped}" if joined.endswith("/") else f"{joined}/{stripped}"
    return joined


def parent(path: str) -> str:
    """The folder that holds ``path`` (itself for a root)."""
    protocol, rest = split_protocol(path)
    head = rest.rstrip("/").rpartition("/")[0]
    if is_uri(path):
        return f"{protocol}://{head}"
    return head or "/"


def display_name(path: str) -> str:
    """The last part of ``path``."""
    return path.rstrip("/").rpartition("/")[2]


def redact(uri: str) -> str:
    """``uri`` as it may be shown: a password and the values of a query are replaced by ``***``."""
    match = _URI.match(uri)
    if match is None:
        return uri
    protocol, rest = match.groups()
    rest = _USER_INFO.sub(r"\1:***@", rest)
    base, question_mark, query = rest.partition("?")
    if question_mark:
        base += "?" + re.sub(r"=[^&#]*", "=***", query)
    return f"{protocol}://{base}"


def check_name(kind: str, name: str) -> str:
    """Return ``name`` if it can be one folder below the storage path.

    Args:
        kind: What is named, for the message: ``"RunConfig.name"``.
        name: The name; at most 200 bytes in UTF-8, so that suffixes fit into the 255 of most filesystems.

    Raises:
        ConfigTypeError: It is not a string.
        ConfigError: It is empty, too long, begins with a dot, or holds a separator or control character.
    """
    if not isinstance(name, str):
        raise ConfigTypeError(f"{kind} must be a string, got {name!r} ({type(name).__name__})")
    if not name or name.isspace():
        raise ConfigError(f"{kind} must not be empty, got {name!r}")
    if "/" in name or "\\" in name:
        raise ConfigError(f"{kind} must be one folder name without '/' or '\\', got {name!r}")
    if _CONTROL.search(name):
        raise ConfigError(f"{kind} must not hold control characters, got {name!r}")
    if name.startswith("."):
        raise ConfigError(f"{kind} must not begin with a dot, got {name!r}")
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        raise ConfigError(f"{kind} must be valid Unicode, got {name!r}") from None
    if size > _MAX_NAME_BYTES:
        raise ConfigError(f"{kind} must be at most {_MAX_NAME_BYTES} bytes long, got {size}: {name[:40]!r}...")
    return name


def check_name_below(kind: str, name: str, base: str, *, has_filesystem: bool = False) -> str:
    """Return ``name`` if it can be one folder below ``base``, and the path of that folder still means itself.

    In a URI some characters do not: a run called ``run?1`` could be written, and never be opened again.

    Args:
        kind: As in ``check_name``.
        base: Canonical path.
        has_filesystem: As in ``resolve_storage_path``.

    Raises:
        ConfigTypeError, ConfigError: As ``check_name``.
        ConfigError: The name means something else in a URI.
    """
    path = join(base, check_name(kind, name))
    try:
        means_itself = resolve_storage_path(path, has_filesystem=has_filesystem) == path
    except ConfigError:
        means_itself = False
    if not means_itself:
        raise ConfigError(
            f"{kind} must not hold '?', '#' or '::' nor end with a blank where storage_path is a URI "
            f"({redact(base)!r}), got {name!r}"
        )
    return name


def resolve_storage_path(
    value: str | os.PathLike[str], *, has_filesystem: bool = False, what: str = "storage_path"
) -> str:
    """The canonical form of a storage path.

    ``~`` and relative paths are resolved here and now, against this process's folder, so
    that every worker sees the same place. Local paths are taken literally, whatever
    characters they hold. ``file://`` URIs are percent-decoded (RFC 8089, what
    ``pathlib.Path.as_uri`` writes) and become local paths; all other URIs are taken literally.
    ``pathlib.Path("s3://bucket/x")``, which pathlib turns into ``s3:/bucket/x``, is understood.

    Args:
        value: Local path or ``protocol://...``.
        has_filesystem: The user gave a filesystem object, and ``value`` is a path inside
            it: nothing is resolved, only checked.
        what: Names the value in messages.

    Raises:
        ConfigTypeError: ``value`` is neither a string nor a path.
        ConfigError: The path means different things to different filesystems, or would
            put a secret into paths that are shown and logged. The text gives the reason.
    """
    if not isinstance(value, (str, os.PathLike)):
        raise ConfigTypeError(f"{what} must be a string or a path, got {value!r} ({type(value).__name__})")
    text = os.fspath(value)
    if not isinstance(text, str):
        raise ConfigTypeError(f"{what} must be text, got {text!r}; decode it with os.fsdecode() first")
    if not text or text.isspace():
        raise ConfigError(f"{what} must not be empty, got {text!r}; pass None for ~/ray_results")
    if "\x00" in text:
        raise ConfigError(f"{what} must not hold a NUL character")
    if not isinstance(value, str):
        # pathlib collapses the two slashes of a URI.
        text = _COLLAPSED_URI.sub(r"\1://\2", text)
    if has_filesystem:
        return _inside_filesystem(text, what)
    if is_uri(text.strip()):
        return _resolve_uri(text, what)
    if "::" in text and is_uri(text.rpartition("::")[2]):
        raise ConfigError(
            f"{what} must be one URI, got the chain {redact(text)!r}; open it with fsspec yourself "
            "and pass RunConfig(storage_filesystem=...)"
        )
    collapsed = _COLLAPSED_URI.match(text)
    if collapsed:
        raise ConfigError(f"{what} {text!r} lacks a slash; write '{collapsed.group(1)}://{collapsed.group(2)}'")
    return _resolve_local(text, what)


def _resolve_local(text: str, what: str) -> str:
    if os.name != "nt" and _DRIVE.match(text):
        raise ConfigError(f"{what} {text!r} has a drive letter; on this system use a path like /data")
    expanded = os.path.expanduser(text)
    if expanded.startswith("~"):
        raise ConfigError(f"{what} {text!r}: no such user; write './{text}' for a folder of that name")
    path = os.path.abspath(expanded)
    if os.name == "nt":
        return path.replace("\\", "/")
    # POSIX gives a leading '//' a meaning of its own, and abspath keeps it.
    return "/" + path.lstrip("/")


def _resolve_uri(text: str, what: str) -> str:
    shown = redact(text)
    if text != text.strip() or _CONTROL.search(text):
        raise ConfigError(f"{what} {shown!r} has blanks at an end, or control characters; remove them")
    protocol, rest = split_protocol(text)
    if "::" in text:
        raise ConfigError(
            f"{what} must be one URI, got the chain {shown!r}; open it with fsspec yourself "
            "and pass RunConfig(storage_filesystem=...)"
        )
    if "?" in rest:
        raise ConfigError(_refuse_query(rest, shown, what))
    if "#" in rest:
        raise ConfigError(f"{what} {shown!r}: filesystems disagree on what '#' means in a URI; leave it out")
    if _USER_INFO.match(rest):
        raise ConfigError(
            f"{what} {shown!r} holds a password, which would show in logs; leave it out and pass "
            "RunConfig(storage_options={'password': ...})"
        )
    if protocol in _LOCAL_PROTOCOLS:
        return _resolve_file_uri(rest, shown, what)
    rest = rest.rstrip("/")
    if protocol == "memory":
        # fsspec takes memory://a and memory:///a for the same place.
        rest = rest.lstrip("/")
    elif not rest.strip("/"):
        raise ConfigError(f"{what} {shown!r} names no bucket or host; write {protocol}://bucket/folder")
    _check_segments(rest.lstrip("/"), shown, what)
    return f"{protocol}://{rest}"


def _resolve_file_uri(rest: str, shown: str, what: str) -> str:
    host, slash, path = rest.partition("/")
    if host not in ("", "localhost") or not slash:
        raise ConfigError(f"{what} {shown!r} must have three slashes and an absolute path: file:///data/runs")
    decoded = unquote(path)
    if "\x00" in decoded:
        raise ConfigError(f"{what} {shown!r} must not hold a NUL character")
    if os.name == "nt" and _DRIVE.match(decoded):
        return _resolve_local(decoded, what)
    return _resolve_local("/" + decoded, what)


def _inside_filesystem(text: str, what: str) -> str:
    protocol, rest = split_protocol(text)
    stripped = text.rstrip("/") or "/"
    if is_uri(text) and protocol in _LOCAL_PROTOCOLS:
        return _resolve_file_uri(rest, text, what)
    _check_segments((rest if is_uri(text) else stripped).strip("/"), redact(text), what)
    return stripped


def _check_segments(rest: str, shown: str, what: str) -> None:
    for segment in rest.split("/"):
        if segment in (".", ".."):
            raise ConfigError(f"{what} {shown!r} must not hold '.' or '..': object stores take them literally")
        if not segment and rest:
            raise ConfigError(f"{what} {shown!r} has an empty folder name ('//'), which object stores keep")


def _refuse_query(rest: str, shown: str, what: str) -> str:
    names = [name for name, _ in parse_qsl(rest.partition("?")[2], keep_blank_values=True)]
    options = ", ".join(f"{name} -> {_QUERY_TO_OPTION[name]}" for name in names if name in _QUERY_TO_OPTION)
    translated = f" ({options})" if options else ""
    return (
        f"{what} {shown!r}: options after '?' are not part of a path here; pass them as "
        f"RunConfig(storage_options={{...}}){translated}"
    )
