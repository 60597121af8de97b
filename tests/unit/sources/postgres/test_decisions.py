"""Decisions of the Postgres source, without a server: when to offer, probe and confirm, and when to refuse."""

from __future__ import annotations

from dataclasses import replace

import pytest

from evermark.errors import EvermarkError, FormatError, GapError, IdentityError, SetupError
from evermark.secrets import Plain
from evermark.sources.postgres.lsn import Incarnation, Position
from evermark.sources.postgres.outbox import SCHEMA_VERSION, SCHEMA_VERSION_READ
from evermark.sources.postgres.read.pace import (
    CONFIRM_BYTES,
    CONFIRM_EVERY_S,
    EXPENSIVE_S,
    IDLE_OFFER_S,
    PROBE_BYTES_MAX,
    Confirming,
    Offering,
    Verdict,
)
from evermark.sources.postgres.repair.steps import Ending, ending
from evermark.sources.postgres.survey import Slot, Survey, outdated, trouble, wal_warnings
from evermark.sources.postgres.target import PostgresTarget

GIB = 1024**3
HERE = Incarnation(77, 1)
PLACE = PostgresTarget(Plain(""), "slot", "pub")
SLOT = Slot("pgoutput", "db", False, 900, 1000, "reserved", None, None)
SOUND = Survey(
    180000, "logical", False, 2000, "db", "f", "f", SCHEMA_VERSION, "", where="here", slot=SLOT, incarnation=HERE
)


def test_nothing_new_is_waited_for() -> None:
    """No WAL, no probe."""
    assert Offering().judge(100, 100, 0.0) is Verdict.WAIT


def test_little_wal_is_probed_and_what_held_nothing_is_not_probed_again() -> None:
    """One probe per move of the WAL."""
    offering = Offering()
    assert offering.judge(100, 200, 0.0) is Verdict.PROBE
    offering.probed(200, False, 0.001, 0.0)
    assert offering.judge(100, 200, 1.0) is Verdict.WAIT
    assert offering.judge(100, 201, 1.0) is Verdict.PROBE


def test_much_wal_is_offered_without_a_probe() -> None:
    """A probe of much WAL costs as much as reading it."""
    assert Offering().judge(100, 100 + PROBE_BYTES_MAX, 0.0) is Verdict.OFFER


def test_foreign_wal_is_offered_after_a_while() -> None:
    """So that an idle outbox lets the slot move on."""
    offering = Offering()
    offering.judge(100, 200, 0.0)
    offering.probed(200, False, 0.001, 0.0)
    assert offering.judge(100, 200, IDLE_OFFER_S - 0.1) is Verdict.WAIT
    assert offering.judge(100, 200, IDLE_OFFER_S) is Verdict.OFFER
    # AND the clock starts anew at the next position
    assert offering.judge(200, 300, IDLE_OFFER_S + 1) is Verdict.PROBE


def test_expensive_peeks_take_at_most_half_the_time() -> None:
    """A transaction open elsewhere makes every peek slow: rest as long as it took, then offer without a probe."""
    offering = Offering()
    offering.judge(100, 200, 0.0)
    offering.probed(200, False, 2.0, 2.0)
    assert offering.judge(100, 300, 3.9) is Verdict.WAIT
    assert offering.pause_s(3.0) == pytest.approx(1.0)
    assert offering.judge(100, 300, 4.0) is Verdict.OFFER
    # AND the price is forgotten in time, so that cheap peeks are probed again
    now, after = 4.0, 300
    for _ in range(10):
        now += 10
        verdict = offering.judge(after, after + 100, now)
        after += 100
    assert verdict is Verdict.PROBE
    assert offering.cost_s <= EXPENSIVE_S


def test_pause_is_short_after_activity_and_longer_when_idle() -> None:
    """Latency when there is something, rest when there is not."""
    offering = Offering()
    offering.judge(0, PROBE_BYTES_MAX, 10.0)
    assert offering.pause_s(10.5) < offering.pause_s(60.0) <= 0.05


def test_confirm_is_due_for_much_or_after_a_while() -> None:
    """The first at once; then a megabyte or a second, and never more than half the time."""
    confirming = Confirming()
    assert confirming.due(1000, 0.0)
    confirming.done(1000, 0.01, 0.0)
    assert not confirming.due(2000, 0.5)
    assert confirming.pending == 2000
    assert confirming.due(2000, CONFIRM_EVERY_S)
    assert confirming.due(1000 + CONFIRM_BYTES, 0.5)
    assert not confirming.due(1000, 99.0)
    confirming.done(2000, 5.0, 10.0)
    assert not confirming.due(2000 + CONFIRM_BYTES, 14.0)
    assert confirming.due(2000 + CONFIRM_BYTES, 15.0)


def test_sound_server_gives_no_trouble() -> None:
    """With and without a checkpoint; one exactly at the slot's position included."""
    assert trouble(SOUND, PLACE, None) is None
    assert trouble(SOUND, PLACE, Position(HERE, 1000)) is None


@pytest.mark.parametrize(
    ("survey", "resume", "kind", "word"),
    [
        (replace(SOUND, version=130000), None, SetupError, "version 13"),
        (replace(SOUND, standby=True), None, SetupError, "standby"),
        (replace(SOUND, wal_level="replica"), None, SetupError, "wal_level"),
        (replace(SOUND, schema_version=None), None, SetupError, "not installed"),
        (replace(SOUND, schema_version=SCHEMA_VERSION_READ - 1), None, SetupError, "older"),
        (replace(SOUND, schema_version=99), None, FormatError, "newer"),
        (SOUND, Position(Incarnation(78, 1), 1500), IdentityError, "not the one we left"),
        (SOUND, Position(Incarnation(77, 2), 1500), IdentityError, "not the one we left"),
        (SOUND, Position(HERE, 2001), IdentityError, "behind our checkpoint"),
        (SOUND, Position(HERE, 999), GapError, "moved past us"),
        (replace(SOUND, slot=None), None, SetupError, "no slot"),
        (replace(SOUND, slot=None), Position(HERE, 1500), GapError, "is gone"),
        (replace(SOUND, slot=replace(SLOT, wal_status="lost")), None, GapError, "invalidated"),
        (replace(SOUND, slot=replace(SLOT, invalidation_reason="idle_timeout")), None, GapError, "idle_timeout"),
        (replace(SOUND, slot=replace(SLOT, database="other")), None, SetupError, "belongs to"),
        (replace(SOUND, slot=replace(SLOT, plugin="wal2json")), None, SetupError, "belongs to"),
        (replace(SOUND, fingerprint_installed=None), None, SetupError, "not registered"),
        (replace(SOUND, fingerprint_now=None), None, SetupError, "is gone"),
        (replace(SOUND, fingerprint_now=None), Position(HERE, 1500), GapError, "is gone"),
        (replace(SOUND, fingerprint_now="g"), None, GapError, "changed by somebody"),
    ],
)
def test_trouble_is_named_and_has_a_hint(
    survey: Survey, resume: Position | None, kind: type[EvermarkError], word: str
) -> None:
    """Each way a server cannot give what follows has its kind, its words and what to do."""
    found = trouble(survey, PLACE, resume)
    assert found is not None
    assert type(found) is kind
    assert word in str(found)
    assert found.hint


@pytest.mark.parametrize(
    ("gauges", "names"),
    [
        ({}, set()),
        ({"wal_retained_bytes": 5 * GIB}, set()),
        ({"wal_retained_bytes": 4 * GIB, "wal_retained_limit_bytes": 4 * GIB}, set()),
        ({"wal_retained_bytes": 4 * GIB + 1, "wal_retained_limit_bytes": 4 * GIB}, {"wal_retained_bytes"}),
        ({"wal_retained_bytes": 80, "wal_safe_bytes": 20}, set()),
        ({"wal_retained_bytes": 81, "wal_safe_bytes": 19}, {"wal_safe_bytes"}),
        ({"wal_retained_bytes": 100, "wal_safe_bytes": -1}, {"wal_safe_bytes"}),
    ],
)
def test_a_limit_that_is_passed_is_warned_of(gauges: dict[str, float], names: set[str]) -> None:
    """Much WAL kept, or little left before the server throws the slot away."""
    assert set(wal_warnings(gauges)) == names


LOST = replace(SLOT, wal_status="lost")


@pytest.mark.parametrize(
    ("own", "spare", "left"),
    [
        (None, SLOT, Ending.RENAME),
        (LOST, SLOT, Ending.RENAME),
        (replace(SLOT, confirmed_lsn=900), SLOT, Ending.RENAME),  # the old one, which was not lost
        (SLOT, SLOT, Ending.DROP_SPARE),
        (SLOT, LOST, Ending.DROP_SPARE),
        (SLOT, None, Ending.NOTHING),
        (replace(SLOT, confirmed_lsn=900), None, Ending.NOTHING),
    ],
)
def test_the_slots_say_what_is_left_to_do_when_a_gap_is_closed(
    own: Slot | None, spare: Slot | None, left: Ending
) -> None:
    """GIVEN slots as a crash may leave them WHEN reading is to go on THEN one that gives all gets the name."""
    assert ending(own, spare, Position(HERE, 1000), PLACE) is left


@pytest.mark.parametrize(
    ("own", "spare"),
    [(None, None), (LOST, None), (None, LOST), (LOST, LOST), (LOST, replace(SLOT, confirmed_lsn=1001))],
)
def test_slots_that_cannot_give_what_follows_are_another_gap(own: Slot | None, spare: Slot | None) -> None:
    """GIVEN slots that were lost or moved meanwhile WHEN reading is to go on THEN that is said, not passed over."""
    with pytest.raises(GapError, match="lost"):
        ending(own, spare, Position(HERE, 1000), PLACE)


def test_an_outbox_of_the_version_before_is_read_with_a_warning() -> None:
    """GIVEN an outbox that was installed before an upgrade THEN it is read on, and what to run is said."""
    for version in range(SCHEMA_VERSION_READ, SCHEMA_VERSION):
        assert trouble(replace(SOUND, schema_version=version), PLACE, None) is None
        (warning,) = outdated(version).values()
        assert f"version {version}" in warning.said and "evermark source install" in warning.hint
    assert outdated(SCHEMA_VERSION) == {}
