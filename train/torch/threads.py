"""How many threads torch may use in a worker: pure."""

from __future__ import annotations

__all__ = ["choose_num_threads"]


def choose_num_threads(num_cpus: float, current: str | None, at_start: str | None) -> int | None:
    """Threads for torch's operators in one worker.

    As many as CPUs are reserved for it, unless the user set ``OMP_NUM_THREADS``. Ray sets that
    variable too when it is unset (to 1 for a worker without CPUs), so a value counts as the
    user's only if the process was started with it, or if Ray would not have chosen it.

    Args:
        num_cpus: CPUs reserved for the worker, >= 0; fractions are cut off, 0 counts as 1.
        current: ``OMP_NUM_THREADS`` now, or None.
        at_start: ``OMP_NUM_THREADS`` when the process started, or None.

    Returns:
        Threads, >= 1; None when the user's value is not a number, which is then left to torch.
    """
    reserved = max(1, int(num_cpus))
    users = at_start if at_start is not None else current
    if users is None or (at_start is None and users in ("1", str(reserved))):
        return reserved
    # OpenMP allows a list, "4,2": one number per level of nesting; torch uses the first.
    first = users.partition(",")[0].strip()
    return max(1, int(first)) if first.isdecimal() else None
