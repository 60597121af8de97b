"""Adds, changes and removes subscriptions: all of a file at once, or one at run time. Pure: stores carry it out.

At run time (from a terminal, or over HTTP) only subscriptions made at run time may be changed. Subscriptions of the
file belong to the file: its next start would undo any change without a word.

A secret that is being replaced goes on signing beside the new one, so that a receiver may change over when it likes:
until a time that was given with the rotation, or until a person ends the overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from evermark.delivery.decide.group import SubscriptionRecord, clean
from evermark.delivery.limits import SECRETS_MAX
from evermark.delivery.model import (
    BEGINNING,
    Cursor,
    CursorVector,
    Group,
    MadeBy,
    SourcePartition,
    Subscription,
    SubscriptionSpec,
    SubscriptionState,
)
from evermark.errors import ConfigError, ConflictError, NotFoundError

NAME_CHARS_MAX = 200

# Not the name (all rows hang on it), the start (it is over), secrets (they are rotated), networks (the file's).
CHANGEABLE = frozenset(
    {
        "url",
        "streams",
        "ops",
        "where",
        "ordered",
        "bundle",
        "concurrency",
        "timeout_s",
        "rate_per_s",
        "body",
        "headers",
        "body_bytes_max",
        "parked_max",
        "retry_waits_s",
        "ttl_s",
        "bot",  # but neither its source nor its user: its memberships hang on them
    }
)


Known = Mapping[str, tuple[SubscriptionSpec, SubscriptionRecord]]


@dataclass(frozen=True)
class Registration:
    group: Group
    kept: Known
    added: Known
    begun: Mapping[str, CursorVector]  # of added subscriptions that do not join the group
    removed: frozenset[str]


def registered(
    specs: Sequence[SubscriptionSpec], made_by: MadeBy, starts: Mapping[str, CursorVector], known: Known, group: Group
) -> Registration:
    """Make the subscriptions of one origin be exactly `specs`."""
    require_names(specs, made_by, known)
    named = {spec.name: replace(spec, made_by=made_by) for spec in specs}
    removed = frozenset(n for n, (spec, _) in known.items() if spec.made_by is made_by and n not in named)
    joining = frozenset(name for name in named if name not in known and name not in starts)
    members = (group.members - removed) | joining
    version = group.version + 1 if members != group.members else group.version
    kept = {n: (spec, with_spec(known[n][1], known[n][0], spec)) for n, spec in named.items() if n in known}
    added = {n: (spec, _made(spec, version if n in joining else None)) for n, spec in named.items() if n not in known}
    # A partition without a start is backlog from its beginning: rather twice than never.
    begun = {n: {**dict.fromkeys(group.cursors, BEGINNING), **starts[n]} for n in added if n not in joining}
    return Registration(Group(version, members, group.cursors), kept, added, begun, removed)


def with_other_devices(before: Known, after: Known) -> list[str]:
    return [name for name, (spec, _) in after.items() if spec.device != before[name][0].device]


def added(spec: SubscriptionSpec, start: CursorVector | None, owner: MadeBy | None, group: Group) -> Registration:
    """One new subscription. `owner`: the origin that has this name already."""
    if owner is not None:
        by_file = owner is MadeBy.FILE
        maker = "the file" if by_file else "the API"
        raise ConflictError(
            f"a subscription called {spec.name!r} is there already, made by {maker}",
            hint="choose another name" + ("" if by_file else ", change that one, or remove it and make it anew"),
        )
    if spec.allow_networks:
        raise ConfigError(
            f"subscription {spec.name!r}: allow_networks stands only in the operator's file",
            hint="make this subscription in evermark.yaml",
        )
    return registered([spec], MadeBy.API, {} if start is None else {spec.name: start}, {}, group)


def _made(spec: SubscriptionSpec, joined_version: int | None) -> SubscriptionRecord:
    """The record of a new subscription: in the live group since that version of it, or behind."""
    state = SubscriptionState.BEHIND if joined_version is None else SubscriptionState.LIVE
    record = SubscriptionRecord(spec.name, state, joined_version=joined_version or 0)
    return replace(record, parked_max=spec.parked_max, by_stream=spec.bot is not None)


def changed(
    spec: SubscriptionSpec, record: SubscriptionRecord, changes: Mapping[str, object]
) -> tuple[SubscriptionSpec, SubscriptionRecord]:
    """Other settings of the same subscription. Its cursor and state stay, unless the url changes."""
    require_ours(spec, "changed")
    fixed = sorted(changes.keys() - CHANGEABLE)
    if fixed:
        raise ConfigError(
            f"subscription {spec.name!r}: {', '.join(fixed)} cannot be changed",
            hint="remove it and make it anew, or see rotate and replay",
        )
    given: dict[str, Any] = dict(changes)
    if "bot" in given:  # only its given fields: two people who change different fields at once both have their way
        if spec.bot is None:
            raise unknown_bot(spec.name)
        given["bot"] = replace(spec.bot, **given["bot"])
    wanted = replace(spec, **given)
    require_names([wanted], MadeBy.API, {})
    if spec.bot and wanted.bot and (spec.bot.source, spec.bot.user) != (wanted.bot.source, wanted.bot.user):
        raise ConfigError(f"bot {spec.name!r}: whom it speaks for cannot be changed", hint="remove it and make it anew")
    return wanted, with_spec(record, spec, wanted)


def with_spec(record: SubscriptionRecord, old: SubscriptionSpec, new: SubscriptionSpec) -> SubscriptionRecord:
    record = replace(record, parked_max=new.parked_max, by_stream=new.bot is not None)
    if new.url == old.url or record.is_paused:
        return record
    # Failures of the old address say nothing about the new one.
    state = SubscriptionState.LIVE if record.is_member else SubscriptionState.BEHIND
    return clean(replace(record, state=state))


def rotated(spec: SubscriptionSpec, secret: str, until: datetime | None, now: datetime) -> SubscriptionSpec:
    """A new secret first. The others keep signing until `until` at the latest; a secret that ends sooner still does."""
    require_ours(spec, "rotated")
    kept: list[tuple[str, datetime | None]] = [(secret, None)]
    for old, ends in _ends(spec):
        end = min((moment for moment in (ends, until) if moment is not None), default=None)
        if end is None or end > now:
            kept.append((old, end))
    if len(kept) > SECRETS_MAX:
        raise ConflictError(
            f"subscription {spec.name!r} has {SECRETS_MAX} secrets that are still good",
            hint="end the overlap of the former ones first",
        )
    return _with_secrets(spec, kept)


def retired(spec: SubscriptionSpec) -> SubscriptionSpec:
    """The newest secret alone."""
    require_ours(spec, "rotated")
    return _with_secrets(spec, [(secret, None) for secret, _ in _ends(spec)[:1]])


def current(spec: SubscriptionSpec, now: datetime) -> SubscriptionSpec:
    """The spec with the secrets that sign now, without expired ones."""
    if not any(spec.secrets_until):
        return spec  # the usual case
    return _with_secrets(spec, [(secret, end) for secret, end in _ends(spec) if end is None or end > now])


def shown(spec: SubscriptionSpec, record: SubscriptionRecord, since: datetime | None, now: datetime) -> Subscription:
    """A subscription as readers see it now."""
    state, reason, failures, again_at = record.state, record.reason, record.failures, record.next_attempt_at
    return Subscription(current(spec, now), state, reason, failures, again_at, record.generation, since)


def secret_ends(spec: SubscriptionSpec) -> list[datetime | None]:
    """When each secret ends, the newest first; None: it does not."""
    return [end for _, end in _ends(spec)]


def start_vector(
    start: str, places: Iterable[SourcePartition], batch_at: Callable[[SourcePartition, str], int]
) -> CursorVector | None:
    """Where a subscription begins. None: from now on; 0 everywhere: from the beginning; else before that time."""
    if start == "now":
        return None
    if start == "beginning":
        return dict.fromkeys(places, BEGINNING)
    return {place: Cursor(batch_at(place, start)) for place in places}


def require_names(specs: Sequence[SubscriptionSpec], made_by: MadeBy, known: Known) -> None:
    seen: set[str] = set()
    for spec in specs:
        if not spec.name or len(spec.name) > NAME_CHARS_MAX:
            raise ConfigError(
                f"subscription {spec.name[:80]!r}: not a usable name", hint=f"use 1 to {NAME_CHARS_MAX} characters"
            )
        if any("\x00" in text for text in (spec.name, spec.url, spec.where or "", *spec.streams)):
            raise ConfigError(f"subscription {spec.name[:80]!r} holds the character NUL", hint="remove it")
        if spec.ordered and spec.bot is not None and spec.bot.device:
            raise ConfigError(
                f"bot {spec.name!r} has a device, and cannot be ordered: one event that waits would stop its stream",
                hint="its sessions keep their order anyway",
            )
        if spec.name in seen:
            raise ConfigError(f"subscription {spec.name!r} is named twice", hint="give each its own name")
        seen.add(spec.name)
        owner = known[spec.name][0].made_by if spec.name in known else made_by
        if owner is not made_by:
            raise ConfigError(
                f"subscription {spec.name!r} was already made by {owner}",
                hint=f"choose another name, or remove the one made by {owner}",
            )


def require_ours(spec: SubscriptionSpec, done: str) -> None:
    if spec.made_by is not MadeBy.API:
        section = "subscriptions" if spec.bot is None else "bots"
        raise ConflictError(
            f"subscription {spec.name!r} was made by the file, and is {done} there",
            hint=f"edit {section}.{spec.name} in evermark.yaml, then start `evermark up` again",
        )


def unknown(name: str) -> NotFoundError:
    return NotFoundError(
        f"no subscription is called {name[:80]!r}", hint="`evermark subscription list` shows those there are"
    )


def unknown_bot(name: str) -> NotFoundError:
    return NotFoundError(f"no bot is called {name[:80]!r}", hint="`evermark bot list` shows those there are")


def _ends(spec: SubscriptionSpec) -> list[tuple[str, datetime | None]]:
    texts = [*spec.secrets_until, *[""] * len(spec.secrets)]
    return [
        (secret, datetime.fromisoformat(text) if text else None)
        for secret, text in zip(spec.secrets, texts, strict=False)
    ]


def _with_secrets(spec: SubscriptionSpec, kept: list[tuple[str, datetime | None]]) -> SubscriptionSpec:
    ends = tuple("" if end is None else end.astimezone(UTC).isoformat() for _, end in kept)
    return replace(spec, secrets=tuple(secret for secret, _ in kept), secrets_until=ends if any(ends) else ())


def free_names(
    specs: Sequence[SubscriptionSpec], known: Mapping[str, Subscription]
) -> tuple[list[SubscriptionSpec], list[str]]:
    """The file's subscriptions whose names are free or the file's own, and the names that were taken at run time.

    One name that is taken must not keep all the others from their events.
    """
    taken = {name for name, found in known.items() if found.spec.made_by is not MadeBy.FILE}
    return [spec for spec in specs if spec.name not in taken], [spec.name for spec in specs if spec.name in taken]
