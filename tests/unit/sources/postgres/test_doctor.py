"""From what was seen to what is said of it: every finding, without a server."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from evermark.errors import UnreachableError
from evermark.observe.finding import Finding, Grade, worst
from evermark.secrets import Plain
from evermark.sources.kinds import SourceState
from evermark.sources.postgres.admin.doctor import (
    CapturedFacts,
    EventFacts,
    Facts,
    OpenTransaction,
    OutboxFacts,
    PartitionFacts,
    ServerFacts,
    SlotFacts,
    judged,
    size,
)
from evermark.sources.postgres.lsn import Incarnation
from evermark.sources.postgres.outbox import SCHEMA_VERSION, SCHEMA_VERSION_READ
from evermark.sources.postgres.slots import Slot
from evermark.sources.postgres.target import PostgresTarget, TableChoice

GIB = 1024**3
PLACE = PostgresTarget(Plain(""), "slot", "pub", tables=(TableChoice("public.orders"),))
SERVER = ServerFacts(
    where="here:5432/shop", version=180004, wal_level="logical", standby=False, database="shop", role="evermark",
    may_use_slots=True, senders_max=10, senders_used=1, slots_max=10, slots_used=1, slot_wal_keep_bytes=50 * GIB,
    slot_idle_s=0, flush_lsn=100 * GIB, clock_ahead_s=0.0, sees_others=True, may_log_snapshot=True, sync_standbys="",
)  # fmt: skip
SLOT = Slot("pgoutput", "shop", False, 100 * GIB - 1000, 100 * GIB - 500, "reserved", None, 49 * GIB)
SLOT_FACTS = SlotFacts(0, "slot", SLOT, None, True, "slot_mend", False, "pub", True, True, "f", "f")
OUTBOX = OutboxFacts(
    version=SCHEMA_VERSION,
    missing_rights=(),
    captured=(CapturedFacts("public.orders", "public.orders", "A", "A", False, "!pgstream_capture"),),
    partitions=PartitionFacts(7, True, 0, 0, 0, 8192),
    events=EventFacts("2026-11-01 00:00:00+00", "2026-11-15 00:00:00+00", 12, True),
)
SOUND = Facts(server=SERVER, slots=(SLOT_FACTS,), outbox=OUTBOX)
KEPT = SourceState("host:1", {0: Incarnation(7, 1).at(100 * GIB - 500)})


def with_server(**changes: Any) -> Facts:
    return replace(SOUND, server=replace(SERVER, **changes))


def with_slot(kept: dict[str, Any] | None = None, **changes: Any) -> Facts:
    """Changes of the slot itself, and (`kept`) of what belongs to it."""
    return replace(SOUND, slots=(replace(SLOT_FACTS, slot=replace(SLOT, **changes), **(kept or {})),))


def with_slot_facts(**changes: Any) -> Facts:
    return replace(SOUND, slots=(replace(SLOT_FACTS, **changes),))


def with_outbox(**changes: Any) -> Facts:
    return replace(SOUND, outbox=replace(OUTBOX, **changes))


def with_table(**changes: Any) -> Facts:
    assert OUTBOX.captured is not None
    return with_outbox(captured=(replace(OUTBOX.captured[0], **changes),))


def with_days(**changes: Any) -> Facts:
    assert OUTBOX.partitions is not None
    return with_outbox(partitions=replace(OUTBOX.partitions, **changes))


def ill(facts: Facts, kept: SourceState | None = KEPT) -> list[Finding]:
    return [finding for finding in judged(facts, PLACE, kept) if finding.grade is not Grade.OK]


def test_a_sound_outbox_has_nothing_to_complain_of() -> None:
    """GIVEN all as it should be WHEN judged THEN every check is ok, with or without state."""
    assert ill(SOUND) == [] and ill(SOUND, None) == []
    assert worst(judged(SOUND, PLACE, KEPT)) is Grade.OK


# What is seen, the check that says so, its grade, and a word of what to run.
FINDINGS: list[tuple[str, Facts, str, Grade, str]] = [
    ("old server", with_server(version=130010), "version", Grade.WRONG, "14"),
    ("standby", with_server(standby=True), "primary", Grade.WRONG, "primary"),
    ("wal_level", with_server(wal_level="replica"), "wal_level", Grade.WRONG, "alter system set wal_level"),
    ("no right", with_server(may_use_slots=False), "replication", Grade.WRONG, 'alter role "evermark" replication'),
    (
        "commits wait for us",
        with_server(sync_standbys="ANY 1 (*)"),
        "synchronous_standbys",
        Grade.WARNING,
        "pg_reload_conf",
    ),
    ("no snapshots", with_server(may_log_snapshot=False), "idle_wal", Grade.WARNING, "pg_log_standby_snapshot"),
    ("few senders", with_server(senders_used=9), "wal_senders", Grade.WARNING, "max_wal_senders = 20"),
    ("no sender", replace(SOUND, walsender=UnreachableError("no", hint="why")), "wal_senders", Grade.WRONG, "why"),
    ("full slots", with_server(slots_used=10), "replication_slots", Grade.WARNING, "max_replication_slots = 20"),
    ("no limit", with_server(slot_wal_keep_bytes=None), "wal_limit", Grade.WARNING, "max_slot_wal_keep_size = "),
    ("idle limit", with_server(slot_idle_s=600), "idle_limit", Grade.WARNING, "idle_replication_slot_timeout"),
    ("blind", with_server(sees_others=False), "transactions", Grade.WARNING, "grant pg_read_all_stats"),
    ("clock ahead", with_server(clock_ahead_s=9.0), "clock", Grade.WARNING, "synchronise"),
    ("clock behind", with_server(clock_ahead_s=-9.0), "clock", Grade.WARNING, "synchronise"),
    ("rights", with_outbox(missing_rights=("grant a;", "grant b;")), "rights", Grade.WRONG, "grant a; grant b;"),
    ("too old outbox", with_outbox(version=SCHEMA_VERSION_READ - 1), "outbox", Grade.WRONG, "evermark source install"),
    ("older outbox", with_outbox(version=SCHEMA_VERSION - 1), "outbox", Grade.WARNING, "evermark source install"),
    ("partition", with_outbox(unwatched=("public.p9",)), "partitioned_tables", Grade.WARNING, "watch_partitions()"),
    ("newer outbox", with_outbox(version=SCHEMA_VERSION + 1), "outbox", Grade.WRONG, "upgrade Evermark"),
    ("odd outbox", with_outbox(version=None), "outbox", Grade.WRONG, "evermark source install"),
    ("no publication", with_slot_facts(published=False), "publication", Grade.WRONG, "evermark source install"),
    ("no reader", with_slot_facts(registered=False), "publication", Grade.WRONG, "evermark source install"),
    ("publication changed", with_slot_facts(fingerprint_now="g"), "publication", Grade.WRONG, "source recover"),
    ("slot gone", with_slot_facts(slot=None), "slot", Grade.WRONG, "source recover"),
    ("slot lost", with_slot(wal_status="lost"), "slot", Grade.WRONG, "source recover"),
    ("slot idle", with_slot(invalidation_reason="idle_timeout"), "slot", Grade.WRONG, "source recover"),
    ("slot elsewhere", with_slot(database="other"), "slot", Grade.WRONG, "another `name`"),
    ("slot of another plugin", with_slot(plugin="wal2json"), "slot", Grade.WRONG, "another `name`"),
    ("nearly lost", with_slot(wal_status="unreserved"), "slot", Grade.WARNING, "playbook"),
    ("no failover", with_slot_facts(failover=False), "failover", Grade.WARNING, "ALTER_REPLICATION_SLOT"),
    ("spare slot", with_slot_facts(spare=True), "spare_slot", Grade.WARNING, "pg_drop_replication_slot('slot_mend')"),
    ("much WAL", with_slot(restart_lsn=95 * GIB, safe_wal_bytes=None), "wal_retained", Grade.WARNING, "playbook"),
    ("little left", with_slot(restart_lsn=97 * GIB, safe_wal_bytes=100), "wal_retained", Grade.WARNING, "playbook"),
    ("not captured", with_outbox(captured=()), "tables", Grade.WRONG, "evermark source install"),
    ("stale", with_table(stale=True), "tables", Grade.WARNING, "again"),
    ("trigger off", with_table(rows="D"), "triggers", Grade.WRONG, 'enable always trigger "!pgstream_capture"'),
    ("truncate off", with_table(truncate="D"), "triggers", Grade.WRONG, "enable always trigger pgstream_truncate"),
    ("trigger gone", with_table(truncate=""), "triggers", Grade.WRONG, "evermark source install"),
    ("older trigger", with_table(trigger="pgstream_capture"), "triggers", Grade.WARNING, "evermark source install"),
    ("lent rights", with_table(lends="postgres", owner="app"), "capture_rights", Grade.WARNING, "as the tables' owner"),
    ("not always", with_table(rows="O"), "triggers", Grade.WARNING, 'enable always trigger "!pgstream_capture"'),
    ("no tomorrow", with_days(ahead=0), "partitions", Grade.WARNING, "source maintain"),
    ("no today", with_days(today=False), "partitions", Grade.WARNING, "source maintain"),
    ("default rows", with_days(default_rows=3), "default_partition", Grade.WARNING, "events_default"),
    ("past", with_days(past=3, past_days=3), "retention", Grade.WARNING, "source maintain"),
    ("part of it gone", with_outbox(lacks=("pgstream.readers",)), "outbox", Grade.WRONG, "evermark source install"),
    ("no partitions", with_outbox(partitions=None), "partitions", Grade.WRONG, "evermark source install"),
    ("unseen", replace(SOUND, unseen=("events: denied",)), "unseen", Grade.WARNING, "install --print"),
    (
        "open transaction",
        replace(SOUND, transactions=(OpenTransaction(900.0, "process 7", "select pg_terminate_backend(7);"),)),
        "transactions",
        Grade.WARNING,
        "pg_terminate_backend(7)",
    ),
]


@pytest.mark.parametrize(("facts", "check", "grade", "mend"), [f[1:] for f in FINDINGS], ids=[f[0] for f in FINDINGS])
def test_each_trouble_is_found_and_alone(facts: Facts, check: str, grade: Grade, mend: str) -> None:
    """GIVEN one thing amiss WHEN judged THEN exactly that is said, with what to run about it."""
    (found,) = ill(facts)
    assert (found.check, found.grade) == (check, grade)
    assert mend in found.mend


def test_a_server_that_does_not_answer_ends_the_examination() -> None:
    """GIVEN no connection WHEN judged THEN that is all there is to say."""
    (found,) = judged(Facts(unreachable=UnreachableError("nobody", hint="is it up?")), PLACE, None)
    assert (found.check, found.grade, found.mend) == ("reachable", Grade.WRONG, "is it up?")


def test_nothing_installed_names_one_command() -> None:
    """GIVEN an empty database WHEN judged THEN outbox, publication and slot are wrong, and install repairs them."""
    facts = Facts(server=SERVER, slots=(replace(SLOT_FACTS, slot=None, published=False, registered=None),))
    found = ill(facts, None)
    assert [finding.check for finding in found] == ["outbox", "publication", "slot"]
    assert all("evermark source install" in finding.mend for finding in found)


def test_a_slot_held_by_a_stranger_is_said_and_by_our_instance_is_not() -> None:
    """GIVEN an active slot WHEN nobody of ours runs THEN a warning names the process; with an owner it is well."""
    facts = with_slot({"active_pid": 42}, active=True)
    assert ill(facts) == [] and ill(facts, None) == []
    (found,) = ill(facts, replace(KEPT, owner=None))
    assert found.check == "slot" and "42" in found.mend


def test_the_second_slot_is_well_while_a_recovery_needs_it() -> None:
    """GIVEN `<slot>_mend` WHEN a recovery is open THEN it is ok; when state is unknown the advice is conditional."""
    facts = with_slot_facts(spare=True)
    assert ill(facts, replace(KEPT, recovering=frozenset({0}))) == []
    (found,) = ill(facts, None)
    assert found.mend.startswith("if no recovery is under way")


def test_lag_is_told_in_bytes_and_a_damaged_checkpoint_is_wrong() -> None:
    """GIVEN a checkpoint WHEN judged THEN how far it is behind is said; what is no position is an error."""
    (lag,) = [f.found for f in judged(SOUND, PLACE, KEPT) if f.check == "checkpoint"]
    assert "500 B" in lag
    (found,) = ill(SOUND, SourceState(None, {0: "nonsense"}))
    assert (found.check, found.grade) == ("checkpoint", Grade.WRONG)


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (4 * GIB, "4.0 GiB"), (2048 * GIB, "2.0 TiB")]
)
def test_sizes_are_told_as_people_do(count: int, text: str) -> None:
    """Bytes in the largest unit that leaves a number."""
    assert size(count) == text
