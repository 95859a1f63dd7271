"""When a storage operation is worth repeating, and how long to wait in between."""

from __future__ import annotations

import errno
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import attrs

__all__ = ["RetryPolicy", "is_missing", "is_transient"]

T = TypeVar("T")

# What the operating system says when trying again cannot help. ENOSPC is here: the user must
# hear about a full disk at once, and can catch the error and report again later.
_PERMANENT_ERRNOS = frozenset(
    {
        errno.EACCES,
        errno.EPERM,
        errno.EROFS,
        errno.ENOENT,
        errno.ENOTDIR,
        errno.EISDIR,
        errno.EEXIST,
        errno.ENOTEMPTY,
        errno.ENAMETOOLONG,
        errno.EINVAL,
        errno.ELOOP,
        errno.EXDEV,
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EFBIG,
    }
)
_PERMANENT_TYPES = (
    PermissionError,
    FileNotFoundError,
    NotADirectoryError,
    IsADirectoryError,
    FileExistsError,
    ImportError,
    NotImplementedError,
    TypeError,
    ValueError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    Warning,
)
# Names, not classes: none of these packages need be installed.
_PERMANENT_NAMES = frozenset(
    {
        "NoCredentialsError",
        "PartialCredentialsError",
        "CredentialRetrievalError",
        "ProfileNotFound",
        "ParamValidationError",
        "AuthenticationException",
        "BadAuthenticationType",
        "PermissionDenied",
        "ClientAuthenticationError",
        "DefaultCredentialsError",
        "BadHostKeyException",
        "HostKeyNotVerifiable",
    }
)
_PERMANENT_CODES = frozenset(
    {
        "AccessDenied",
        "AllAccessDisabled",
        "InvalidAccessKeyId",
        "SignatureDoesNotMatch",
        "NoSuchBucket",
        "NoSuchKey",
        "InvalidBucketName",
        "ContainerNotFound",
        "AuthenticationFailed",
        "ExpiredToken",
    }
)
_MISSING_CODES = frozenset({"NoSuchBucket", "ContainerNotFound"})
_TRANSIENT_STATUS = frozenset({408, 409, 421, 423, 425, 429})


def is_transient(error: BaseException) -> bool:
    """Whether the same operation may succeed a moment later.

    Looks at the whole chain of causes: object stores wrap the telling error (an HTTP status,
    an S3 error code) into others. What is not known is taken for transient where it is an error
    of input or output, since a few tries more cost seconds and a lost checkpoint costs hours.
    """
    for link in _chain(error):
        code = _error_code(link)
        if code in _PERMANENT_CODES or type(link).__name__ in _PERMANENT_NAMES:
            return False
        status = _http_status(link)
        if status is not None:
            return status >= 500 or status in _TRANSIENT_STATUS
        if isinstance(link, (TimeoutError, ConnectionError, EOFError)):
            return True
        if isinstance(link, _PERMANENT_TYPES):
            return False
        if isinstance(link, OSError) and link.errno is not None:
            return link.errno not in _PERMANENT_ERRNOS
    return isinstance(error, Exception)


def is_missing(error: BaseException) -> bool:
    """Whether the storage says that the folder, bucket or container is not there."""
    return any(
        isinstance(link, (FileNotFoundError, NotADirectoryError)) or _error_code(link) in _MISSING_CODES
        for link in _chain(error)
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _error_code(error: BaseException) -> str | None:
    response = getattr(error, "response", None)  # botocore
    if isinstance(response, dict):
        code = response.get("Error", {}).get("Code")
        if isinstance(code, str):
            return code
    code = getattr(error, "error_code", None)  # azure
    return code if isinstance(code, str) else None


def _http_status(error: BaseException) -> int | None:
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        if _is_error_status(status):
            return int(status)
    for name in ("status", "status_code", "code"):
        value = getattr(error, name, None)
        if _is_error_status(value):
            return int(value)  # type: ignore[arg-type]  # checked by _is_error_status
    return None


def _is_error_status(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 400 <= value < 600


@attrs.frozen(kw_only=True)
class RetryPolicy:
    """How often and how patiently a storage operation is repeated.

    The waits grow twofold from ``base_s`` up to ``cap_s``, each shortened by a random part
    (AWS Architecture Blog, "Exponential Backoff and Jitter"), so that many ranks do not come
    back at the same moment. The defaults outlast about half a minute of outage.
    """

    max_attempts: int = 12
    """Tries in total, >= 1."""
    base_s: float = 0.1
    cap_s: float = 8.0
    deadline_s: float | None = 120.0
    """Seconds that one try of a small operation may take before it counts as failed; None waits for ever."""
    min_bytes_per_s: float = 1 << 18
    """A transfer may take ``deadline_s`` plus the time its bytes take at this rate."""
    sleep: Callable[[float], None] = time.sleep
    random: Callable[[], float] = random.random

    def once(self) -> RetryPolicy:
        """The same policy without repetition."""
        return attrs.evolve(self, max_attempts=1)

    def wait_s(self, attempt: int) -> float:
        """Seconds to wait after the failed try number ``attempt`` (1-based)."""
        longest = min(self.cap_s, self.base_s * 2.0 ** min(attempt - 1, 30))
        return longest * (0.5 + 0.5 * self.random())

    def call(self, operation: Callable[[], T], *, what: str, size_bytes: int = 0, with_deadline: bool = True) -> T:
        """Run ``operation`` until it succeeds, fails for good, or the tries are used up.

        Args:
            operation: May run several times, so running it twice must do no harm.
            what: Named in the timeout: ``"write s3://bucket/x"``.
            size_bytes: How much it transfers.
            with_deadline: False runs it in this thread, without a limit of time.

        Raises:
            TimeoutError: The last try did not return in time.
            Exception: What the last try raised.
        """
        for attempt in range(1, self.max_attempts + 1):
            try:
                if self.deadline_s is None or not with_deadline:
                    return operation()
                return _run_within(operation, self.deadline_s + size_bytes / self.min_bytes_per_s, what)
            except Exception as error:
                if attempt == self.max_attempts or not is_transient(error):
                    raise
                self.sleep(self.wait_s(attempt))
        raise AssertionError("max_attempts must be >= 1")


def _run_within(operation: Callable[[], T], limit_s: float, what: str) -> T:
    """Run ``operation`` in a thread that is given up after ``limit_s``.

    A blocked network call cannot be interrupted from outside, so its thread is left to
    itself. It is a daemon: it never keeps the process from ending.
    """
    outcome: list[Any] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(operation())
        except BaseException as error:  # noqa: BLE001  # carried to the caller, which raises it
            failure.append(error)

    thread = threading.Thread(target=run, name="ray_lite-storage", daemon=True)
    thread.start()
    thread.join(limit_s)
    if failure:
        raise failure[0]
    if not outcome:
        raise TimeoutError(f"no answer within {limit_s:.0f} s: {what}")
    value: T = outcome[0]
    return value
