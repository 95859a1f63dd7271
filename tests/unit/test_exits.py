"""How processes ended, in words; with real processes, ended in real ways."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys

import pytest

from ray_lite.train.execution import exits
from ray_lite.train.execution.exits import Exits, count_oom_kills, death_detail, describe_exit, read_crash

PRELUDE = """
import ctypes, faulthandler, os, signal, sys
from ray_lite.train.execution.exits import CrashFile

def crashes_here():
    {how}

crash = CrashFile(sys.argv[1])
sys.stdout.write("ready\\n")
sys.stdout.flush()
sys.stdin.readline()
crashes_here()
"""

ENDS = {
    "ctypes.string_at(0)": "killed by SIGSEGV (segmentation fault)",
    "os.abort()": "killed by SIGABRT (aborted)",
    "os.kill(os.getpid(), signal.SIGBUS)": "killed by SIGBUS (bus error)",
    "os.kill(os.getpid(), signal.SIGILL)": "killed by SIGILL (illegal instruction)",
    "os.kill(os.getpid(), signal.SIGHUP)": "killed by SIGHUP (hangup)",
    "os.kill(os.getpid(), signal.SIGKILL)": "killed by SIGKILL, by somebody or by a memory limit",
    "os._exit(7)": "ended itself with exit code 7",
    "os._exit(0)": "ended itself with exit code 0",
}
CRASHES = [how for how in ENDS if "SIGHUP" not in how and "SIGKILL" not in how and "_exit" not in how]


def run(how, folder):
    process = subprocess.Popen(
        [sys.executable, "-c", PRELUDE.format(how=how), str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout.readline() == "ready\n"
        watch = Exits([process.pid])
        process.stdin.write("\n")
        process.stdin.flush()
        process.wait()
    try:
        return process, watch.status(process.pid)
    finally:
        watch.close()


@pytest.mark.parametrize("how", ENDS)
def test_the_kernel_tells_how_a_process_ended(how, tmp_path):
    process, status = run(how, tmp_path)
    if status is None:
        # A kernel that does not tell: the crashes are known from what the process has written.
        assert not how.startswith("os._exit")
        pytest.skip("this kernel does not tell how another's child has ended (Linux 6.15)")
    assert os.waitstatus_to_exitcode(status) == process.returncode
    assert ENDS[how] in describe_exit(status, "")


@pytest.mark.parametrize("how", CRASHES)
def test_a_crash_leaves_the_signal_and_the_line(how, tmp_path):
    run(how, tmp_path)
    crash = read_crash(str(tmp_path))
    assert "in crashes_here" in crash
    assert describe_exit(None, crash) == ENDS[how]


@pytest.mark.parametrize("how", [how for how in ENDS if how not in CRASHES])
def test_who_does_not_crash_leaves_nothing(how, tmp_path):
    run(how, tmp_path)
    assert read_crash(str(tmp_path)) == ""
    assert describe_exit(None, "") == ""


def test_without_a_file_there_was_no_crash(tmp_path):
    assert read_crash(str(tmp_path / "none")) == ""


def test_the_crash_of_a_forked_child_is_not_taken_for_ours(tmp_path):
    how = (
        "pid = os.fork()\n"
        "    if pid == 0:\n"
        "        os.abort()\n"
        "    assert os.waitpid(pid, 0)[1]\n"
        "    os.kill(os.getpid(), signal.SIGKILL)"
    )
    run(how, tmp_path)
    assert read_crash(str(tmp_path)) == ""


@pytest.mark.parametrize("was_enabled", [False, True])
def test_closing_puts_the_handler_back(tmp_path, was_enabled):
    before = faulthandler.is_enabled()
    # pytest's own stays out of it: it writes to a file of its own.
    code = (
        "import faulthandler, sys\n"
        "from ray_lite.train.execution.exits import CrashFile\n"
        f"{'faulthandler.enable()' if was_enabled else ''}\n"
        "crash = CrashFile(sys.argv[1])\n"
        "assert faulthandler.is_enabled()\n"
        "crash.close()\n"
        f"assert faulthandler.is_enabled() is {was_enabled}\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    assert faulthandler.is_enabled() is before


def test_a_process_that_is_gone_already_is_not_waited_for():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    watch = Exits([process.pid])
    assert watch.status(process.pid) is None
    watch.close()


def test_a_living_process_has_no_status():
    watch = Exits([os.getpid()])
    assert watch.status(os.getpid()) is None
    watch.close()


def test_want_of_memory_is_named_where_the_kernel_counted_one(monkeypatch):
    watch = Exits([])
    assert not watch.was_out_of_memory()
    counted = count_oom_kills()
    monkeypatch.setattr(exits, "count_oom_kills", lambda: counted + 1)
    assert watch.was_out_of_memory()
    assert "run out of memory" in describe_exit(int(signal.SIGKILL), "", was_out_of_memory=True)
    assert "out of memory" in describe_exit(None, "", was_out_of_memory=True)


RAY_TEXT = """The actor died unexpectedly before finishing this task.
\tclass_name: Worker
\tactor_id: a9911ad6a7d26387a99ef42c01000000
\tpid: 21617
\tnamespace: 03a4d9e4
\tip: 10.0.0.2
The actor is dead because its worker process has died. Worker exit type: {kind} Worker exit detail: {detail}"""


def test_what_ray_only_guesses_is_left_out():
    text = RAY_TEXT.format(
        kind="SYSTEM_ERROR",
        detail="Worker unexpectedly exits with a connection error code 2. End of file. Some common causes include: "
        "(1) the process was killed by the OOM killer due to high memory usage, (2) ray stop --force was called",
    )
    unknown = death_detail(text)
    assert unknown.startswith("it went away without a word")
    assert death_detail(text, "killed by SIGSEGV") == "killed by SIGSEGV"
    # Explained later, when more is known.
    assert death_detail(unknown, "killed by SIGSEGV") == "killed by SIGSEGV"


def test_what_ray_knows_is_kept():
    text = RAY_TEXT.format(kind="NODE_OUT_OF_MEMORY", detail="Task was killed due to the node running low on memory.")
    assert death_detail(text) == "Task was killed due to the node running low on memory."
    assert death_detail(text, "killed by SIGKILL").startswith("killed by SIGKILL; Task was killed")
    assert death_detail("") == death_detail(RAY_TEXT.format(kind="", detail=""))


def test_the_file_of_another_owner_stays_when_an_older_one_is_closed(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    code = (
        "import os, sys\n"
        "from ray_lite.train.execution.exits import CrashFile\n"
        "old, new = CrashFile(sys.argv[1]), CrashFile(sys.argv[2])\n"
        "old.close()\n"
        "os.abort()\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "a"), str(tmp_path / "b")], check=False)
    assert read_crash(str(tmp_path / "a")) == ""
    assert "Aborted" in read_crash(str(tmp_path / "b"))
