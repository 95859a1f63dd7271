"""What kind of dataset a value is, seen from its behaviour: no library is imported to find out."""

from __future__ import annotations

import enum
import os
import sys
from collections.abc import Mapping
from typing import Any

__all__ = ["Kind", "NotADatasetError", "classify", "count_rows", "is_torch_dataset", "is_torch_tensor"]


class Kind(enum.Enum):
    """How a dataset is taken apart."""

    SPLITS_ITSELF = "splits itself"
    """Has ``streaming_split`` (Ray Data) or ``split(n)``."""
    COLUMNS = "columns"
    """A mapping of names to arrays or lists of equal length."""
    FRAME = "frame"
    """Has ``iloc``: a pandas DataFrame or Series."""
    TABLE = "table"
    """Has ``take`` and ``num_rows``: a pyarrow Table."""
    SELECTABLE = "selectable"
    """Has ``select(rows)`` and ``column_names``: a Hugging Face dataset."""
    ARRAY = "array"
    """Has ``shape`` and ``dtype``: a numpy array, a torch tensor, a scipy sparse matrix."""
    LIST = "list"
    """A list or a tuple."""
    ROWS = "rows"
    """Has ``len()`` and ``[i]``: a torch map-style dataset, a range, anything alike."""
    STREAM = "stream"
    """Can be iterated over again and again, but has no row numbers: a torch ``IterableDataset``."""
    FACTORY = "factory"
    """A function without arguments that makes one of the others."""


class NotADatasetError(Exception):
    """The value cannot serve as a dataset; the text completes the sentence "dataset 'x' ..."."""


def is_torch_tensor(value: object) -> bool:
    """Whether ``value`` is a ``torch.Tensor``; a process without torch has none."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def is_torch_dataset(value: object, class_name: str) -> bool:
    """Whether ``value`` is a ``torch.utils.data.<class_name>``."""
    torch_data = sys.modules.get("torch.utils.data")
    return torch_data is not None and isinstance(value, getattr(torch_data, class_name))


def _has(value: object, *methods: str) -> bool:
    return all(callable(getattr(value, method, None)) for method in methods)


def _has_length(value: object) -> bool:
    # Some classes define __len__ only to say that they have none.
    try:
        len(value)  # type: ignore[arg-type]
    except (TypeError, AttributeError, NotImplementedError):
        return False
    return True


_REFUSED: tuple[tuple[type | tuple[type, ...], str], ...] = (
    ((str, bytes, bytearray), "is text; load the file first, or pass a function without arguments that loads it"),
    (os.PathLike, "is a path; load the file first, or pass a function without arguments that loads it"),
    ((set, frozenset), "is a set, whose order differs between processes; pass sorted(...) or list(...)"),
)


def classify(value: Any) -> Kind:
    """How ``value`` is to be taken apart.

    Raises:
        NotADatasetError: It cannot be, with the reason and what to pass instead.
    """
    if value is None:
        raise NotADatasetError("is None; leave the name out, or pass the data")
    for refused, reason in _REFUSED:
        if isinstance(value, refused):
            raise NotADatasetError(reason)
    # A class has the attributes of its instances, so it must not be asked for them.
    if isinstance(value, type):
        return Kind.FACTORY
    if _has(value, "streaming_split"):
        return Kind.SPLITS_ITSELF
    if isinstance(value, Mapping):
        return Kind.COLUMNS
    if hasattr(value, "iloc"):
        return Kind.FRAME
    if _has(value, "take") and hasattr(value, "num_rows"):
        return Kind.TABLE
    if _has(value, "select") and hasattr(value, "column_names"):
        return Kind.SELECTABLE
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        if len(value.shape) == 0:
            raise NotADatasetError(f"is a single value of type {type(value).__name__}; it must have rows")
        return Kind.ARRAY
    if isinstance(value, (list, tuple)):
        return Kind.LIST
    # Before "rows": torch's base class gives an IterableDataset a __getitem__ that only raises.
    if is_torch_dataset(value, "IterableDataset"):
        return Kind.STREAM
    if _has(value, "__next__"):
        raise NotADatasetError(
            f"is a one-shot iterator ({type(value).__name__}), empty after the first epoch; pass list(...) of it, "
            "or a function without arguments that makes the data"
        )
    if _has(value, "__len__", "__getitem__") and _has_length(value):
        return Kind.ROWS
    if _has(value, "split"):
        return Kind.SPLITS_ITSELF
    if _has(value, "__iter__"):
        return Kind.STREAM
    if callable(value):
        return Kind.FACTORY
    detail = "has rows but no length: give it a __len__" if _has(value, "__getitem__") else "cannot be used as data"
    raise NotADatasetError(
        f"is a {type(value).__name__}, which {detail}; pass a sequence, an array, a dict of equal-length arrays, "
        "a torch dataset, an object with split() or streaming_split(), or a function without arguments that makes one"
    )


def count_rows(value: Any, kind: Kind) -> int | None:
    """Rows in ``value``; None where nobody can know before reading it.

    Raises:
        NotADatasetError: Columns are missing, have no length or differ in length.
    """
    if kind in (Kind.SPLITS_ITSELF, Kind.STREAM, Kind.FACTORY):
        return None
    if kind is Kind.COLUMNS:
        return _count_column_rows(value)
    if kind is Kind.TABLE:
        return int(value.num_rows)
    if kind is Kind.ARRAY:
        return int(value.shape[0])
    return len(value)


def _count_column_rows(columns: Mapping[Any, Any]) -> int:
    if not columns:
        raise NotADatasetError("is an empty dict; it must have at least one column")
    lengths: dict[Any, int] = {}
    for name, column in columns.items():
        try:
            kind = classify(column)
            if kind not in (Kind.ARRAY, Kind.LIST, Kind.FRAME, Kind.ROWS):
                raise NotADatasetError(f"is a {type(column).__name__}, not an array or a list")
            lengths[name] = count_rows(column, kind) or 0
        except NotADatasetError as error:
            raise NotADatasetError(f"is a dict of columns, and column {name!r} {error}") from None
    if len(set(lengths.values())) > 1:
        shown = ", ".join(f"{name!r}: {length}" for name, length in list(lengths.items())[:8])
        raise NotADatasetError(
            f"is a dict of columns of different lengths ({shown}); cut them to one length, "
            "or pass them as datasets of their own"
        )
    return next(iter(lengths.values()))
