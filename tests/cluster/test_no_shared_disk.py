"""Two nodes with a disk each: what the far one reports ends on the driver's disk, and comes back from there."""

from __future__ import annotations

import json
import socket
import subprocess
import zlib
from pathlib import Path

import pytest
from test_own_process import finish, script, start

from ray_lite.train import Result

TWO_DISKS = """
import contextlib, ctypes, logging, subprocess, tempfile, zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from ray_lite.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig

LARGE_BYTES = 200 << 20

def checksum(path):
    crc = 0
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            crc = zlib.crc32(piece, crc)
    return crc

def write_large(path, size_bytes):
    piece, crc = os.urandom(1 << 20), 0
    with open(path, "wb") as file:
        for _ in range(size_bytes >> 20):
            file.write(piece)
            crc = zlib.crc32(piece, crc)
    return crc

def peak_bytes(process="self"):
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))

def read_back(checkpoint):
    if checkpoint is None:
        return None
    with checkpoint.as_directory() as folder:
        return {name: checksum(Path(folder, name)) for name in checkpoint.files()}

def fn(config):
    context = train.get_context()
    rank, storage = context.get_world_rank(), context.get_storage()
    note = {"rank": rank, "attempt": context.get_attempt(), "is_far": not storage.is_local}
    note["sees"] = os.listdir(os.path.join(config["storage"], ""))
    note["start"] = read_back(train.get_checkpoint())
    modes = train.CheckpointUploadMode
    for i, mode in enumerate([modes.ASYNC, modes.SYNC, modes.SYNC]):
        with train.staging_directory() if i == 1 else tempfile.TemporaryDirectory() as folder:
            Path(folder, f"small_{rank}").write_bytes(b"%d" % rank)
            if i == 2:
                note["large"] = write_large(Path(folder, f"large_{rank}"), LARGE_BYTES if note["is_far"] else 1 << 20)
            before = peak_bytes()
            checkpoint = train.Checkpoint.from_directory(folder)
            train.report({"i": i}, checkpoint=checkpoint, checkpoint_upload_mode=mode)
            note["growth_bytes"] = peak_bytes() - before
    note["reported"] = [Path(r.checkpoint.path).name for r in train.get_all_reported_checkpoints()]
    note["own"] = read_back(train.get_checkpoint())
    with open(config["notes"], "a") as file:
        file.write(json.dumps(note) + "\\n")
    train.collective.barrier()
    if note["attempt"] == 1:
        raise RuntimeError("the first attempt ends here")

class Watch(train.UserCallback):
    '''How much the controller has grown at each checkpoint.'''

    def __init__(self):
        self.peaks = []

    def after_checkpoint(self, context, checkpoint, metrics):
        session = os.getsid(0)
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                if "ray::Controller" in (entry / "cmdline").read_text() and os.getsid(int(entry.name)) == session:
                    self.peaks.append(peak_bytes(entry.name))

def take_another_disk(kind, storage):
    '''What this thread starts from now on has another disk at the storage path.'''
    if kind == "folder":
        # The path goes through /proc/self/cwd, which is where a process was started.
        os.chdir(sys.argv[5])
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(0x00020000) != 0:  # CLONE_NEWNS
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "none", storage], check=True)

if __name__ == "__main__":
    from ray.cluster_utils import Cluster
    storage, notes, kind, near = sys.argv[1:5]
    os.chdir(near)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    logging.getLogger("ray").setLevel(logging.ERROR)
    # Smaller than what goes through it.
    options = {"num_cpus": 1, "object_store_memory": 80 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={"include_dashboard": False, **options})
    import ray
    ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
    # A thread has its own view of the disks: this one takes another, and what it starts has that too.
    driver = ThreadPoolExecutor(1)
    driver.submit(os.getpid).result()
    take_another_disk(kind, storage)
    cluster.add_node(**options)
    os.chdir(near)
    watch = Watch()
    trainer = train.DataParallelTrainer(
        fn, train_loop_config={"notes": notes, "storage": storage},
        scaling_config=ScalingConfig(num_workers=2, placement_strategy="STRICT_SPREAD"),
        run_config=RunConfig(
            storage_path=storage, name="x", failure_config=FailureConfig(max_failures=1), callbacks=[watch],
        ),
    )
    result = driver.submit(trainer.fit).result()
    print(json.dumps({"path": result.checkpoint.path, "growth_bytes": watch.peaks[-1] - watch.peaks[0]}))
    ray.shutdown()
    cluster.shutdown()
"""


def can_mount() -> bool:
    command = ["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def test_checkpoints_of_a_node_without_the_disk_are_carried_to_the_driver_and_back(tmp_path: Path):
    """The second raylet sees another disk at the storage path: a mount of its own where this process may
    mount, else the path is a link that leads each process somewhere else. A file larger than the object store
    goes both ways."""
    near, far, notes = tmp_path / "near", tmp_path / "far", tmp_path / "notes"
    near.mkdir()
    far.mkdir()
    kind = "mount" if can_mount() else "folder"
    storage = str(near) if kind == "mount" else "/proc/self/cwd"
    process = start(script(tmp_path, TWO_DISKS), storage, str(notes), kind, str(near), str(far))
    out = finish(process, 240)

    rows = [json.loads(line) for line in notes.read_text().splitlines()]
    assert sorted((row["attempt"], row["is_far"]) for row in rows) == [(1, False), (1, True), (2, False), (2, True)]
    assert [row["sees"] for row in rows if row["is_far"]] == [[], []]
    assert list(far.iterdir()) == []
    crcs = {attempt: {row["rank"]: row["large"] for row in rows if row["attempt"] == attempt} for attempt in (1, 2)}
    last = {
        attempt: {
            **{f"large_{rank}": crcs[attempt][rank] for rank in (0, 1)},
            **{f"small_{rank}": zlib.crc32(b"%d" % rank) for rank in (0, 1)},
        }
        for attempt in (1, 2)
    }
    for row in rows:
        # What one rank has stored itself may not be committed yet, but its own files are there.
        assert row["own"].items() <= last[row["attempt"]].items()
        assert row["start"] == (None if row["attempt"] == 1 else last[1])
        assert row["reported"][-1] == ("checkpoint_000002" if row["attempt"] == 1 else "checkpoint_000005_attempt_2")

    result = Result.from_path(near / "x")
    names = [Path(checkpoint.path).name for checkpoint, _ in result.best_checkpoints]
    assert names == [
        *(f"checkpoint_00000{i}" for i in range(3)),
        *(f"checkpoint_00000{i}_attempt_2" for i in (3, 4, 5)),
    ]
    for checkpoint, _ in result.best_checkpoints:
        checkpoint.verify()
        assert {"small_0", "small_1"} <= set(checkpoint.files())
    assert sorted(path.name for path in (near / "x").iterdir() if not path.name.startswith("checkpoint_")) == [
        "metrics",
        "run.json",
    ]

    # Never the whole of its 200 MB: pieces of it in the object store, 80 MB at most, and two or three in each process.
    assert max(row["growth_bytes"] for row in rows) < 140 << 20
    assert json.loads(out.splitlines()[-1])["growth_bytes"] < 140 << 20
    assert out.count("are carried to the driver's disk") == 1


CLIENT = """
from pathlib import Path

if __name__ == "__main__":
    from ray.cluster_utils import Cluster
    from ray_lite.train import ConfigError, RunConfig, ScalingConfig
    from ray_lite.train.execution.probe import check_client_storage
    from ray_lite.train.storage.root import StorageRoot
    near, far, port = sys.argv[1:4]
    # Where the head node and its workers see another folder than this process at /proc/self/cwd.
    os.chdir(far)
    arguments = {"include_dashboard": False, "num_cpus": 1, "ray_client_server_port": int(port)}
    cluster = Cluster(initialize_head=True, head_node_args=arguments)
    os.chdir(near)
    import ray
    ray.init(f"ray://127.0.0.1:{port}", logging_level="ERROR")
    check_client_storage(StorageRoot.resolve(near))
    check_client_storage(StorageRoot.resolve("s3://bucket/run"))
    try:
        train.DataParallelTrainer(
            print, scaling_config=ScalingConfig(num_workers=1), run_config=RunConfig(storage_path="/proc/self/cwd"),
        ).fit()
    except ConfigError as error:
        print(error)
    ray.shutdown()
    cluster.shutdown()
"""


def test_under_ray_client_a_folder_that_the_head_node_does_not_see_is_refused(tmp_path: Path):
    pytest.importorskip("grpc")
    near, far = tmp_path / "near", tmp_path / "far"
    near.mkdir()
    far.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    out = finish(start(script(tmp_path, CLIENT), str(near), str(far), str(port)), 180)
    assert "storage_path '/proc/self/cwd/" in out
    assert "use a URI" in out
    assert "a folder that both share" in out
    assert list(far.iterdir()) == []
