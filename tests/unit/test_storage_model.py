"""Store, retention and resume against a dict that remembers what was promised."""

from __future__ import annotations

import os
import shutil
import tempfile

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from ray_lite.train.storage.checkpoint import Checkpoint
from ray_lite.train.storage.retention import best_first, select_to_delete
from ray_lite.train.storage.root import StorageRoot
from ray_lite.train.storage.store import RunStore


class StoreMachine(RuleBasedStateMachine):
    """Reports, retention, restarts and damage in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.mkdtemp()
        MemoryFileSystem.store.clear()
        self.model: dict[str, tuple[int, dict, bytes]] = {}
        self.uncommitted: set[str] = set()
        self.damaged: set[str] = set()
        self.next_index, self.attempt = 0, 1

    @initialize(
        is_local=st.booleans(),
        num_to_keep=st.sampled_from([None, 1, 2]),
        order=st.sampled_from(["max", "min"]),
    )
    def begin(self, is_local, num_to_keep, order):
        self.root = StorageRoot(f"{self.folder}/runs") if is_local else StorageRoot("memory://runs")
        self.options = {"num_to_keep": num_to_keep, "score_attribute": "s", "score_order": order}
        self.store = RunStore(self.root, "run")

    def upload(self, data: bytes):
        with tempfile.TemporaryDirectory() as source:
            with open(os.path.join(source, "w"), "wb") as file:
                file.write(data)
            return self.store.upload(Checkpoint(source), report_index=self.next_index, attempt=self.attempt)

    @rule(data=st.binary(min_size=1, max_size=20), score=st.floats() | st.none())
    def report(self, data, score):
        metrics = {"s": score}
        committed = self.store.commit(
            {0: self.upload(data)},
            report_index=self.next_index,
            attempt=self.attempt,
            world_size=1,
            metrics=metrics,
            created_at=0.0,
        )
        self.model[committed.dir_name] = (self.next_index, metrics, data)
        self.next_index += 1

    @rule(data=st.binary(min_size=1, max_size=20))
    def upload_without_commit(self, data):
        self.uncommitted.add(self.upload(data).dir_name)
        self.next_index += 1

    @rule()
    def retain(self):
        kept = self.store.list_checkpoints()
        gone = select_to_delete(kept, **self.options)
        for committed in gone:
            assert self.store.delete(committed)
            del self.model[committed.dir_name]
            self.damaged.discard(committed.dir_name)
        if kept:
            assert kept[-1].dir_name in self.model
            options = {name: value for name, value in self.options.items() if name != "num_to_keep"}
            assert best_first(kept, **options)[0].dir_name in self.model

    @rule()
    def restart(self):
        self.store = RunStore(self.root, "run")
        assert self.store.last_attempt() <= self.attempt
        self.attempt += 1
        assert set(self.store.remove_orphans(before_attempt=self.attempt)) == self.uncommitted
        self.uncommitted.clear()

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def damage(self, data):
        name = data.draw(st.sampled_from(sorted(self.model)))
        files, folder = self.store._open()
        files.write(f"{folder}/{name}/w", self.model[name][2] + b"x")
        self.damaged.add(name)

    @invariant()
    def what_was_committed_is_there(self):
        if not hasattr(self, "store"):
            return
        listed = self.store.list_checkpoints()
        assert [committed.dir_name for committed in listed] == sorted(self.model, key=lambda name: self.model[name][0])
        good = [name for name in self.model if name not in self.damaged]
        newest = self.store.newest_valid()
        assert (newest.dir_name if newest else None) == max(good, key=lambda name: self.model[name][0], default=None)
        for name in good:
            with self.store.open_checkpoint_dir(name).open("w") as file:
                assert file.read() == self.model[name][2]

    def teardown(self):
        shutil.rmtree(self.folder)
        MemoryFileSystem.store.clear()


StoreMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=15)
test_store_agrees_with_a_dict = StoreMachine.TestCase


@pytest.mark.proof
def test_store_agrees_with_a_dict_for_long():
    run_state_machine_as_test(StoreMachine, settings=settings(max_examples=400, stateful_step_count=40))
