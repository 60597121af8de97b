"""What a posting task keeps from one chunk of its rows to the next."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from evermark.delivery.model import Cursor, Fate, SourcePartition, SubscriptionSpec
from evermark.delivery.run import post as posting
from evermark.delivery.webhook import dispatch
from evermark.delivery.webhook.base import Job, Result
from evermark.delivery.webhook.signing import new_secret
from evermark.delivery.webhook.sink import WebhookSink
from evermark.delivery.work import Assignment, DeliveryOptions, Span, fold
from evermark.event import taken_batch
from evermark.log.append import DeltaLog
from evermark.log.base import Append
from evermark.log.maintenance import Maintenance
from evermark.log.read import LogReader
from evermark.log.row_reader import code_of
from evermark.log.write import BatchWriter
from evermark.secrets import KeyRef, SecretBox
from evermark.spark import deliver, parts, replay
from evermark.spark.match import TESTED_MAX
from evermark.testing.listener import Failing, Listener


@pytest.fixture
def receiver() -> Iterator[Listener]:
    """Refuses the first request it gets, and takes all others."""
    with Listener(secrets=[SECRET], failing=Failing.parse("422:1")) as listener:
        yield listener


SECRET = new_secret()
SEED = 20261115


def span_of(folder: Path, keys: str) -> Span:
    """A batch of events, one for each key, in a file of its own."""
    rows = len(keys)
    columns: dict[str, object] = {
        "event_id": [f"e{n}" for n in range(1, rows + 1)],
        "position": [f"{n:04}" for n in range(rows)],
        "stream": ["s"] * rows,
        "key": list(keys),
        "op": ["insert"] * rows,
        "payload": ["{}"] * rows,
    }
    file = BatchWriter(folder, "shop", 0, 1).write_all([taken_batch(columns, rows)])
    assert file is not None
    return Span(SourcePartition("shop", 0), Cursor(0), 1, (str(folder / file.path),), rows, exact=True)


def task(*given: Any) -> deliver.PostHere:
    """The task of a delivery job that matches by itself."""
    return deliver.PostHere(posting.Posting(*given))


@pytest.mark.parametrize(("ordered", "parked"), [(True, ["e1", "e2"]), (False, ["e1"])])
def test_what_one_chunk_parks_holds_back_its_key_in_the_next(
    tmp_path: Path, receiver: Listener, ordered: bool, parked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN `ordered` WHEN an event is refused in one chunk THEN the next of its key waits, and no other key does."""
    monkeypatch.setenv("POSTING_KEY", "a key for this test only")
    box = SecretBox(KeyRef("env", "POSTING_KEY"))
    spec = SubscriptionSpec("one", receiver.url, (box.seal(SECRET),), ordered=ordered, allow_networks=("127.0.0.0/8",))
    monkeypatch.setattr(posting, "_CHUNK_ROWS", 1)
    post = deliver.PostHere(posting.Posting((Assignment(span_of(tmp_path, "aab"), spec),), box, DeliveryOptions()))
    found = [one for row in post(0) for one in row["parked"]]
    assert [one["event_id"] for one in found] == parked
    taken = {record.event.id for record in receiver.records}
    assert taken == {"e1", "e2", "e3"} - set(parked)


def test_d10_the_bound_of_held_events_counts_all_chunks_and_what_was_parked_before(
    tmp_path: Path, receiver: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN one parked and a bound of 3 held WHEN five more of its key come, a chunk each THEN three are held."""
    monkeypatch.setenv("POSTING_KEY", "a key for this test only")
    monkeypatch.setattr(dispatch, "HELD_PER_LINE_MAX", 3)
    monkeypatch.setattr(posting, "_CHUNK_ROWS", 1)
    box = SecretBox(KeyRef("env", "POSTING_KEY"))
    spec = SubscriptionSpec("one", receiver.url, (box.seal(SECRET),), ordered=True, allow_networks=("127.0.0.0/8",))
    options = DeliveryOptions(
        held={"one": {(SourcePartition("shop", 0), "s", "a"): 1, (SourcePartition("shop", 0), "other", "b"): 9}}
    )
    post = deliver.PostHere(posting.Posting((Assignment(span_of(tmp_path, "aaaaa"), spec),), box, options))
    found = list(post(0))
    assert [one["fate"] for one in found] == ["done", "done", "done", "full"]
    assert [parked["event_id"] for one in found for parked in one["parked"]] == ["e1", "e2", "e3"]
    assert not receiver.records


def test_d1_a_batch_of_several_chunks_is_kept_as_far_as_it_was_done(
    tmp_path: Path, receiver: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN room for one, and chunks of two rows WHEN a second one has to be parked THEN all before it is kept."""
    monkeypatch.setenv("POSTING_KEY", "a key for this test only")
    monkeypatch.setattr(posting, "_CHUNK_ROWS", 2)
    box = SecretBox(KeyRef("env", "POSTING_KEY"))
    spec = SubscriptionSpec("one", receiver.url, (box.seal(SECRET),), ordered=True, allow_networks=("127.0.0.0/8",))
    # The first of key a is refused, the sixth event is of the same key: it would have to wait behind it.
    assignment = Assignment(span_of(tmp_path, "abcdeafg"), replace(spec, concurrency=1), parked_room=1)
    post = task((assignment,), box, DeliveryOptions())
    (found,) = fold([assignment], parts.results_of([assignment], post(0)))
    assert (found.reached.batch, found.reached.through, found.fate) == (0, "0004", Fate.FULL)
    assert [one.event_id for one in found.parked] == ["e1"]
    # WHEN it begins there the next time THEN the rest comes
    receiver.records.clear()
    rest = replace(assignment, span=replace(assignment.span, begun=found.reached), parked_room=9)
    options = DeliveryOptions(held={"one": {(SourcePartition("shop", 0), "s", "a"): 1}})
    (ended,) = fold([rest], parts.results_of([rest], task((rest,), box, options)(0)))
    assert (ended.reached.batch, ended.fate, ended.accepted) == (1, Fate.DONE, 2)
    assert [record.event.id for record in receiver.records] == ["e7", "e8"]
    assert [one.event_id for one in ended.parked] == ["e6"]


@pytest.mark.parametrize(("waited_s", "worked_s", "left_s"), [(300, 0, 30), (0, 20, 10), (0, 31, 0)])
def test_d13_the_time_for_a_piece_of_work_begins_when_its_task_does(
    tmp_path: Path, receiver: Listener, monkeypatch: pytest.MonkeyPatch, waited_s: float, worked_s: float, left_s: float
) -> None:
    """GIVEN 30 s WHEN the task begins minutes after it was planned THEN it has them all; once begun, they run out."""
    monkeypatch.setenv("POSTING_KEY", "a key for this test only")
    box = SecretBox(KeyRef("env", "POSTING_KEY"))
    spec = SubscriptionSpec("one", receiver.url, (box.seal(SECRET),), allow_networks=("127.0.0.0/8",))
    now = [1_000.0]
    monkeypatch.setattr(posting, "time", SimpleNamespace(monotonic=lambda: now[0]))
    post = deliver.PostHere(
        posting.Posting((Assignment(span_of(tmp_path, "ab"), spec),), box, DeliveryOptions(budget_s=30))
    )
    now[0] += waited_s
    given: list[float] = []
    real = WebhookSink.deliver_each

    def deliver_each(self: WebhookSink, jobs: Sequence[Job], budget_s: float, *rest: Any) -> Iterator[list[Result]]:
        given.append(budget_s)
        return real(self, jobs, budget_s, *rest)

    monkeypatch.setattr(WebhookSink, "deliver_each", deliver_each)
    monkeypatch.setattr(posting, "require_codes", lambda _paths: now.__setitem__(0, now[0] + worked_s))
    assert list(post(0))
    assert given == [left_s]


def test_p13_large_rows_are_read_a_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN rows of 100 kB WHEN a task reads them, to deliver or to replay THEN it never holds many of them at once."""
    rows, size = 60, 100_000
    columns: dict[str, object] = {
        "event_id": [f"e{n:02}" for n in range(rows)],
        "position": [f"{n:04}" for n in range(rows)],
        "stream": ["s"] * rows,
        "op": ["insert"] * rows,
        "payload": [f'"{random.Random(n).randbytes(size // 2).hex()}"' for n in range(rows)],
    }
    file = BatchWriter(tmp_path, "shop", 0, 1).write_all([taken_batch(columns, rows)])
    assert file is not None
    path = str(tmp_path / file.path)
    codes, numbers = np.full(rows, code_of(path)), np.arange(rows)
    monkeypatch.setattr(posting, "_CHUNK_BYTES", 10 * size)
    monkeypatch.setattr(replay, "ROUND_BYTES", 10 * size)
    # WHEN two want each of them
    places = [(codes.repeat(2), numbers.repeat(2), np.tile([0, 1], rows))]
    pieces = list(posting.read((path,), places))
    assert max(piece.nbytes for piece, _, _ in pieces) <= 12 * size
    assert sum(piece.num_rows for piece, _, _ in pieces) == rows
    assert sum(len(of) for _, _, of in pieces) == 2 * rows
    replayed = list(replay.rows_at(codes, numbers, (path,)))
    assert max(piece.nbytes for piece in replayed) <= 12 * size
    assert [i for piece in replayed for i in piece.column("event_id").to_pylist()] == columns["event_id"]


class Log:
    """Batches of two partitions in the same order as their positions, and rows that nobody may get."""

    def __init__(self, folder: Path, batches: int = 40, rows: int = 4) -> None:
        self.folder = folder / "shop"
        rng = random.Random(SEED)
        log = DeltaLog(self.folder)
        self.wanted: list[tuple[int, int, str, str, str]] = []  # partition, batch, stream, op, event
        for batch in range(1, batches + 1):
            for partition in (0, 1):
                streams = [rng.choice(["a", "b", "c"]) for _ in range(rows)]
                ops = [rng.choice(["insert", "update", "control"]) for _ in range(rows)]
                ids = [f"{partition}-{batch:03}-{n}" for n in range(rows)]
                columns: dict[str, object] = {"event_id": ids, "position": ids, "stream": streams, "op": ops}
                file = BatchWriter(self.folder, "shop", partition, batch).write_all([taken_batch(columns, rows)])
                assert file is not None
                log.commit(Append(partition, batch, 1, "", "", (file,)))
                self.wanted += zip([partition] * rows, [batch] * rows, streams, ops, ids, strict=True)
        self.reader = LogReader(self.folder)

    def ids(self, partition: int, after: int, to: int, streams: tuple[str, ...], ops: tuple[str, ...]) -> list[str]:
        return [
            event
            for p, batch, stream, op, event in self.wanted
            if p == partition and after < batch <= to and op != "control"
            and (not streams or stream in streams) and (not ops or op in ops)
        ]  # fmt: skip


@pytest.mark.parametrize("merged", [False, True])
def test_found_by_the_task_or_by_spark_everybody_gets_what_is_theirs_in_order(
    spark: SparkSession, tmp_path: Path, merged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN batches in files of their own or merged WHEN a span is looked for THEN both ways find it, in order."""
    monkeypatch.setenv("POSTING_KEY", "a key for this test only")
    box = SecretBox(KeyRef("env", "POSTING_KEY"))
    log = Log(tmp_path)
    if merged:
        assert Maintenance(log.folder).run().compacted
    # More than are tested one by one: some are looked up, which is a join, before which Spark drops a sort.
    choices = 4 * [((), ()), (("a",), ()), (("a", "b"), ("insert",)), ((), ("update",)), (("nobody",), ())]
    assert len(choices) > TESTED_MAX
    specs = tuple(
        SubscriptionSpec(f"s{n}", "http://a.example", streams=streams, ops=ops)
        for n, (streams, ops) in enumerate(choices)
    )

    def span(partition: int, after: int, to: int) -> Span:
        paths = tuple(file.path for file in log.reader.files_of(partition, after, to))
        return Span(SourcePartition("shop", partition), Cursor(after), to, paths, 1, exact=not merged)

    def from_inside(of: Span, through: str) -> Span:
        return replace(of, begun=replace(of.begun, through=through))

    def wanted_by(of: Span, streams: tuple[str, ...], ops: tuple[str, ...]) -> list[str]:
        return log.ids(of.place.partition, of.after, of.to, streams, ops)

    # WHEN all want the same span, or each one of its own THEN they are found in one go
    three = [span(1, 0, 40), span(1, 3, 4), span(0, 25, 37)]
    # WHEN some begin inside a batch THEN they have the rest of it
    inside = [from_inside(three[0], "1-001-1"), from_inside(three[2], "0-026-2"), three[2]]
    for spans in ([three[0]], [three[1]], [three[2]], three, inside):
        assignments = tuple(Assignment(spans[n % len(spans)], one) for n, one in enumerate(specs))
        post = task(assignments, box, DeliveryOptions())
        by_spark = deliver.SparkDeliverer(spark.sparkContext, box)._wanted(assignments)
        assert by_spark.rdd.getNumPartitions() == 1
        ways = [post.posting._found_here([], set()), map(posting.addresses_of, by_spark.toArrow().to_batches())]
        for places in ways:
            found: dict[int, list[str]] = {n: [] for n in range(len(specs))}
            for wanted in posting.read(posting.paths_of(assignments), posting.gathered(places)):
                for number, _, rows in posting.by_subscription(*wanted):
                    found[number] += rows.column("event_id").to_pylist()
            wanted_ids = {
                n: [i for i in wanted_by(assignment.span, *choice) if i > assignment.span.begun.through]
                for n, (assignment, choice) in enumerate(zip(assignments, choices, strict=True))
            }
            assert found == wanted_ids


def test_d13_assignments_of_several_spans_run_side_by_side_and_each_has_its_own_time(
    spark: SparkSession, tmp_path: Path, receiver: Listener
) -> None:
    """GIVEN one receiver that is down and one that is well WHEN they share a job THEN each has its result and time."""
    key = tmp_path / "key"
    key.write_text("a key for this test only")
    key.chmod(0o600)
    box = SecretBox(KeyRef("file", str(key)))
    log = Log(tmp_path)
    specs = [
        SubscriptionSpec(name, url, (box.seal(SECRET),), streams=("a",), where=where, allow_networks=("127.0.0.0/8",))
        for name, url, where in (
            ("well", receiver.url, None),
            ("down", "http://127.0.0.1:9/", None),
            ("choosy", receiver.url, "op = 'insert'"),
        )
    ]
    ranges = {"well": (0, 5), "down": (2, 9), "choosy": (7, 11)}
    assignments = []
    for spec in specs:
        after, to = ranges[spec.name]
        paths = tuple(file.path for file in log.reader.files_of(0, after, to))
        assignments.append(
            Assignment(Span(SourcePartition("shop", 0), Cursor(after), to, paths, 1), spec, probe=spec.name == "down")
        )
    found = {
        one.subscription: one
        for one in deliver.SparkDeliverer(spark.sparkContext, box).deliver(assignments, DeliveryOptions(budget_s=60))
    }
    assert found["down"].fate is Fate.ENDPOINT_FAILED
    assert found["down"].reached.batch < 9
    assert [found[name].reached.batch for name in ("well", "choosy")] == [5, 11]
    refused = [one.event_id for name in ("well", "choosy") for one in found[name].parked]
    assert len(refused) == 1  # by the receiver's first answer
    ids = {*log.ids(0, 0, 5, ("a",), ()), *log.ids(0, 7, 11, ("a",), ("insert",))}
    assert {record.event.id for record in receiver.records} == ids - set(refused)
    assert all(one.took_s is not None and 0 < one.took_s < 60 for one in found.values())


def test_d6_what_is_too_old_is_passed_over_and_counted_and_nobody_is_asked(
    spark: SparkSession, tmp_path: Path, receiver: Listener
) -> None:
    """GIVEN one whose time for these events is over and one whose is not THEN the first passes them, counted."""
    key = tmp_path / "key"
    key.write_text("a key for this test only")
    key.chmod(0o600)
    box = SecretBox(KeyRef("file", str(key)))
    log = Log(tmp_path)
    paths = tuple(file.path for file in log.reader.files_of(0, 0, 5))
    span = Span(SourcePartition("shop", 0), Cursor(0), 5, paths, 1)
    specs = [
        SubscriptionSpec(name, receiver.url, (box.seal(SECRET),), streams=("a",), allow_networks=("127.0.0.0/8",))
        for name in ("late", "young")
    ]
    soon = datetime.now(UTC) + timedelta(hours=1)
    assignments = [Assignment(span, specs[0], expires_before=soon), Assignment(span, specs[1])]
    late, young = deliver.SparkDeliverer(spark.sparkContext, box).deliver(assignments, DeliveryOptions())
    wanted = log.ids(0, 0, 5, ("a",), ())
    assert (late.reached.batch, late.fate, late.accepted) == (5, Fate.DONE, 0)
    assert (late.expired, young.expired) == (len(wanted), 0)
    assert len(receiver.records) == len(wanted) - len(young.parked)


@pytest.mark.parametrize("young", [False, True])
def test_d6_what_expires_for_one_that_is_stopped_is_counted_and_nothing_is_sent(
    tmp_path: Path, receiver: Listener, young: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN one to whom nothing is sent WHEN a span is passed over THEN its old rows are counted, no request is made,
    not even for a row that is young after all.
    """
    monkeypatch.setenv("POSTING_KEY", "a key for this test only")
    box = SecretBox(KeyRef("env", "POSTING_KEY"))
    spec = SubscriptionSpec("one", receiver.url, (box.seal(SECRET),), allow_networks=("127.0.0.0/8",))
    before = datetime.now(UTC) + timedelta(hours=-1 if young else 1)
    assignment = Assignment(span_of(tmp_path, "aab"), spec, expires_before=before)
    post = deliver.PostHere(posting.Posting((assignment,), box, DeliveryOptions(historical=True, sends=False)))
    (found,) = fold([assignment], parts.results_of([assignment], post(0)))
    told = (found.fate, found.reached.batch, found.expired, found.accepted)
    assert told == ((Fate.UNFINISHED, 0, 0, 0) if young else (Fate.DONE, 1, 3, 0))
    assert not receiver.records


def test_rows_at_hand_are_sent_as_the_rows_of_their_file_are(
    tmp_path: Path, receiver: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN a batch that was just taken WHEN it is posted from memory THEN bodies and results are those of its file."""
    monkeypatch.setenv("POSTING_KEY", "a key for this test only")
    box = SecretBox(KeyRef("env", "POSTING_KEY"))
    spec = SubscriptionSpec("one", receiver.url, (box.seal(SECRET),), concurrency=1, allow_networks=("127.0.0.0/8",))
    none_of_it = replace(spec, name="two", streams=("other",))
    receiver.failing = None
    read = span_of(tmp_path, "abca")
    fresh = replace(read, fresh=pq.read_table(read.paths[0]))
    assert pickle.loads(pickle.dumps(fresh)) == read and pickle.loads(pickle.dumps(fresh)).fresh is None
    ways = []
    for span in (read, replace(fresh, paths=("there is no such file",))):
        receiver.records.clear()
        assignments = (Assignment(span, spec), Assignment(span, none_of_it))
        results = [
            (one.subscription, one.batch, one.through, one.outcome.fate, one.outcome.accepted, len(one.outcome.parked))
            for some in posting.Posting(assignments, box, DeliveryOptions()).results()
            for one in some
        ]
        ways.append((results, [record.event for record in receiver.records]))
    assert ways[0] == ways[1] and ways[0][1]


def test_predicates_are_matched_by_the_tasks_that_post_and_by_spark_only_where_they_are_in_doubt(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN a long span and predicates that tasks can match WHEN one payload is read differently by parsers THEN, turn
    by turn, each is sent what it wants once: by Spark's matching where the doubt is, and only there."""
    key = tmp_path / "key"
    key.write_text("a key for this test only")
    key.chmod(0o600)
    box = SecretBox(KeyRef("file", str(key)))
    rows = posting._TESTED_ROWS_MAX + 500
    doubt = rows - 100
    columns: dict[str, object] = {
        "event_id": [f"e{n}" for n in range(rows)],
        "position": [f"{n:05}" for n in range(rows)],
        "stream": ["s"] * rows,
        "key": [str(n) for n in range(rows)],
        "op": ["insert"] * rows,
        "payload": ['{"t": "a", "t": "b"}' if n == doubt else f'{{"t": "{"ba"[n % 500 == 0]}"}}' for n in range(rows)],
    }
    file = BatchWriter(tmp_path, "shop", 0, 1).write_all([taken_batch(columns, rows)])
    assert file is not None
    span = Span(SourcePartition("shop", 0), Cursor(0), 1, (str(tmp_path / file.path),), rows, exact=True)
    monkeypatch.setattr(deliver, "is_small", lambda _: False)  # which what is left after the first turn would be
    by_spark: list[list[str]] = []
    wanted = deliver.SparkDeliverer._wanted

    def noted(self: Any, mine: Sequence[Assignment]) -> Any:
        by_spark.append([one.spec.name for one in mine])
        return wanted(self, mine)

    monkeypatch.setattr(deliver.SparkDeliverer, "_wanted", noted)
    deliverer = deliver.SparkDeliverer(spark.sparkContext, box)
    with Listener(secrets=[SECRET]) as one, Listener(secrets=[SECRET]) as other:
        specs = [
            SubscriptionSpec(name, url, (box.seal(SECRET),), where=where, allow_networks=("127.0.0.0/8",))
            for name, url, where in (
                ("picky", one.url, "data.t = 'a'"),
                ("by key", other.url, f"key in ('7', '{rows - 1}')"),
            )
        ]
        cursors = {spec.name: span.begun for spec in specs}
        turns = 0
        while any(cursor != Cursor(1) for cursor in cursors.values()):
            behind = [
                Assignment(replace(span, begun=cursors[spec.name]), spec)
                for spec in specs
                if cursors[spec.name] != Cursor(1)
            ]
            for outcome in deliverer.deliver(behind, DeliveryOptions(historical=True, budget_s=60)):
                assert outcome.reached > cursors[outcome.subscription], "each turn gets further"
                cursors[outcome.subscription] = outcome.reached
            turns += 1
        # Spark takes the last of two equal names, or the first: what it says is what holds.
        sent = [record.event.id for record in one.records]
        assert sorted(each for each in sent if each != f"e{doubt}") == sorted(f"e{n}" for n in range(0, rows, 500))
        assert sorted(record.event.id for record in other.records) == sorted(["e7", f"e{rows - 1}"])
    assert by_spark == [["picky"]] and turns == 2
