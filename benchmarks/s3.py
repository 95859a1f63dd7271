"""200 files of 10 kB in one checkpoint to an S3 server on loopback (moto), one worker: how long ``report()`` takes.

The floor is s3fs alone, putting the same folder. Each upload goes to a place of its own. moto is a single Python
process: it, not the client, sets the pace, so a real service shows a larger difference.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from functools import partial
from typing import Any

from _harness import OURS, PEER, Measure, Side, arguments, compare
from _machine import peer_python
from _processes import Child, scratch

PORT = 5_599
ENDPOINT = f"http://127.0.0.1:{PORT}"


@contextlib.contextmanager
def server() -> Iterator[None]:
    """moto's S3 server, with a bucket in it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(PORT)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        request = urllib.request.Request(f"{ENDPOINT}/bucket", method="PUT")
        deadline = time.monotonic() + 30
        while True:
            try:
                urllib.request.urlopen(request, timeout=5).close()
                break
            except urllib.error.URLError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
        yield
    finally:
        process.terminate()
        process.wait()


def main() -> None:
    options = arguments(__doc__ or "", runs=3, sides=[OURS, "s3fs alone", PEER])
    python = peer_python(options.peer_python) if PEER in options.only else None
    with contextlib.ExitStack() as stack:
        stack.enter_context(server())
        sides: list[Any] = []
        child = stack.enter_context(Child(sys.executable, "ours.py", stack.enter_context(scratch())))
        sides.append(Side(name=OURS, measure=partial(child.ask, "s3", endpoint=ENDPOINT)))
        sides.append(Side(name="s3fs alone", measure=partial(child.ask, "s3_floor", endpoint=ENDPOINT)))
        if python is not None:
            peer = stack.enter_context(Child(python, "peer.py", stack.enter_context(scratch())))
            sides.append(Side(name=PEER, measure=partial(peer.ask, "s3", endpoint=ENDPOINT)))
        compare(
            "s3",
            [side for side in sides if side.name in options.only],
            [Measure(key="upload", text="200 files of 10 kB")],
            runs=options.runs,
            pythons={"ours": sys.executable, **({"peer": python} if python else {})},
            notes=["", *(__doc__ or "").strip().splitlines()],
        )


if __name__ == "__main__":
    main()
