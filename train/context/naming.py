"""An exception in one line, for the messages that quote it."""

from __future__ import annotations

__all__ = ["named"]


def named(error: BaseException) -> str:
    """``Type: text``; the type alone where there is no text, or where the exception fails to say it."""
    try:
        text = str(error)
    # That of user code may have a broken __str__; what it has ended must be told all the same.
    except Exception:  # noqa: BLE001
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
