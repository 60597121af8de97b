"""What `evermark doctor` says of a source in mode `tables`. Nothing is changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace

from evermark.errors import EvermarkError
from evermark.observe.finding import Finding, ok, warning, wrong
from evermark.sources.base import Source
from evermark.sources.kinds import SourceState
from evermark.sources.postgres.admin.doctor import (
    Facts,
    judged_clock,
    judged_publication,
    judged_rest,
    judged_server,
    judged_slot,
)
from evermark.sources.postgres.admin.examine import examine_server
from evermark.sources.postgres.connect import connect
from evermark.sources.postgres.failures import INSTALL_HINT
from evermark.sources.postgres.survey import DROPPED_HINT, Survey, dropped
from evermark.sources.postgres.tables.copyable import judged_copies, look_for_copy
from evermark.sources.postgres.tables.publication import Keyless, Member, Unusable, keyless, look, members, unusable
from evermark.sources.postgres.tables.source import PostgresTables
from evermark.sources.postgres.target import PostgresTarget

_STATEMENT_TIMEOUT = "30s"


def examined(
    target: PostgresTarget,
    make: Callable[[], PostgresTables],
    ask: Callable[[Source], SourceState] | None,
    *,
    copies: bool = False,
) -> Iterator[Finding]:
    """`copies`: the file wants the rows from before, too."""
    try:
        with connect(target.dsn, statement_timeout=_STATEMENT_TIMEOUT) as link:
            facts, survey = examine_server(link, target), look(link, target)
            published, bad = members(link, target), unusable(link.row, target)
            nameless = keyless(link.row, target)
            copyable = look_for_copy(link, target)
    except EvermarkError as error:
        yield wrong("reachable", error.message, error.hint)
        return
    state = None
    if ask is not None:
        with closing(make()) as source:
            state = ask(source)
    yield from judged(facts, survey, target, state)
    yield from judged_tables(target, published, bad, nameless, survey)
    yield from judged_copies(copyable, wanted=copies)
    if state is not None:
        yield from state.findings


def judged(facts: Facts, survey: Survey, target: PostgresTarget, kept: SourceState | None) -> Iterator[Finding]:
    server = facts.server
    if server is None:
        return
    yield from judged_server(facts, server)
    for slot in facts.slots:
        seen = replace(
            slot,
            registered=survey.fingerprint_installed is not None,
            fingerprint_installed=survey.fingerprint_installed,
            fingerprint_now=survey.fingerprint_now,
        )
        if (gone := dropped(survey)) is not None:
            yield wrong("publication", gone.message, gone.hint)
        else:
            yield from judged_publication(seen, installed=True)
        yield from judged_slot(slot, target, server, kept, installed=True)
    yield from judged_rest(facts, server)
    yield from judged_clock(server)


def judged_tables(
    target: PostgresTarget,
    published: Sequence[Member],
    bad: Sequence[Unusable],
    nameless: Sequence[Keyless],
    survey: Survey,
) -> Iterator[Finding]:
    """Whether the publication has the tables of the file, and leaves their users in peace. Pure."""
    there = {member.name: member for member in published}
    wanted = {table.name: table for table in target.tables}
    ill = bool(bad)
    for each in bad:
        yield wrong("replica_identity", f"{each.table} {each.trouble}", each.mend)
    for one in nameless:
        yield warning("keys", f"{one.table} {one.trouble}", one.mend)
    for name in sorted(set(wanted) - set(there)):
        ill = True
        if name not in survey.missing or survey.fingerprint_now is None:
            yield wrong("tables", f"{name} stands in the file and is not published", INSTALL_HINT)
            continue
        mend = DROPPED_HINT if dropped(survey) else f"take it out of the file; or create it, then {INSTALL_HINT}"
        yield wrong("tables", f"{name} stands in the file and does not exist", mend)
    for name in sorted(set(there) - set(wanted)):
        ill = True
        yield wrong("tables", f"{name} is published and does not stand in the file", f"name it, or {INSTALL_HINT}")
    for name in sorted(set(there) & set(wanted)):
        new = [column for column in there[name].unpublished if column not in wanted[name].exclude]
        if new and wanted[name].exclude:
            ill = True
            said = f"{name}: column {', '.join(new)} came after install, and is not published"
            yield warning("tables", said, INSTALL_HINT)
        if there[name].partitioned:
            said = f"{name}: a truncate of one partition alone is sent by no server, and is in no event"
            yield warning("partitioned_tables", said, "delete the partition's rows first, or truncate the whole table")
    if not ill:
        yield ok("tables", f"{len(there)} published: {', '.join(sorted(there)[:10])}")
