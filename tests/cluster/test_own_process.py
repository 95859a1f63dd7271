"""Runs in processes of their own: Ctrl-C, the embedded cluster, several nodes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import notes
from sessions import processes_of
from waiting import wait_until

from ray_lite import train

HERE = Path(__file__).resolve().parent


def script(tmp_path: Path, body: str) -> Path:
    path = tmp_path / "script.py"
    path.write_text("import os, sys, json, time, signal, threading\nfrom ray_lite import train\n" + body)
    return path


def start(path: Path, *args: str, **env: str) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent)]), **env}
    environment.setdefault("RAY_AUTH_MODE", "disabled")
    return subprocess.Popen(
        [sys.executable, str(path), *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )


def finish(process: subprocess.Popen, timeout_s: float = 120) -> str:
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        raise AssertionError(f"not finished within {timeout_s} s\n{out}\n{err}") from None
    assert process.returncode == 0, f"exit {process.returncode}\n{out}\n{err}"
    return out


@pytest.fixture
def ray_folder() -> Iterator[str]:
    """A place for Ray's files where no other cluster of this machine is found; short, because sockets lie there."""
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield folder


EMBEDDED = """
def fn():
    import torch.distributed as dist
    train.report({"initialized": dist.is_initialized(), "size": dist.get_world_size()})
    return os.getpid()

if __name__ == "__main__":
    from ray_lite.train import RunConfig, ScalingConfig
    trainer = train.torch.TorchTrainer(
        fn, scaling_config=ScalingConfig(num_workers=int(sys.argv[2])), run_config=RunConfig(storage_path=sys.argv[1])
    )
    result = trainer.fit()
    import ray
    print(json.dumps({"metrics": result.metrics, "cpus": ray.cluster_resources()["CPU"], "pid": result.return_value}))
"""


def test_without_ray_running_fit_starts_a_cluster_with_the_cpus_asked_for_and_ends_it_with_the_process(
    tmp_path, ray_folder
):
    num_workers = (os.cpu_count() or 1) + 1
    process = start(script(tmp_path, EMBEDDED), str(tmp_path / "runs"), str(num_workers), RAY_TMPDIR=ray_folder)
    out = json.loads(finish(process, 180).splitlines()[-1])
    assert out["metrics"] == {"initialized": True, "size": num_workers}
    assert out["cpus"] == num_workers
    wait_until(lambda: not processes_of(process.pid), "every process of the embedded cluster has ended", 60)


CONNECTS = """
import logging
import ray
from ray._private import node, services
from ray_lite.train import ScalingConfig
from ray_lite.train.execution.cluster import connect
from waiting import wait_until

warnings = []
class Note(logging.Handler):
    def emit(self, record):
        warnings.append(record.getMessage())
logging.getLogger("ray_lite.train").addHandler(Note(logging.WARNING))

def enter(num_workers):
    return connect(ScalingConfig(num_workers=num_workers), [])

def where():
    return ray.get_runtime_context().get_node_id()

def in_threads(number, call):
    results = []
    together = threading.Barrier(number)
    def run():
        together.wait()
        try:
            results.append(call())
        except BaseException as error:
            results.append(error)
    threads = [threading.Thread(target=run) for _ in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not [r for r in results if isinstance(r, BaseException)], results
    return results

more = (os.cpu_count() or 1) + 1
"""

GROWS = (
    CONNECTS
    + """
def process_wide():
    ours = {name: value for name, value in os.environ.items() if name.startswith("RAY_LITE")}
    return node.Node.start_api_server, node.Node.start_monitor, services.get_node, ours

if __name__ == "__main__":
    before = process_wide()
    runs = in_threads(4, lambda: enter(1))
    first = where()
    assert process_wide() == before
    # While another run is in it.
    runs.pop().close()
    in_threads(2, lambda: enter(more).close())
    assert where() == first and ray.cluster_resources()["CPU"] < more
    assert len(warnings) == 2 and "another fit() runs in it" in warnings[0], warnings
    assert f"ray.init(num_cpus={more})" in warnings[0], warnings
    runs.pop().close()
    # One is closed, as often as one likes, and one is forgotten.
    closed = runs.pop()
    closed.close()
    closed.close()
    runs.clear()
    # While an actor of the user's lives in it, and while an object does.
    @ray.remote(num_cpus=0)
    class Mine:
        def answer(self):
            return 42
    mine = Mine.remote()
    enter(more).close()
    assert where() == first and "(Mine)" in warnings[-1], warnings
    assert ray.get(mine.answer.remote()) == 42
    ray.kill(mine)
    thing = ray.put("thing")
    enter(more).close()
    assert where() == first and "(1 references)" in warnings[-1], warnings
    assert ray.get(thing) == "thing"
    del thing, mine
    # Now nothing is lost with it.
    num_warnings = len(warnings)
    with enter(more):
        assert where() != first and ray.cluster_resources()["CPU"] == more
    assert len(warnings) == num_warnings and process_wide() == before
    print("grown")
"""
)


def test_the_embedded_cluster_grows_only_when_nobody_loses_anything_and_threads_share_it(tmp_path, ray_folder):
    """It was shut down under other runs, actors and objects; and two threads that started it left Ray changed."""
    assert finish(start(script(tmp_path, GROWS), RAY_TMPDIR=ray_folder), 120).splitlines()[-1] == "grown"


OTHER_CONNECTION = (
    CONNECTS
    + """
if __name__ == "__main__":
    import socket
    from ray.cluster_utils import Cluster
    enter(1).close()
    ours = where()
    ray.shutdown()
    ray.init(address="local", num_cpus=1, include_dashboard=False, logging_level="ERROR")
    theirs = where()
    enter(more + 14).close()
    assert where() == theirs != ours and ray.cluster_resources()["CPU"] == 1
    ray.shutdown()
    try:
        import grpc
    except ImportError:
        print("kept")
        sys.exit()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = {"include_dashboard": False, "num_cpus": 1, "ray_client_server_port": port}
    cluster = Cluster(initialize_head=True, head_node_args=arguments)
    ray.init(f"ray://127.0.0.1:{port}", logging_level="ERROR")
    theirs = where()
    enter(more + 14).close()
    assert where() == theirs != ours and ray.util.client.ray.is_connected()
    assert not warnings, warnings
    ray.shutdown()
    cluster.shutdown()
    print("kept")
"""
)


def test_a_connection_that_the_user_has_made_since_is_never_closed(tmp_path, ray_folder):
    """It was, when a run asked for more CPUs than an embedded cluster that was long gone had had."""
    assert finish(start(script(tmp_path, OTHER_CONNECTION), RAY_TMPDIR=ray_folder), 180).splitlines()[-1] == "kept"


JOINS = (
    CONNECTS
    + """
if __name__ == "__main__":
    from pathlib import Path
    from ray.cluster_utils import Cluster
    cluster = Cluster(initialize_head=True, head_node_args={"include_dashboard": False, "num_cpus": 1})
    file = Path(os.environ["RAY_TMPDIR"], "ray", "ray_current_cluster")
    assert file.read_text() == cluster.address
    enter(1).close()
    assert where() == cluster.head_node.node_id
    ray.shutdown()
    file.write_text("127.0.0.1:1")
    enter(1).close()
    assert where() != cluster.head_node.node_id
    ray.shutdown()
    cluster.shutdown()
    print("joined")
"""
)


def test_the_cluster_of_this_machine_is_joined_and_no_other_when_that_is_gone(tmp_path, ray_folder):
    """Ray's "auto" then takes any that runs here, such as the one that another script has for itself."""
    assert finish(start(script(tmp_path, JOINS), RAY_TMPDIR=ray_folder), 120).splitlines()[-1] == "joined"


INTERRUPTED = """
def fn(config):
    for i in range(5):
        train.report({"i": i})
    open(config["flag"], "w").close()
    signal.pause()

def again():
    train.report({"again": True})

if __name__ == "__main__":
    import ray
    from ray_lite.train import FailureConfig, RunConfig, ScalingConfig
    ray.init(address="local", num_cpus=2, include_dashboard=False, logging_level="ERROR")
    def trainer(f, **k):
        # After a SIGTERM: fn() does not listen to the notice, and this is how long it is waited for.
        failure_config = FailureConfig(preemption_grace_s=2)
        run_config = RunConfig(storage_path=sys.argv[1], name="x", failure_config=failure_config)
        return train.DataParallelTrainer(f, scaling_config=ScalingConfig(num_workers=2), run_config=run_config, **k)
    handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    began = time.monotonic()
    try:
        trainer(fn, train_loop_config={"flag": sys.argv[2]}).fit()
    except KeyboardInterrupt:
        print("interrupted")
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == handlers
    from conftest import living_actors, placement_groups
    from waiting import wait_until
    wait_until(lambda: not living_actors() and not placement_groups(), "everything is given back")
    record = train.Result.from_path(os.path.join(sys.argv[1], "x"))
    print(record.metrics)
    print(trainer(again).fit().metrics)
"""


def test_ctrl_c_gives_everything_back_and_the_same_process_can_fit_again(tmp_path):
    flag = tmp_path / "flag"
    process = start(script(tmp_path, INTERRUPTED), str(tmp_path / "runs"), str(flag))
    wait_until(flag.exists, "the train function runs", 120)
    process.send_signal(signal.SIGINT)
    out = finish(process, 60)
    assert out.splitlines()[-3:] == ["interrupted", "{'i': 4}", "{'again': True}"]


TWO_NODES = """
def fn(config):
    import ray
    c = train.get_context()
    with open(config["notes"], "a") as file:
        file.write(json.dumps([c.get_world_rank(), c.get_local_rank(), c.get_local_world_size(), c.get_node_rank(),
            ray.get_runtime_context().get_node_id()]) + "\\n")
    if c.get_world_rank() == c.get_world_size() - 1:
        for i in range(100):
            train.report({"i": i})
        if config["kill"] and c.get_attempt() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    else:
        train.report({"i": 0})

if __name__ == "__main__":
    from ray.cluster_utils import Cluster
    from ray_lite.train import FailureConfig, RunConfig, ScalingConfig
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 3, "include_dashboard": False})
    cluster.add_node(num_cpus=2)
    import ray
    ray.init(address=cluster.address, logging_level="ERROR")
    for strategy in ("SPREAD", "PACK"):
        for attempt in range(2):
            notes = sys.argv[2] + f"-{strategy}-{attempt}"
            train.DataParallelTrainer(
                fn, train_loop_config={"notes": notes, "kill": attempt == 1},
                scaling_config=ScalingConfig(num_workers=4, placement_strategy=strategy),
                run_config=RunConfig(storage_path=sys.argv[1], failure_config=FailureConfig(max_failures=1)),
            ).fit()
            print(notes)
    ray.shutdown()
    cluster.shutdown()
"""


def test_on_two_nodes_ranks_are_consecutive_per_node(tmp_path):
    """Two raylets that share an address: grouped by node id, not by address."""
    process = start(script(tmp_path, TWO_NODES), str(tmp_path / "runs"), str(tmp_path / "notes"))
    for name in finish(process, 240).splitlines():
        if not name.startswith(str(tmp_path)):
            continue
        rows = sorted(json.loads(line) for line in Path(name).read_text().splitlines()[-4:])
        assert [row[0] for row in rows] == [0, 1, 2, 3]
        nodes = list(dict.fromkeys(row[4] for row in rows))
        assert len(nodes) == 2
        for node_rank, node in enumerate(nodes):
            group = [row for row in rows if row[4] == node]
            assert [row[0] for row in group] == list(range(group[0][0], group[0][0] + len(group)))
            assert [row[1] for row in group] == list(range(len(group)))
            assert {row[2] for row in group} == {len(group)}
            assert {row[3] for row in group} == {node_rank}


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGTERM])
def test_when_the_driver_dies_nothing_is_left_behind(tmp_path, signal_number):
    flag = tmp_path / "flag"
    process = start(script(tmp_path, INTERRUPTED), str(tmp_path / "runs"), str(flag))
    wait_until(flag.exists, "the train function runs", 120)
    process.send_signal(signal_number)
    process.communicate(timeout=60)
    # Ray's own two agents outlive a killed driver by minutes; what is ours goes within seconds.
    wait_until(lambda: not processes_of(process.pid, without="Agent"), "every process has ended", 60)


# Ray's handler of SIGTERM exits with 15; met inside one of Ray's own calls, with 1. Aborted by it, a process has -6.
ENDED_BY_SIGTERM = (1, signal.SIGTERM)

SAVES_SLOWLY = """
from helpers import folder_with
from pathlib import Path
from waiting import wait_until

def fn(config):
    context = train.get_context()
    Path(config["flag"]).touch()
    wait_until(context.get_preemption_info, "the notice has come", 60)
    Path(config["flag"] + ".told").touch()
    # Longer than the three seconds after which Ray's own handler of SIGTERM would abort the driver.
    threading.Event().wait(5)
    with folder_with(i="1") as new:
        train.report({"left": context.get_preemption_info().seconds_left()}, checkpoint=new)

if __name__ == "__main__":
    from ray_lite.train import FailureConfig, RunConfig, ScalingConfig
    if sys.argv[3:] == ["own"]:
        import ray
        ray.init(address="local", num_cpus=2, include_dashboard=False, logging_level="ERROR")
    train.DataParallelTrainer(
        fn,
        train_loop_config={"flag": sys.argv[2]},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            storage_path=sys.argv[1], name="job", failure_config=FailureConfig(preemption_grace_s=30)
        ),
    ).fit()
"""


@pytest.mark.parametrize("to_all", [False, True])
def test_after_a_sigterm_to_the_driver_or_its_group_the_ranks_get_all_of_their_time_to_save(tmp_path, to_all):
    flag = tmp_path / "flag"
    process = start(script(tmp_path, SAVES_SLOWLY), str(tmp_path / "runs"), str(flag))
    wait_until(flag.exists, "the train function runs", 120)
    if to_all:
        os.killpg(process.pid, signal.SIGTERM)
    else:
        process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode in ENDED_BY_SIGTERM, errors
    result = train.Result.from_path(tmp_path / "runs" / "job")
    assert result.checkpoint is not None
    assert 0 < result.metrics["left"] < 30
    wait_until(lambda: not processes_of(process.pid, without="Agent"), "every process has ended", 60)


def test_a_sigterm_that_ends_the_users_own_cluster_too_does_not_leave_the_driver_waiting(tmp_path):
    """Ray's processes that the user has started are in the script's group: then nobody is left who could save."""
    flag = tmp_path / "flag"
    process = start(script(tmp_path, SAVES_SLOWLY), str(tmp_path / "runs"), str(flag), "own")
    wait_until(flag.exists, "the train function runs", 120)
    os.killpg(process.pid, signal.SIGTERM)
    # Most of this is Ray's own end; waiting for its calls as well took more than a minute for each.
    _, errors = process.communicate(timeout=90)
    assert process.returncode in ENDED_BY_SIGTERM, errors
    wait_until(lambda: not processes_of(process.pid, without="Agent"), "every process has ended", 60)


def test_a_second_sigterm_does_not_cut_the_first_one_short(tmp_path):
    flag = tmp_path / "flag"
    process = start(script(tmp_path, SAVES_SLOWLY), str(tmp_path / "runs"), str(flag))
    wait_until(flag.exists, "the train function runs", 120)
    process.send_signal(signal.SIGTERM)
    wait_until(Path(f"{flag}.told").exists, "the ranks know", 30)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode in ENDED_BY_SIGTERM, errors
    assert train.Result.from_path(tmp_path / "runs" / "job").checkpoint is not None
    wait_until(lambda: not processes_of(process.pid, without="Agent"), "every process has ended", 60)


INTERRUPTED_WHILE_IMPORTING = """
import importlib.abc

class Interrupt(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "ray._private.worker":
            sys.meta_path.remove(self)
            signal.raise_signal(signal.SIGINT)

def fn():
    train.report({"ok": True})

if __name__ == "__main__":
    from ray_lite.train import RunConfig, ScalingConfig
    assert "ray" not in sys.modules
    sys.meta_path.insert(0, Interrupt())
    trainer = train.DataParallelTrainer(
        fn, scaling_config=ScalingConfig(num_workers=1), run_config=RunConfig(storage_path=sys.argv[1])
    )
    try:
        trainer.fit()
    except KeyboardInterrupt:
        print("interrupted")
    print(trainer.fit().metrics)
"""


def test_after_ctrl_c_in_the_middle_of_importing_ray_the_next_fit_works(tmp_path):
    out = finish(start(script(tmp_path, INTERRUPTED_WHILE_IMPORTING), str(tmp_path / "runs")))
    assert out.splitlines()[-2:] == ["interrupted", "{'ok': True}"]


SAME_SCRIPT_AGAIN = """
from helpers import folder_with, read

def fn(config):
    checkpoint = train.get_checkpoint()
    start = 0 if checkpoint is None else int(read(checkpoint, "i")) + 1
    for i in range(start, 6):
        with folder_with(i=str(i)) as new:
            train.report({"i": i, "start": start}, checkpoint=new)
        if i == 2 and config["dies"]:
            train.get_all_reported_checkpoints()
            os.kill(config["driver"], signal.SIGKILL)
            signal.pause()

if __name__ == "__main__":
    import ray
    from ray_lite.train import RunConfig, ScalingConfig
    ray.init(address="local", num_cpus=1, include_dashboard=False, logging_level="ERROR")
    result = train.DataParallelTrainer(
        fn,
        train_loop_config={"dies": sys.argv[2] == "dies", "driver": os.getpid()},
        scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(storage_path=sys.argv[1], name="job"),
    ).fit()
    print(json.dumps(result.metrics))
"""


def test_the_same_script_goes_on_where_a_killed_driver_left_it(tmp_path):
    """Case 23: the head pod restarts, the script runs again with the same name."""
    path = script(tmp_path, SAME_SCRIPT_AGAIN)
    first = start(path, str(tmp_path / "runs"), "dies")
    first.communicate(timeout=120)
    assert first.returncode == -signal.SIGKILL
    # Its controller holds the run until it has noticed; then it is recognised as dead.
    wait_until(lambda: not processes_of(first.pid, without="Agent"), "nothing of the first run lives", 60)
    out = finish(start(path, str(tmp_path / "runs"), "lives"))
    assert json.loads(out.splitlines()[-1]) == {"i": 5, "start": 3}


DRAINED = """
from helpers import folder_with, note, notes
from pathlib import Path
from waiting import wait_until

def fn(config):
    context = train.get_context()
    me, attempt = context.get_world_rank(), context.get_attempt()
    import ray
    note(config["scratch"], "starts", [attempt, me, ray.get_runtime_context().get_node_id()])
    if attempt > 1:
        train.report({"start": train.get_checkpoint().files()})
        return
    pause = threading.Event()
    while not context.should_checkpoint():
        train.report({"up": True})
        pause.wait(0.05)
    info = context.get_preemption_info()
    note(config["scratch"], "told", [me, info.preempted_node_ids, info.preempted_ranks, info.seconds_left()])
    with folder_with(**{f"part-{me}": "x"}) as new:
        train.report({}, checkpoint=new)

if __name__ == "__main__":
    from ray.cluster_utils import Cluster
    from ray_lite.train import FailureConfig, RunConfig, ScalingConfig
    scratch, results = Path(sys.argv[2]), []
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    second = cluster.add_node(num_cpus=1)
    import ray
    from ray._raylet import GcsClient
    ray.init(address=cluster.address, logging_level="ERROR")
    cluster.wait_for_nodes()
    trainer = train.DataParallelTrainer(
        fn, train_loop_config={"scratch": str(scratch)},
        scaling_config=ScalingConfig(num_workers=2, placement_strategy="SPREAD"),
        run_config=RunConfig(storage_path=sys.argv[1], failure_config=FailureConfig(max_failures=0)),
    )
    thread = threading.Thread(target=lambda: results.append(trainer.fit()))
    thread.start()
    wait_until(lambda: len(notes(scratch, "starts")) == 2, "both run", 60)
    cluster.add_node(num_cpus=1)
    # 2: the reason is preemption.
    deadline_ms = int((time.time() + 30) * 1_000)
    accepted, why = GcsClient(address=cluster.address).drain_node(second.node_id, 2, "spot", deadline_ms)
    assert accepted, why
    thread.join()
    print(json.dumps({"second": second.node_id, "metrics": results[0].metrics}))
    ray.shutdown()
    cluster.shutdown()
"""


def test_the_ranks_hear_that_a_node_is_drained_and_go_on_elsewhere(tmp_path):
    """A drained node takes no task: neither one that tells its ranks, nor the workers of the next attempt."""
    process = start(script(tmp_path, DRAINED), str(tmp_path / "runs"), str(tmp_path))
    out = json.loads(finish(process, 120).splitlines()[-1])
    assert out["metrics"] == {"start": ["part-0", "part-1"]}
    starts = notes(tmp_path, "starts")
    (gone,) = [rank for attempt, rank, node in starts if attempt == 1 and node == out["second"]]
    assert sorted(rank for attempt, rank, node in starts if attempt == 2 and node != out["second"]) == [0, 1]
    told = notes(tmp_path, "told")
    assert sorted(rank for rank, *_ in told) == [0, 1]
    for _, nodes, ranks, left in told:
        assert (nodes, ranks) == ([out["second"]], [gone])
        assert 0 < left <= 30
