"""Callbacks see the n-th reports of all ranks together, once, in order, and never wait for ever."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ray_lite.train.execution.consolidate import Consolidator


@given(data=st.data(), world_size=st.integers(1, 5), max_waiting=st.integers(1, 20))
def test_every_report_goes_out_at_most_once_and_in_order(data, world_size, max_waiting):
    consolidator = Consolidator(world_size, max_waiting=max_waiting)
    counts, out = [0] * world_size, []
    finished = [False] * world_size
    for _ in range(data.draw(st.integers(0, 60))):
        rank = data.draw(st.integers(0, world_size - 1))
        if finished[rank]:
            continue
        if data.draw(st.booleans()) or data.draw(st.booleans()):
            out += consolidator.add(rank, counts[rank], b"%d" % rank)
            counts[rank] += 1
        else:
            finished[rank] = True
            out += consolidator.finished(rank)
        assert len(consolidator._lines) <= max_waiting
    out += consolidator.flush()
    indices = [report.report_index for report in out]
    assert indices == sorted(set(indices))
    assert indices == list(range(max(counts)))


class Model:
    """What goes out, by the definition: a look at every rank and every report for each line."""

    def __init__(self, world_size: int, max_waiting: int, max_waiting_bytes: int, waits_for_all: bool) -> None:
        self.max_waiting, self.max_waiting_bytes = max_waiting, max_waiting_bytes
        self.next_of = dict.fromkeys(range(world_size) if waits_for_all else [], -1)
        self.lines: dict[int, dict[int, bytes]] = {}
        self.sent_below = -1

    def add(self, rank: int, index: int, line: bytes) -> list[tuple[int, dict[int, bytes]]]:
        self.next_of[rank] = index + 1
        if index >= self.sent_below:
            self.lines.setdefault(index, {})[rank] = line
        return self.ready(min(self.next_of.values()))

    def finished(self, rank: int) -> list[tuple[int, dict[int, bytes]]]:
        self.next_of.pop(rank, None)
        return self.ready(min(self.next_of.values(), default=1 << 62))

    def ready(self, below: int) -> list[tuple[int, dict[int, bytes]]]:
        out = []
        while self.lines:
            num_bytes = sum(len(line) for lines in self.lines.values() for line in lines.values())
            is_full = len(self.lines) > self.max_waiting or (len(self.lines) > 1 and num_bytes > self.max_waiting_bytes)
            first = min(self.lines)
            if first >= below and not is_full:
                break
            out.append((first, self.lines.pop(first)))
            self.sent_below = first + 1
        return out


@given(
    data=st.data(),
    world_size=st.integers(1, 5),
    max_waiting=st.integers(1, 20),
    max_waiting_bytes=st.integers(0, 100),
    waits_for_all=st.booleans(),
)
def test_any_order_of_lines_agrees_with_the_definition(data, world_size, max_waiting, max_waiting_bytes, waits_for_all):
    options = {
        "max_waiting": max_waiting,
        "max_waiting_bytes": max_waiting_bytes,
        "waits_for_all": waits_for_all,
    }
    consolidator, model = Consolidator(world_size, **options), Model(world_size, **options)
    first = data.draw(st.integers(0, 3))
    counts = [first] * world_size
    running = list(range(world_size))
    for _ in range(data.draw(st.integers(0, 60))):
        if not running:
            break
        rank = data.draw(st.sampled_from(running))
        if data.draw(st.integers(0, 9)):
            line = b"x" * data.draw(st.integers(0, 30))
            found = consolidator.add(rank, counts[rank], line)
            expected = model.add(rank, counts[rank], line)
            counts[rank] += 1
        else:
            running.remove(rank)
            found, expected = consolidator.finished(rank), model.finished(rank)
        assert [(report.report_index, report.lines) for report in found] == expected
    assert [(report.report_index, report.lines) for report in consolidator.flush()] == model.ready(1 << 62)


def test_a_rank_that_is_late_does_not_fill_the_memory_with_long_lines_of_the_others():
    """The bound was 1,000 reports: 1,000 times the ranks times 1 MB of metrics."""
    consolidator = Consolidator(3, max_waiting_bytes=10_000)
    out = list(consolidator.add(2, 0, b"then it is silent"))
    for index in range(100):
        for rank in (0, 1):
            out += consolidator.add(rank, index, b"x" * 1_000)
            held = sum(len(line) for lines in consolidator._lines.values() for line in lines.values())
            assert held <= 10_000
    assert [report.report_index for report in out] == list(range(len(out)))
    assert len(out) >= 90


def test_one_report_may_be_longer_than_what_may_wait():
    """A large group gets whole reports all the same, as long as its ranks keep step."""
    consolidator = Consolidator(4, max_waiting_bytes=10, waits_for_all=True)
    for index in range(3):
        out = [report for rank in range(4) for report in consolidator.add(rank, index, b"x" * 100)]
        assert [(report.report_index, len(report.lines)) for report in out] == [(index, 4)]


def test_equal_ranks_are_brought_together():
    consolidator = Consolidator(2)
    assert [r.report_index for r in consolidator.add(0, 0, b"a")] == [0]
    # Rank 1 is known from here on, and waited for.
    assert list(consolidator.add(1, 0, b"late")) == []
    assert list(consolidator.add(0, 1, b"b")) == []
    (report,) = consolidator.add(1, 1, b"c")
    assert report.lines == {0: b"b", 1: b"c"}


def test_rank_0_alone_is_not_held_up_by_ranks_that_never_report():
    consolidator = Consolidator(4)
    assert [r.report_index for i in range(5) for r in consolidator.add(0, i, b"x")] == [0, 1, 2, 3, 4]


def test_it_may_wait_for_ranks_that_have_never_reported():
    consolidator = Consolidator(2, waits_for_all=True)
    assert list(consolidator.add(1, 0, b"1")) == []
    (report,) = consolidator.add(0, 0, b"0")
    assert report.lines == {0: b"0", 1: b"1"}
    assert list(consolidator.add(0, 1, b"0")) == []
    (report,) = consolidator.finished(1)
    assert report.lines == {0: b"0"}
