"""Small batches matched where they are posted: from memory or from files, and what is left to Spark."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from evermark.delivery.model import Cursor, SourcePartition, SubscriptionSpec
from evermark.delivery.run import matched_here as here
from evermark.delivery.run.matched_here import MatchedHere, is_small, matched_here
from evermark.delivery.work import Assignment, Span
from evermark.event import taken_batch
from evermark.log.write import BatchWriter

PAYLOADS = ['{"t": "a", "n": 1}', '{"t": "b", "n": 2}', '{"t": "a", "n": 3}', '{"n": 4}']
WHERES = (None, "data.t = 'a'", "data.t = 'a' and data.n > 1", "data.t rlike '^a'", "data.n >= 2")


def span_of(folder: Path, payloads: list[str], batch: int = 1) -> Span:
    rows = len(payloads)
    columns: dict[str, object] = {
        "event_id": [f"e{n}" if batch == 1 else f"e{batch}-{n}" for n in range(rows)],
        "position": [f"{n:04}" for n in range(rows)],
        "stream": [f"s{batch}"] * rows,
        "key": ["k"] * rows,
        "op": ["insert"] * rows,
        "payload": payloads,
    }
    file = BatchWriter(folder, "shop", 0, batch).write_all([taken_batch(columns, rows)])
    assert file is not None
    return Span(SourcePartition("shop", 0), Cursor(batch - 1), batch, (str(folder / file.path),), rows, exact=True)


def assignments(span: Span, wheres: tuple[str | None, ...] = WHERES) -> list[Assignment]:
    specs = [SubscriptionSpec(f"s{n}", "http://a.example", where=where) for n, where in enumerate(wheres)]
    return [Assignment(span, spec) for spec in specs]


def events(found: MatchedHere) -> dict[int, list[str]]:
    """By number of the assignment: the events it wants, in order."""
    assert found.found is not None
    rows, of_row, of = found.found
    ids = rows.column("event_id").to_pylist()
    wanted: dict[int, list[str]] = {}
    for row, number in zip(of_row.tolist(), of.tolist(), strict=True):
        wanted.setdefault(number, []).append(ids[row])
    return wanted


@pytest.mark.parametrize("fresh", [True, False])
def test_a_mixed_set_is_matched_here_but_for_what_only_spark_can(tmp_path: Path, fresh: bool) -> None:
    """GIVEN predicates with and without an exact form WHEN matched THEN the latter alone are left to Spark."""
    span = span_of(tmp_path, PAYLOADS)
    if fresh:
        span = replace(span, fresh=pq.read_table(span.paths[0]), paths=("there is no such file",))
    found = matched_here(assignments(span))
    assert found.for_spark == {3}
    assert events(found) == {0: ["e0", "e1", "e2", "e3"], 1: ["e0", "e2"], 2: ["e2"], 4: ["e1", "e2", "e3"]}


def test_a_span_begun_inside_its_batch_goes_on_there(tmp_path: Path) -> None:
    """GIVEN a cursor inside the batch WHEN matched, though the rows are at hand THEN only later rows are wanted."""
    span = span_of(tmp_path, PAYLOADS)
    fresh = replace(span, fresh=pq.read_table(span.paths[0]), begun=Cursor(0, "0001"))
    assert events(matched_here(assignments(fresh)))[1] == ["e2"]


def test_a_doubt_leaves_the_whole_subscription_to_spark(tmp_path: Path) -> None:
    """GIVEN one payload that parsers disagree about WHEN matched THEN nothing of those it concerns is posted here."""
    span = span_of(tmp_path, [*PAYLOADS, '{"t": "a", "t": "b"}'])
    found = matched_here(assignments(span))
    assert found.for_spark == {1, 2, 3, 4}
    assert events(found) == {0: ["e0", "e1", "e2", "e3", "e4"]}


def test_a_predicate_that_is_refused_by_now_is_left_to_spark(tmp_path: Path) -> None:
    """GIVEN a stored predicate that this version does not take WHEN matched THEN the others are matched."""
    found = matched_here(assignments(span_of(tmp_path, PAYLOADS), ("data.t = 'a'", "java_method('a')")))
    assert found.for_spark == {1}
    assert events(found) == {0: ["e0", "e2"]}


def test_nothing_wanted_is_nothing_posted(tmp_path: Path) -> None:
    """GIVEN a predicate that no row meets WHEN matched THEN there is no pair, and nothing is left to Spark."""
    found = matched_here(assignments(span_of(tmp_path, PAYLOADS), ("data.t = 'z'",)))
    assert not events(found) and not found.for_spark


def test_spans_that_are_too_large_to_hold_are_left_to_spark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN two spans of files, and room for one WHEN matched THEN the other one is Spark's."""
    large = [json.dumps({"t": "a", "x": "x" * 10_000 + str(n)}) for n in range(50)]
    spans = [span_of(tmp_path, large, batch) for batch in (1, 2)]
    both = [assignments(span, ("data.t = 'a'",))[0] for span in spans]
    monkeypatch.setattr(here, "BYTES_MAX", 800_000)
    found = matched_here(both)
    assert found.for_spark == {1}
    assert events(found) == {0: [f"e{n}" for n in range(50)]}


def test_several_spans_are_sent_side_by_side(tmp_path: Path) -> None:
    """GIVEN subscriptions at different places of the log WHEN matched THEN all are one piece, each with its own."""
    one, two, three = (span_of(tmp_path, PAYLOADS, batch) for batch in (1, 2, 3))
    fresh = replace(two, fresh=pq.read_table(two.paths[0]), paths=("there is no such file",))
    first, second = assignments(one, ("data.t = 'a'", "data.n > 3"))
    third, fourth = assignments(fresh, ("data.t = 'b'", None))
    (fifth,) = assignments(three, ("data.t = 'a' and stream = 's3'",))
    found = events(matched_here([first, third, second, fourth, fifth]))
    assert found[0] == ["e0", "e2"] and found[2] == ["e3"]
    assert found[1] == ["e2-1"] and found[3] == ["e2-0", "e2-1", "e2-2", "e2-3"]
    assert found[4] == ["e3-0", "e3-2"]


def test_few_rows_are_small(tmp_path: Path) -> None:
    """GIVEN several assignments of one span WHEN its rows are counted THEN they count once."""
    span = replace(span_of(tmp_path, PAYLOADS), rows=here.ROWS_MAX)
    assert is_small(assignments(span))
    assert not is_small(assignments(replace(span, rows=here.ROWS_MAX + 1)))
