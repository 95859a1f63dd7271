"""How many threads torch gets: what is reserved, unless the user said otherwise."""

from __future__ import annotations

import pytest

from ray_lite.train.torch.threads import choose_num_threads


@pytest.mark.parametrize(
    ("num_cpus", "current", "at_start", "threads"),
    [
        (2.0, None, None, 2),
        (1.0, None, None, 1),
        # Ray's own choice: 1 for a worker without CPUs, else what is reserved.
        (2.0, "1", None, 2),
        (2.0, "2", None, 2),
        (0.0, "1", None, 1),
        (0.5, None, None, 1),
        (2.9, None, None, 2),
        # The user's: the process was started with it, or Ray would not have chosen it.
        (2.0, "3", "3", 3),
        (2.0, "1", "1", 1),
        (2.0, "3", None, 3),
        (2.0, "4,2", "4,2", 4),
        (2.0, "0", "0", 1),
        # Left to torch.
        (2.0, "many", "many", None),
    ],
)
def test_threads(num_cpus, current, at_start, threads):
    """Case 72."""
    assert choose_num_threads(num_cpus, current, at_start) == threads
