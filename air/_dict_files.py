"""A dict as two files: JSON for its structure, and the bytes of what JSON has no word for.

Values that JSON knows stand as they are, all others as an object with one key that names their kind::

    {"dict": [[key, value], ...]}   {"tuple": [value, ...]}
    {"bytes": [offset, size]}       {"numpy": [offset, size]}    {"numpy_scalar": [offset, size]}
    {"torch": [offset, size, dtype, shape]}

Offsets point into the second file. numpy's arrays are in its own ``.npy`` format, opened with
``allow_pickle=False``; nothing is ever unpickled.
"""

from __future__ import annotations

import io
import json
import math
import os
import sys
from collections.abc import Callable
from typing import IO, Any

from ray_lite.train.errors import CheckpointDamagedError, ConfigError, LegacyAPIError

__all__ = ["DICT_NAME", "OLD_DICT_NAME", "read_dict", "write_dict"]

DICT_NAME = "dict_checkpoint.json"
_BYTES_NAME = "dict_checkpoint.bin"
OLD_DICT_NAME = "dict_checkpoint.pkl"
"""What Ray AIR wrote: a pickle."""
_FORMAT = "ray_lite.air.dict/1"


def write_dict(data: dict[Any, Any], folder: str) -> None:
    """Write ``data`` into an existing folder.

    Raises:
        LegacyAPIError: It holds a value that cannot be stored without a pickle.
        ConfigError: It contains itself, or is nested hundreds of levels deep.
    """
    with open(os.path.join(folder, _BYTES_NAME), "wb") as blob:
        try:
            text = json.dumps({"format": _FORMAT, "data": _Writer(blob).encode(data, "data")})
        except RecursionError:
            raise ConfigError("Checkpoint.from_dict(data): the dict contains itself, or is nested too deeply") from None
    with open(os.path.join(folder, DICT_NAME), "w", encoding="utf-8") as file:
        file.write(text)


def read_dict(folder: str) -> dict[Any, Any]:
    """The dict that ``write_dict`` wrote.

    Raises:
        CheckpointDamagedError: The files are not as they were written.
    """
    try:
        with open(os.path.join(folder, DICT_NAME), encoding="utf-8") as file:
            content = json.load(file)
        if not isinstance(content, dict) or content.get("format") != _FORMAT:
            raise ValueError(f"{DICT_NAME} is not in the format {_FORMAT}")
        with open(os.path.join(folder, _BYTES_NAME), "rb") as blob:
            data = _Reader(blob).decode(content["data"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointDamagedError(f"the dict in {folder!r} cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointDamagedError(f"the dict in {folder!r} cannot be read: it is a {type(data).__name__}")
    return data


class _Writer:
    def __init__(self, blob: IO[bytes]) -> None:
        self._blob = blob

    def encode(self, value: Any, place: str) -> Any:
        kind = type(value)
        # Exactly these: an enum is an int too, and would come back as something else.
        if value is None or kind in (bool, int, float, str):
            return value
        if kind is list:
            return [self.encode(item, f"{place}[{index}]") for index, item in enumerate(value)]
        if kind is tuple:
            return {"tuple": [self.encode(item, f"{place}[{index}]") for index, item in enumerate(value)]}
        if isinstance(value, dict):
            return {
                "dict": [
                    [self.encode(key, f"a key of {place}"), self.encode(item, f"{place}[{key!r}]")]
                    for key, item in value.items()
                ]
            }
        if kind is bytes:
            return {"bytes": self._append(lambda: self._blob.write(value))}
        # Only modules that are loaded can have made the value, so neither is imported for this.
        numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
        if numpy is not None and (kind is numpy.ndarray or isinstance(value, numpy.generic)):
            return self._encode_numpy(numpy, value, place)
        if torch is not None and kind is torch.Tensor:
            return self._encode_torch(torch, value, place)
        raise _cannot_store(place, f"a {kind.__module__}.{kind.__qualname__}")

    def _encode_numpy(self, numpy: Any, value: Any, place: str) -> Any:
        array = numpy.asarray(value)
        if array.dtype.hasobject:
            raise _cannot_store(place, "a numpy array of Python objects")
        entry = self._append(lambda: numpy.save(self._blob, array, allow_pickle=False))
        return {"numpy" if type(value) is numpy.ndarray else "numpy_scalar": entry}

    def _encode_torch(self, torch: Any, value: Any, place: str) -> Any:
        if value.layout != torch.strided or value.is_quantized or value.device.type == "meta":
            raise _cannot_store(place, "a torch tensor that is sparse, quantized or on the meta device")
        plain = value.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
        entry = self._append(lambda: self._blob.write(plain.view(torch.uint8).numpy().data))
        return {"torch": [*entry, str(value.dtype).removeprefix("torch."), list(value.shape)]}

    def _append(self, write: Callable[[], object]) -> list[int]:
        begin = self._blob.tell()
        write()
        return [begin, self._blob.tell() - begin]


class _Reader:
    def __init__(self, blob: IO[bytes]) -> None:
        self._blob = blob

    def decode(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self.decode(item) for item in value]
        if not isinstance(value, dict):
            return value
        ((kind, content),) = value.items()
        if kind == "dict":
            return {self.decode(key): self.decode(item) for key, item in content}
        if kind == "tuple":
            return tuple(self.decode(item) for item in content)
        if kind == "bytes":
            return self._read(*content)
        if kind in ("numpy", "numpy_scalar"):
            import numpy

            array = numpy.load(io.BytesIO(self._read(*content)), allow_pickle=False)
            return array if kind == "numpy" else array[()]
        if kind == "torch":
            return self._read_torch(*content)
        raise ValueError(f"unknown kind of value {kind!r}")

    def _read_torch(self, offset: int, size: int, dtype_name: str, shape: list[int]) -> Any:
        import torch

        dtype = getattr(torch, dtype_name, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"torch has no dtype {dtype_name!r} here")
        if math.prod(shape) * torch.empty(0, dtype=dtype).element_size() != size:
            raise ValueError(f"{size} bytes are not a tensor of shape {shape} and dtype {dtype_name}")
        if size == 0:
            return torch.empty(shape, dtype=dtype)
        # A bytearray, because torch wants memory that it may write to.
        return torch.frombuffer(bytearray(self._read(offset, size)), dtype=dtype).reshape(shape)

    def _read(self, offset: int, size: int) -> bytes:
        self._blob.seek(offset)
        data = self._blob.read(size)
        if len(data) != size:
            raise ValueError(f"{_BYTES_NAME} ends at byte {offset + len(data)}, before {offset + size}")
        return data


def _cannot_store(place: str, what: str) -> LegacyAPIError:
    return LegacyAPIError(
        f"Checkpoint.from_dict(data): {place} is {what}, which only a pickle could store, and pickles are not "
        "supported by ray_lite, since opening one runs whatever code it holds. Instead: save it into a folder in a "
        "format of your choice and use Checkpoint.from_directory(folder). A dict may hold None, bool, int, float, "
        "str, bytes, lists, tuples, dicts, numpy arrays and torch tensors"
    )
