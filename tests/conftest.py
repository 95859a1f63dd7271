"""What every test runs under: warnings are errors (pyproject.toml), and properties that repeat.

Environment read here: ``HYPOTHESIS_PROFILE``, "repeatable" (the default) or "explore".
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# The same examples on every machine and in every run: a red test means that the change under test made it red.
# No deadline: the time of one example says more about the machine than about us.
settings.register_profile("repeatable", derandomize=True, deadline=None, print_blob=True, database=None)
# To look for new failures: HYPOTHESIS_PROFILE=explore make tests. What it finds becomes an @example.
settings.register_profile(
    "explore", max_examples=2_000, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))
