"""Kills the first process that imports it, as a broken driver library might."""

import os

from startup import die_once

die_once(os.environ["DIES_ON_IMPORT"], "import")
