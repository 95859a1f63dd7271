"""From the GPU ids that Ray assigns to the device numbers that torch uses: pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = ["device_indices", "shared_visible_devices", "visible_devices_variable"]


def visible_devices_variable(env: Mapping[str, str], *, is_rocm: bool) -> str:
    """Name of the variable that says which GPUs this process sees, and in which order.

    On AMD's ROCm that is ``HIP_VISIBLE_DEVICES`` when set, else ``CUDA_VISIBLE_DEVICES``, which
    it also honours, else ``ROCR_VISIBLE_DEVICES``, which filters below the two.
    """
    if not is_rocm:
        return "CUDA_VISIBLE_DEVICES"
    for name in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        if name in env:
            return name
    return "HIP_VISIBLE_DEVICES"


def _entries(visible: str) -> list[str]:
    return [entry.strip() for entry in visible.split(",") if entry.strip()]


def device_indices(assigned: Sequence[str], visible: str | None) -> list[int]:
    """Device numbers of the assigned GPUs: their positions among the visible ones, never the local rank.

    Args:
        assigned: Ids as Ray gives them: numbers, or UUIDs such as ``"GPU-8932f937-…"`` and MIG's.
        visible: The variable's value, or None when it is unset and all GPUs are visible.

    Returns:
        One index per assigned id, in the order of ``assigned``.

    Raises:
        ValueError: An id is not among the visible ones; the text gives both lists.
    """
    if visible is None:
        if all(gpu.isdecimal() for gpu in assigned):
            return [int(gpu) for gpu in assigned]
        raise ValueError(f"the GPUs assigned are {', '.join(assigned)}, but no variable says at which positions")
    entries = _entries(visible)
    indices = [_position(gpu, entries) for gpu in assigned]
    if None not in indices:
        return [index for index in indices if index is not None]
    # The two are written in different ways (numbers here, UUIDs there) but are the same
    # devices when this process sees exactly as many as it was given.
    is_mixed = {gpu.isdecimal() for gpu in assigned} != {entry.isdecimal() for entry in entries}
    if is_mixed and len(entries) == len(assigned):
        return list(range(len(assigned)))
    raise ValueError(f"the GPUs assigned are {', '.join(assigned)}, but the visible ones are {visible or 'none'}")


def _position(gpu: str, entries: Sequence[str]) -> int | None:
    if gpu in entries:
        return entries.index(gpu)
    if gpu.isdecimal():
        return None
    # CUDA takes a UUID cut short, as long as it is unique.
    matches = [index for index, entry in enumerate(entries) if not entry.isdecimal() and gpu.startswith(entry)]
    return matches[0] if len(matches) == 1 else None


def shared_visible_devices(ids_of_ranks: Sequence[Sequence[str]], visible: str | None) -> str | None:
    """The variable's value with which a worker sees the GPUs of all workers on its node.

    Args:
        ids_of_ranks: GPU ids of each rank on the node, in rank order.
        visible: The variable's value now, or None.

    Returns:
        Ids joined by commas: numbers in numerical order ("2" before "10"), others in rank
        order, each once. None where nothing should change: the variable is unset, so all are
        visible already, or it holds more than this worker's own share.
    """
    union = list(dict.fromkeys(gpu for ids in ids_of_ranks for gpu in ids))
    if visible is None or not set(_entries(visible)) <= set(union):
        return None
    if all(gpu.isdecimal() for gpu in union):
        union.sort(key=int)
    return ",".join(union)
