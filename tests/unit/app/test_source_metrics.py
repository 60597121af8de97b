"""The metrics of reading: each moves when what it counts happens, and the whole text can be read by Prometheus."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pytest
from prometheus_client import Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import evermark
from evermark.app.ingesting import LaneTools, SourceRunner
from evermark.breaker import Breaker, BreakerLimits, BreakerState
from evermark.cluster.fence import source_lease
from evermark.cluster.holding import LIMITS
from evermark.errors import FormatError, GapError, UnreachableError
from evermark.event import Seen
from evermark.ingest.batch_taker import WrittenBatch
from evermark.ingest.checkpoint_saver import SavePolicy
from evermark.ingest.dedup import RecentLimits
from evermark.ingest.gaps import GapLimits
from evermark.ingest.limits import ReadingLimits
from evermark.ingest.reading import ReadPlan, SourceReading
from evermark.ingest.repair.base import Choice, Recovery, Step
from evermark.log.base import LogFile
from evermark.log.head import MemoryHeads
from evermark.log.maintenance import MaintenanceReport
from evermark.observe.health import HealthBoard, PartitionHealth, SourceAnswer
from evermark.observe.metrics import Metrics
from evermark.runtime import Threads, run_through
from evermark.server.probes import Probes
from evermark.sources.base import Limit
from tests.syntax import nodes_of

NOW = datetime.now(UTC)


class Scene:
    """A source of one partition, without anything beneath it."""

    def __init__(self, folder: Path, limits: ReadingLimits | None = None) -> None:
        self.board, self.metrics = HealthBoard(), Metrics()
        self.large: set[int] = set()
        limits = limits or ReadingLimits()
        source: Any = SimpleNamespace(partitions=lambda: [0], divisible=lambda: False)
        stores: Any = SimpleNamespace(
            sources={"shop": source}, reading=limits, log_folder=lambda _: folder, copies=None, retention=None,
            recoveries=SimpleNamespace(set_large=self.set_large),
            leases=None, holder=None, heads=MemoryHeads(), checkpoints=None, replays=None,
            store_breaker=Breaker(limits.breaker), lease_limits=LIMITS,
        )  # fmt: skip
        self.stores = stores
        tasks: Any = SimpleNamespace(write_chunks=None, write_pieces=lambda *_: [])
        delivery: Any = SimpleNamespace(on_span=lambda _: None)
        self.tools = LaneTools(stores, tasks, "shop", self.metrics, Limit(), Threads())
        self.runner = SourceRunner(stores, self.tools, "shop", self.board, self.metrics, delivery, Threads())
        self.tools.newest = lambda partitions: {0: Seen("e", NOW - timedelta(days=1), NOW)}  # type: ignore[method-assign]

    def set_large(self, recovery: Recovery) -> bool:
        news, self.large = recovery.id not in self.large, self.large | {recovery.id}
        return news

    def value(self, name: str, **labels: str) -> float:
        found = self.metrics.registry.get_sample_value(f"evermark_{name}", {"source": "shop", **labels})
        return 0.0 if found is None else found

    def shown(self) -> str:
        Probes(self.board, self.metrics)._show_partitions()
        return generate_latest(self.metrics.registry).decode()


def recovery() -> Recovery:
    return Recovery(1, "shop", 0, Choice.REPAIR, False, "lost", "5", Step.OPENED, None, 0, 0, "", NOW, NOW)


def batch(rows: int = 3, duplicates: int = 0) -> WrittenBatch:
    return WrittenBatch(0, 1, 1, "0", "1", (LogFile("f", rows, 1),) if rows else (), duplicates)


AWAY = UnreachableError("etcd does not answer")
PART = {"partition": "0"}
# What the first design asks for, our name of it, and what happens when it moves.
ASKED: dict[str, tuple[str, dict[str, str], Callable[[SourceRunner], object]]] = {
    "CheckpointsSaved": ("checkpoints_saved_total", PART, lambda r: r.saved(0, 0.01)),
    "CheckpointErrors": ("checkpoint_errors_total", PART, lambda r: r.away(0, AWAY, BreakerState.CLOSED)),
    "CheckpointLatency": ("checkpoint_seconds_count", {}, lambda r: r.saved(0, 0.01)),
    "DuplicateEvents": ("duplicates_dropped_total", PART, lambda r: r.taken(batch(0, duplicates=2))),
    "PartitionRestarts": ("partition_restarts_total", PART, lambda r: r.failed(0, AWAY, 1.0)),
    "GapsDetected": ("gaps_total", PART, lambda r: r.opened(recovery(), GapError("lost"))),
    "RescanEvents": (
        "events_recovered_total", PART, lambda r: r.closed(recovery(), SimpleNamespace(is_state=False), 7, {}),
    ),
    "events taken": ("events_taken_total", PART, lambda r: r.taken(batch())),
    "log commits": ("batches_taken_total", PART, lambda r: r.taken(batch())),
    "log head": ("log_head", PART, lambda r: r.taken(batch())),
    "large gaps": ("resyncs_total", PART, lambda r: r.opened(recovery(), GapError("lost"))),
    "breakers": (
        "breaker_state", {"of": "checkpoints", "state": "open"}, lambda r: r.away(0, AWAY, BreakerState.OPEN),
    ),
    "rows of copies": ("copy_rows_total", {}, lambda r: r.copy_went_on("shop", 5, 2)),
}  # fmt: skip


@pytest.mark.parametrize("asked", ASKED)
def test_s11_each_metric_moves_when_its_event_happens(asked: str, tmp_path: Path) -> None:
    """GIVEN a source WHEN it happens THEN the metric that counts it is higher than before."""
    scene = Scene(tmp_path)
    name, labels, happens = ASKED[asked]
    before = scene.value(name, **labels)
    happens(scene.runner)
    assert scene.value(name, **labels) > before


def test_s11_the_size_of_the_cache_is_shown_after_each_batch(tmp_path: Path) -> None:
    """GIVEN a cache with two ids WHEN a batch is taken THEN its size is shown."""
    scene = Scene(tmp_path)
    assert scene.tools._recent is not None
    scene.tools._recent.read(0, pa.array(["a", "b"]))
    scene.tools._recent.logged(0)
    scene.tools._with_cache_shown(lambda _: None)(batch())
    assert scene.value("dedup_cache_size") == 2


def test_s11_lag_and_health_are_shown_by_partition_and_the_text_can_be_parsed(tmp_path: Path) -> None:
    """GIVEN all of it happened, and a source that cannot be asked WHEN Prometheus reads the text THEN every family has
    a type and a meaning, lag is unknown, and the partition's state is one of them."""
    scene = Scene(tmp_path)
    for _, _, happens in ASKED.values():
        happens(scene.runner)
    scene.board.put("shop", 0, PartitionHealth.HEALTHY)
    scene.board.answered("shop", SourceAnswer(0.0, refused={0: ("no answer", "")}))
    families = {family.name: family for family in text_string_to_metric_families(scene.shown())}
    assert all(family.type != "unknown" and family.documentation for family in families.values())
    (lag,) = families["evermark_partition_lag_seconds"].samples
    assert (lag.labels, math.isnan(lag.value)) == ({"source": "shop", "partition": "0"}, True)
    states = {s.labels["state"]: s.value for s in families["evermark_partition_state"].samples}
    assert [state for state, value in states.items() if value] == ["stale"]


def test_s11_no_metric_is_there_that_nothing_moves() -> None:
    """GIVEN every metric of the program THEN some part of the program names it to move it."""
    metrics = {
        name for name, each in vars(Metrics()).items() if isinstance(each, (Counter, Gauge, Histogram))
    }  # fmt: skip
    named: set[str] = set()
    root = Path(evermark.__file__).parent
    for file in root.rglob("*.py"):
        if file.name != "metrics.py" and not file.relative_to(root).is_relative_to("testing"):
            for node in nodes_of(file.read_text()):
                if isinstance(node, ast.Attribute):
                    named.add(node.attr)
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    named.add(node.value)
    assert metrics - named == set()


def test_s12_what_the_file_says_reaches_those_who_act_on_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN limits unlike the defaults WHEN an owner and its reading are made THEN each has its own of them."""
    limits = ReadingLimits(
        SavePolicy(7.0, 70), BreakerLimits(6, 40.0), RecentLimits(71, 72.0), GapLimits(False, 73.0, 74.0)
    )
    scene = Scene(tmp_path, limits)
    assert scene.runner._owner.limits.breaker == limits.breaker
    _, taker = scene.tools.open_log(1)
    assert (taker.policy, taker.breaker, taker.saving) == (limits.saving, scene.stores.store_breaker, scene.runner)

    made: list[SourceReading] = []
    monkeypatch.setattr(SourceReading, "steps", lambda reading, *_: made.append(reading) or iter(()))
    assert list(scene.tools.read(ReadPlan({}, {}, {}), taker, lambda _: None, [], [])) == []
    assert made[0].gaps == limits.gaps
    assert made[0].recent is not None and made[0].recent._limits == limits.recent
    assert Scene(tmp_path, replace(limits, recent=None)).tools._recent is None


def test_a_store_that_is_away_is_said_once_and_so_is_its_end(tmp_path: Path) -> None:
    """GIVEN a store of checkpoints that is away WHEN several saves fail THEN health knows, until it is back."""
    scene = Scene(tmp_path)
    for _ in range(3):
        scene.runner.away(0, AWAY, BreakerState.CLOSED)
    assert scene.board.stores_away == {"shop": ("etcd does not answer", "")}
    assert 'evermark_checkpoints_away{source="shop"} 1.0' in scene.shown()
    scene.runner.back()
    assert scene.board.stores_away == {} and "evermark_checkpoints_away{" not in scene.shown()
    # An owner that follows does not know, and says so when it has saved.
    follower = Scene(tmp_path)
    follower.board.store_away("shop", "etcd does not answer", "")
    follower.runner.saved(0, 0.01)
    assert follower.board.stores_away == {}
    assert scene.value("breaker_state", of="checkpoints", state="closed") == 1


def test_a_large_gap_asks_followers_to_take_their_state_anew(tmp_path: Path) -> None:
    """GIVEN a last event a day ago WHEN a gap is found THEN health says when; a last event a minute ago asks nobody."""
    scene = Scene(tmp_path)
    scene.runner.opened(recovery(), GapError("lost"))
    scene.runner.begun(recovery())
    assert scene.board.partitions()["shop/0"].resync_at is not None
    assert scene.value("resyncs_total", **PART) == 1
    scene = Scene(tmp_path)
    scene.tools.newest = lambda partitions: {0: Seen("e", NOW, NOW)}  # type: ignore[method-assign]
    scene.runner.opened(recovery(), GapError("lost"))
    assert scene.value("resyncs_total", **PART) == 0
    assert "shop/0" not in scene.board.partitions()


def test_s4_a_missing_piece_alarms_once_and_the_alarm_ends_when_it_is_closed(tmp_path: Path) -> None:
    """GIVEN a gap WHEN it is tried to be closed three times, and then is THEN it was counted once, the partition was
    stale meanwhile, and nothing is left of the alarm."""
    scene = Scene(tmp_path)
    scene.runner.reading([0])
    scene.runner.opened(recovery(), GapError("lost"))
    for _ in range(3):
        scene.runner.begun(recovery())
        assert scene.board.partitions()["shop/0"].state is PartitionHealth.STALE
    scene.runner.ended(recovery(), None)
    scene.runner.reading([0])
    assert (scene.value("gaps_total", **PART), scene.value("resyncs_total", **PART)) == (1, 1)
    shown = scene.board.partitions()["shop/0"]
    assert (shown.state, shown.reason, shown.repairing) == (PartitionHealth.HEALTHY, "", False)


def test_a_gap_that_waits_for_something_says_for_what_in_health(tmp_path: Path) -> None:
    """GIVEN a gap WHEN it cannot be closed just now THEN the partition is stale, with why and what to do."""
    scene = Scene(tmp_path)
    scene.runner.begun(recovery())
    scene.runner.waits(recovery(), UnreachableError("the file f is missing", hint="put it back"))
    shown = scene.board.partitions()["shop/0"]
    assert (shown.state, shown.repairing, shown.hint) == (PartitionHealth.STALE, True, "put it back")
    assert shown.reason.endswith("closing it waits: the file f is missing")


def test_a_log_that_cannot_be_opened_here_is_not_said_to_be_read_elsewhere(tmp_path: Path) -> None:
    """GIVEN an instance that stood by WHEN it has the lease and the log cannot be opened THEN health says that it
    fails, and why; at no moment that another instance reads it."""
    scene = Scene(tmp_path)
    owner: Any = scene.runner._owner
    scene.runner._maintain = lambda _: iter(())  # type: ignore[method-assign, assignment, return-value]
    seen: list[PartitionHealth] = []

    def look() -> PartitionHealth:
        seen.append(scene.board.partitions()["shop/0"].state)
        return seen[-1]

    scene.runner.standby()
    assert look() is PartitionHealth.STANDBY
    owner._held_names = frozenset({source_lease("shop")})
    scene.runner.owned()
    assert look() is PartitionHealth.STARTING
    run_through(Threads(), owner._whole_source_failed(FormatError("commits are missing", hint="put them back")))
    scene.runner.released()
    assert look() is PartitionHealth.FAILED
    shown = scene.board.partitions()["shop/0"]
    assert (shown.reason, shown.hint) == ("commits are missing", "put them back")
    scene.runner.owned()
    assert look() is PartitionHealth.FAILED
    scene.runner.released()


class Care:
    """Maintenance of a log: each round ends as it is told."""

    def __init__(self, *rounds: Exception | tuple[str, ...]) -> None:
        self._rounds = list(rounds)

    def run(self, _: object) -> MaintenanceReport:
        said = self._rounds.pop(0)
        if isinstance(said, Exception):
            raise said
        return MaintenanceReport(compacted=1, lost=said)


def test_maintenance_that_keeps_failing_degrades_health_until_it_succeeds(tmp_path: Path) -> None:
    """GIVEN a partition that is read WHEN maintenance of its log fails again and again THEN health is degraded and says
    why, with what to do; once does not, and one round that succeeds ends it, in the next lane, too."""
    scene = Scene(tmp_path)
    scene.runner.reading([0])
    error = FormatError("the log cannot be read", hint="put it back")
    care: Any = Care(error, (), error, error, ValueError("odd"), ())
    health = []
    for _ in range(6):
        scene.runner._maintained(care)
        health.append([(trouble.what, trouble.reason) for trouble in scene.board.log_troubles()])
    assert health == [[], [], [], [], [("maintenance", "3 rounds in a row have failed: ValueError: odd")], []]
    scene.board.log_unwell("shop", "maintenance", "said by the lane before", "")
    next_lane = Scene(tmp_path).runner
    next_lane.board = scene.board
    next_lane._maintained(cast("Any", Care(())))
    assert scene.board.log_troubles() == []


def test_files_of_the_log_that_are_missing_degrade_health_until_they_are_back(tmp_path: Path) -> None:
    """GIVEN a log two files of which were removed WHEN maintenance finds that THEN health names the first, and what to
    do, until they are back."""
    scene = Scene(tmp_path)
    scene.runner.reading([0])
    care: Any = Care(("a.parquet", "b.parquet"), ())
    scene.runner._maintained(care)
    (trouble,) = scene.board.log_troubles()
    assert trouble.what == "files"
    assert f"{tmp_path / 'a.parquet'} of the log is missing, and 1 more" in trouble.reason
    assert "put it back" in trouble.hint and "docs/playbook.md" in trouble.hint
    assert 'evermark_log_unwell{source="shop",what="files"} 1.0' in scene.shown()
    scene.runner._maintained(care)
    assert scene.board.log_troubles() == []
    assert "evermark_log_unwell{" not in scene.shown()


def test_maintenance_waits_for_each_owner_to_have_looked_at_the_log(tmp_path: Path) -> None:
    """GIVEN a source that was owned here before WHEN it is owned again THEN its log is not maintained before this owner
    has set aside the commits that never reached the disk whole."""
    scene = Scene(tmp_path)
    scene.runner._owner.owned_partitions = lambda: [0]  # type: ignore[method-assign]
    scene.tools.prepared.set()
    scene.runner.owned()
    assert not scene.tools.prepared.is_set()
    scene.runner.released()
