"""Predicates over a long span, piece by piece: every event before a cursor was decided about, whatever is in doubt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evermark.delivery.model import Cursor, Fate
from evermark.delivery.run import post
from evermark.delivery.run.post import Posting, by_subscription
from evermark.delivery.webhook.base import Job
from evermark.delivery.work import Assignment, DeliveryOptions, Result, fold
from evermark.log.span import row_addresses
from evermark.secrets import KeyRef, SecretBox
from tests.unit.delivery.run.test_matched_here import PAYLOADS, assignments, span_of

DOUBT = '{"t": "a", "t": "b"}'
WHERES = (None, "data.t = 'a'", "data.t = 'a' and data.n > 1", "upper(data.t) = 'B'")
# The events of `PAYLOADS` that they want.
WANTED = ({0, 1, 2, 3}, {0, 2}, {2}, {1})


def found(mine: list[Assignment], *, historical: bool = True) -> tuple[list[list[str]], list[Result], set[str]]:
    """The events that each assignment wants, in order; how far they go; and who is in doubt from the start."""
    cuts: list[Result] = []
    in_doubt: set[str] = set()
    wanted: list[list[str]] = [[] for _ in mine]
    posting = Posting(tuple(mine), SecretBox(KeyRef("env", "KEY")), DeliveryOptions(historical=historical))
    for piece in posting.wanted(cuts, in_doubt):
        for number, _, rows in by_subscription(*piece):
            wanted[number] += rows.column("event_id").to_pylist()
    return wanted, cuts, in_doubt


@pytest.fixture
def few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(post, "_TESTED_ROWS_MAX", 3)
    monkeypatch.setattr(post, "_CHUNK_MATCHES", 5)


@pytest.mark.usefixtures("few_at_a_time")
@pytest.mark.parametrize("historical", [True, False])
def test_those_with_predicates_and_those_without_are_matched_in_one_pass(tmp_path: Path, historical: bool) -> None:
    """GIVEN more rows than are tested at a time, and a cursor inside THEN each has its events behind it, in order."""
    span = replace(span_of(tmp_path, 5 * PAYLOADS), begun=Cursor(0, "0001"))
    wanted, cuts, in_doubt = found(assignments(span, WHERES), historical=historical)
    assert wanted == [[f"e{n}" for n in range(2, 20) if n % 4 in mine] for mine in WANTED]
    assert not cuts and not in_doubt


@pytest.mark.usefixtures("few_at_a_time")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from([0, 1, 2, 3, 4]), min_size=1, max_size=12), st.sampled_from(["behind", "live", "much"]))
def test_no_event_is_passed_that_is_in_doubt(
    tmp_path_factory: pytest.TempPathFactory, kinds: list[int], how: str
) -> None:
    """GIVEN a payload that parsers disagree about, anywhere THEN who asks for it is cut off before the piece it is in,
    has everything before that, and is left to Spark if that is nothing; the others have all of theirs. In the live
    group all of it is left to Spark, unless there is too much to know beforehand."""
    payloads = [*PAYLOADS, DOUBT]
    span = span_of(tmp_path_factory.mktemp("log"), [payloads[kind] for kind in kinds])
    mine = assignments(span, WHERES)
    with pytest.MonkeyPatch.context() as patch:
        if how == "much":
            patch.setattr(post, "_KNOWN_MATCHES_MAX", -1)
        wanted, cuts, in_doubt = found(mine, historical=how == "behind")
    first = kinds.index(4) // 3 * 3 if 4 in kinds else None
    if how == "live" and first is not None:
        first = 0
    end = len(kinds) if first is None else first
    assert wanted[0] == [f"e{n}" for n in range(len(kinds))]
    for number in (1, 2, 3):
        assert wanted[number] == [f"e{n}" for n, kind in enumerate(kinds[:end]) if kind in WANTED[number]]
    reached = [Cursor(1)] * 4 if first is None else [Cursor(1), *[Cursor(0, f"{first - 1:04}" if first else "")] * 3]
    outcomes = fold(mine, cuts)
    assert [one.reached for one in outcomes] == reached
    assert {one.fate for one in outcomes[1:]} == {Fate.DONE if first is None else Fate.UNFINISHED}
    assert in_doubt == ({"s1", "s2", "s3"} if first == 0 else set())


def test_large_payloads_are_tested_fewer_at_a_time(tmp_path: Path) -> None:
    """GIVEN more bytes of payloads than a matcher takes at once, in one row group or among small ones THEN nobody is in
    doubt because of that; and small rows elsewhere are tested many at a time."""
    large = ['{"t": "a", "x": "' + "x" * 100_000 + f'{n}"}}' for n in range(100)]
    spans = [span_of(tmp_path, PAYLOADS * 1_000, 1), span_of(tmp_path, large, 2), span_of(tmp_path, PAYLOADS, 3)]
    span = replace(spans[0], to=3, paths=tuple(path for one in spans for path in one.paths))
    mine = assignments(span, WHERES)
    wanted, cuts, in_doubt = found(mine)
    assert [len(some) for some in wanted] == [4_104, 2_102, 1_001, 1_001] and not cuts and not in_doubt
    addresses = row_addresses(span.paths, 0, 0, 3, exact=True)
    specs = {n: one.spec for n, one in enumerate(mine)}
    sizes = [stop - start for start, stop in post._Tests(span, addresses, specs, [], set()).pieces(10_000)]
    assert sum(sizes) == 4_104 and sizes[0] >= 4_000 and len(sizes) == 3
    (tmp_path / "one group").mkdir()
    mixed = span_of(tmp_path / "one group", [*PAYLOADS * 1_000, *large])
    wanted, cuts, in_doubt = found(assignments(mixed, WHERES))
    assert [len(some) for some in wanted] == [4_100, 2_100, 1_000, 1_000] and not cuts and not in_doubt
    assert wanted[1][-101:] == ["e3998", *(f"e{n}" for n in range(4_000, 4_100))]


@pytest.mark.parametrize("wheres", [WHERES, WHERES[1:]])
def test_rows_that_are_at_hand_are_tested_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wheres: tuple[str | None, ...]
) -> None:
    """GIVEN a fresh batch that was handed to a task with its rows THEN each is sent only what its predicate wants."""
    sent: dict[str, list[str]] = {}

    class Sending:
        def deliver_each(self, jobs: Sequence[Job], *_: object) -> Iterator[Any]:
            for job in jobs:
                sent.setdefault(job.spec.name, []).extend(job.events.column("event_id").to_pylist())
            yield from ()

    monkeypatch.setattr(post, "Sinks", Sending)
    span = span_of(tmp_path, PAYLOADS)
    mine = assignments(replace(span, fresh=pq.read_table(span.paths[0])), wheres)
    list(Posting(tuple(mine), SecretBox(KeyRef("env", "KEY")), DeliveryOptions()).results())
    wanted = WANTED[-len(wheres) :]
    assert sent == {one.spec.name: [f"e{n}" for n in sorted(some)] for one, some in zip(mine, wanted, strict=True)}
