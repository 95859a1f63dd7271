"""The example and the README's code, as a user runs them: a fresh interpreter, nothing prepared."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run_script(script: Path, *args: str, home: Path) -> str:
    """Output of a script that must succeed; ``home`` is where it finds ``~``."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | {"HOME": str(home)}
    done = subprocess.run(
        [sys.executable, str(script), *args],
        cwd=home,
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def digits(*args: str, home: Path) -> tuple[str, list[int], float]:
    """The output of the digits example, the epochs it printed, and the accuracy it ended with."""
    out = run_script(ROOT / "examples" / "digits.py", "--name", "digits", *args, home=home)
    epochs = [int(number) for number in re.findall(r"epoch +(\d+)  loss", out)]
    (percent,) = re.findall(r"accuracy  ([\d.]+)% after epoch", out)
    return out, epochs, float(percent)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_digits_learns_to_97_percent_and_resumes_by_name(tmp_path, num_workers):
    options = ("--num-workers", str(num_workers), "--storage-path", str(tmp_path / "runs"))

    out, epochs, accuracy = digits(*options, home=tmp_path)
    assert epochs == list(range(1, 16))
    assert accuracy >= 97.0
    assert str(tmp_path / "runs" / "digits") in out

    # As asked before: nothing is left to do, and the answer is the same.
    assert digits(*options, home=tmp_path)[1:] == ([], accuracy)

    _, epochs, _ = digits(*options, "--epochs", "17", home=tmp_path)
    assert epochs == [16, 17]
    kept = sorted(path.name for path in (tmp_path / "runs" / "digits").glob("checkpoint_*"))
    # Three by accuracy, and the newest where it is none of them.
    assert len(kept) in (3, 4)
    assert kept[-1].startswith("checkpoint_000016")


def test_the_code_in_the_readme_runs_as_it_stands(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    script = tmp_path / "line.py"
    script.write_text(code)
    out = run_script(script, home=tmp_path)
    assert "'loss'" in out
    # The default storage is ~/ray_results, and both ranks' files make up the checkpoint.
    (checkpoint,) = (tmp_path / "ray_results" / "line").glob("checkpoint_*")
    assert {path.name for path in checkpoint.iterdir()} >= {"rank0.pt", "rank1.pt"}
