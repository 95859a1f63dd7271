"""What went wrong elsewhere: crashes in C, buried errors, hopeless retries, silent waits, noise, other sizes."""

from __future__ import annotations

import ctypes
import logging
import os
import re
import signal
import sys
import threading

import pytest
from helpers import first_time, folder_with, note, notes, rank, read
from test_own_process import finish, script, start
from waiting import wait_until

from ray_lite import train
from ray_lite.train import FailureConfig, RunConfig, ScalingConfig, WorkerGroupError
from ray_lite.train.execution.backend import Backend, BackendConfig
from ray_lite.train.torch import TorchConfig, TorchTrainer


def die(how: str) -> None:
    if how == "abort":
        os.abort()
    elif how == "segfault":
        ctypes.string_at(0)
    else:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("victims", "ways"), [((1,), ("abort",)), ((0,), ("segfault",)), ((0, 1), ("kill", "abort"))], ids=str
)
def test_all_ranks_restart_together_after_a_crash_in_c(fit, scratch, victims, ways):
    def fn(config):
        checkpoint = train.get_checkpoint()
        first = 0 if checkpoint is None else int(read(checkpoint, "i")) + 1
        note(config["scratch"], f"starts-{rank()}", first)
        attempt = train.get_context().get_attempt()
        for i in range(first, first + 2):
            with folder_with(i=str(i)) as new:
                train.report({"i": i}, checkpoint=new)
            train.collective.barrier()
        if attempt <= len(config["victims"]):
            if rank() == config["victims"][attempt - 1]:
                die(config["ways"][attempt - 1])
            signal.pause()

    config = {"scratch": str(scratch), "victims": victims, "ways": ways}
    result = fit(fn, cfg=config, fc=FailureConfig(max_failures=len(victims)))
    expected = [2 * attempt for attempt in range(len(victims) + 1)]
    assert notes(scratch, "starts-0") == notes(scratch, "starts-1") == expected
    assert [row["i"] for row in result.metrics_history] == list(range(2 * len(expected)))


class FailsAtShutdown(Backend):
    def on_shutdown(self, worker_group, backend_config):
        raise OSError("the clean-up failed too")


class FailsAtShutdownConfig(BackendConfig):
    @property
    def backend_cls(self):
        return FailsAtShutdown


def test_the_users_error_is_not_buried_by_a_clean_up_that_fails_too(fit):
    def helper():
        try:
            raise ValueError("y")
        except ValueError as error:
            raise KeyError("x") from error

    def fn():
        import atexit

        atexit.register(lambda: 1 / 0)
        helper()

    with pytest.raises(WorkerGroupError) as caught:
        fit(
            fn,
            n=4,
            fc=FailureConfig(restart="in_place"),
            trainer_options={"backend_config": FailsAtShutdownConfig()},
        )
    text = str(caught.value)
    assert isinstance(caught.value.__cause__, KeyError)
    assert text.count("KeyError: 'x'") == 1
    assert "ValueError: y" in text
    assert "in helper" in text
    assert "clean-up" not in text
    assert len(text.splitlines()) <= 25


def test_a_clean_up_that_fails_does_not_undo_a_run_that_has_finished(fit, caplog):
    with caplog.at_level(logging.WARNING, logger="ray_lite"):
        result = fit(lambda: 5, n=1, trainer_options={"backend_config": FailsAtShutdownConfig()})
    assert result.return_value == 5
    assert "the clean-up failed too" in caplog.text


def test_failures_that_get_nowhere_are_retried_with_a_growing_wait_and_a_counter(fit, caplog):
    def fn():
        raise NameError("a typo")

    with caplog.at_level(logging.WARNING, logger="ray_lite"), pytest.raises(WorkerGroupError):
        fit(fn, n=1, fc=FailureConfig(max_failures=2))
    waits = [float(wait) for wait in re.findall(r"waiting ([\d.]+) s first", caplog.text)]
    assert len(waits) == 1
    assert 0.5 <= waits[0] <= 1.0
    assert re.findall(r"failure (\d) \(max_failures=2\)", caplog.text) == ["1", "2"]


def test_a_collective_that_waits_too_long_names_the_option(fit):
    def fn():
        import torch.distributed as dist

        if rank() == 1:
            threading.Event().wait(60)
        dist.barrier()

    with pytest.raises(WorkerGroupError, match=r"TorchConfig\(timeout_s=\.\.\.\)"):
        fit(fn, trainer=TorchTrainer, trainer_options={"torch_config": TorchConfig(timeout_s=3)})


WAITING = """
def fn():
    train.report({"nodes": train.get_context().get_node_rank()})

if __name__ == "__main__":
    import logging
    from ray.cluster_utils import Cluster
    from ray_lite.train import RunConfig, ScalingConfig
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    import ray
    ray.init(address=cluster.address, logging_level="ERROR")
    waits = threading.Event()

    class Notice(logging.Handler):
        def emit(self, record):
            if "waiting for room" in record.getMessage():
                print(record.getMessage(), flush=True)
                waits.set()

    logging.getLogger("ray_lite").addHandler(Notice())
    trainer = train.DataParallelTrainer(
        fn,
        scaling_config=ScalingConfig(num_workers=2, resources_timeout_s=120),
        run_config=RunConfig(storage_path=sys.argv[1]),
    )

    def interrupt():
        waits.wait()
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    began = time.monotonic()
    try:
        trainer.fit()
    except KeyboardInterrupt:
        assert time.monotonic() - began < 30
        print("interrupted")
    from conftest import living_actors, placement_groups
    from waiting import wait_until
    wait_until(lambda: not living_actors() and not placement_groups(), "everything is given back")

    waits.clear()
    results = []
    thread = threading.Thread(target=lambda: results.append(trainer.fit()))
    thread.start()
    assert waits.wait(60)
    cluster.add_node(num_cpus=1)
    thread.join()
    print(results[0].metrics)
    ray.shutdown()
    cluster.shutdown()
"""


def test_waiting_for_room_says_so_hears_ctrl_c_and_ends_when_a_node_joins(tmp_path):
    lines = finish(start(script(tmp_path, WAITING), str(tmp_path / "runs")), 180).splitlines()
    assert "asked for 2 x {CPU: 1}, the cluster has {CPU: 1} in total" in lines[0]
    assert "interrupted" in lines
    assert lines[-1] == "{'nodes': 0}"


def test_runs_inside_a_placement_group_that_captures_its_children(fit, tmp_path):
    """As a trial of Ray Tune: the inner run makes room of its own, outside the group that it was called from."""
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = placement_group([{"CPU": 1}, {"CPU": 1}])
    ray.get(group.ready())

    @ray.remote(num_cpus=1)
    def trial(number):
        return (
            train.DataParallelTrainer(
                lambda: train.report({"number": number, "size": train.get_context().get_world_size()}),
                scaling_config=ScalingConfig(num_workers=1),
                run_config=RunConfig(storage_path=tmp_path / "trials"),
            )
            .fit()
            .metrics
        )

    inside = PlacementGroupSchedulingStrategy(group, placement_group_capture_child_tasks=True)
    try:
        found = ray.get([trial.options(scheduling_strategy=inside).remote(number) for number in range(2)], timeout=120)
    finally:
        remove_placement_group(group)
    assert found == [{"number": number, "size": 1} for number in range(2)]
    # Names that were made for them do not clash.
    assert len(list((tmp_path / "trials").iterdir())) == 2


def test_a_run_with_checkpoints_says_little_and_nothing_per_report(fit, capfd):
    def fn():
        for i in range(5):
            with folder_with(i=str(i)) as new:
                train.report({"i": i}, checkpoint=new if rank() == 0 else None)

    fit(fn)
    captured = capfd.readouterr()
    lines = [line for line in (captured.out + captured.err).splitlines() if line.strip()]
    assert len(lines) <= 5, lines


def output_until(capfd, text: str) -> str:
    """What was printed up to ``text``; Ray brings the output of workers to the driver from time to time."""
    seen: list[str] = []

    def has_arrived() -> bool:
        captured = capfd.readouterr()
        seen.append(captured.out + captured.err)
        return text in "".join(seen)

    wait_until(has_arrived, f"{text!r} has arrived")
    return "".join(seen)


def test_one_switch_silences_the_library_in_the_workers_too(fit, capfd):
    class Odd:
        pass

    def fn():
        # Would be warned about once.
        train.report({"odd": Odd()})
        sys.stdout.write("the end of the function\n")
        sys.stdout.flush()

    logger = logging.getLogger("ray_lite")
    old = logger.level
    logger.setLevel(logging.ERROR)
    try:
        fit(fn, n=1, logging_config=train.LoggingConfig(log_level="ERROR"))
    finally:
        logger.setLevel(old)
    assert "kept as their repr" not in output_until(capfd, "the end of the function")


def test_the_users_own_logging_on_a_worker_shows_each_line_once(fit, capfd):
    def fn():
        logging.basicConfig(level=logging.INFO, format="OURS %(message)s")
        logging.info("hello from %d", rank())
        logging.info("the end of the function")

    fit(fn, n=1)
    assert output_until(capfd, "the end of the function").count("OURS hello from 0") == 1


def test_another_number_of_workers_mixes_no_files_of_the_old_with_the_new(fit, scratch):
    def save_per_rank(config):
        context = train.get_context()
        checkpoint = train.get_checkpoint()
        if checkpoint is not None:
            note(config["scratch"], "found", sorted(checkpoint.files()))
        with folder_with(**{f"part-{rank()}": f"{context.get_world_size()}"}) as new:
            train.report({"size": context.get_world_size()}, checkpoint=new)
        if context.get_world_size() == 2 and rank() == 1 and first_time(config["scratch"], "kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        train.report({"size": context.get_world_size(), "rows": list(train.get_dataset_shard())})

    options = {"cfg": {"scratch": str(scratch)}, "ds": {"train": list(range(4))}, "name": "x"}
    four = fit(save_per_rank, n=4, **options)
    two = fit(save_per_rank, n=2, fc=FailureConfig(max_failures=1), **options)
    assert sorted(four.checkpoint.files()) == [f"part-{r}" for r in range(4)]
    assert sorted(two.checkpoint.files()) == ["part-0", "part-1"]
    assert read(two.checkpoint, "part-1") == "2"
    assert two.metrics["size"] == 2
    assert len(two.metrics["rows"]) == 2
    found = notes(scratch, "found")
    assert found.count([f"part-{r}" for r in range(4)]) >= 2
    assert all(files in ([f"part-{r}" for r in range(4)], ["part-0", "part-1"]) for files in found)
