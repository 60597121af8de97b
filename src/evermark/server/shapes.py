"""What the HTTP API takes and answers, as models: answers are made from them, and so is the OpenAPI document."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from evermark import durations
from evermark.config.fields import Duration, between
from evermark.config.subscriptions import SubscriptionConfig, signing_secret
from evermark.delivery.base import MadeBy, ParkedRow, SubscriptionState
from evermark.delivery.decide.registration import secret_ends
from evermark.delivery.decide.retry import Verdict
from evermark.delivery.status import Account
from evermark.errors import EvermarkError, Kind
from evermark.observe.logging import without_secrets
from evermark.secrets import Secret

OVERLAP_MAX = timedelta(days=3650)


class Answer(BaseModel):
    model_config = ConfigDict(frozen=True)


class Asked(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


class SecretAnswer(Answer):
    """One signing secret, which is never told; only when it ends."""

    expires_at: datetime | None


class SubscriptionAnswer(Answer):
    """A subscription: what was asked for, and how it stands. Values of headers may be credentials: names are told."""

    model_config = ConfigDict(frozen=True, populate_by_name=True)

    name: str
    url: str
    streams: list[str]
    ops: list[str]
    where: str | None
    start: str = Field(alias="from")
    ordered: bool
    bundle: int
    concurrency: int
    timeout: str
    rate: float
    body: str
    headers: list[str]
    allow_networks: list[str]
    body_limit: int
    parked_limit: int
    ttl: str
    made_by: MadeBy
    secrets: list[SecretAnswer]
    state: SubscriptionState
    reason: str
    failures: int
    next_attempt_at: datetime | None
    lag_batches: int
    lag_events: int
    oldest: datetime | None
    waiting: int
    dead: int

    @classmethod
    def of(cls, account: Account) -> dict[str, Any]:
        found = account.subscription
        spec = found.spec
        return {
            "name": spec.name,
            "url": without_secrets(spec.url),
            "streams": list(spec.streams),
            "ops": list(spec.ops),
            "where": spec.where,
            "start": spec.start,
            "ordered": spec.ordered,
            "bundle": spec.bundle,
            "concurrency": spec.concurrency,
            "timeout": durations.show(timedelta(seconds=spec.timeout_s)),
            "rate": spec.rate_per_s,
            "body": spec.body,
            "headers": sorted(spec.headers),
            "allow_networks": list(spec.allow_networks),
            "body_limit": spec.body_bytes_max,
            "parked_limit": spec.parked_max,
            "ttl": durations.show(timedelta(seconds=spec.ttl_s)),
            "made_by": spec.made_by,
            "secrets": [SecretAnswer(expires_at=end) for end in secret_ends(spec)],
            "state": found.state,
            "reason": found.reason,
            "failures": found.failures,
            "next_attempt_at": found.next_attempt_at,
            "lag_batches": account.lag_batches,
            "lag_events": account.lag_events,
            "oldest": account.oldest,
            "waiting": account.waiting,
            "dead": account.dead,
        }


class SubscriptionMade(SubscriptionAnswer):
    """A subscription that was just made or rotated. `secret` only when it was made here: it is told this once."""

    secret: str | None = None


class SubscriptionPage(Answer):
    """By name. `after` asks for the next page, and is null on the last."""

    subscriptions: list[SubscriptionAnswer]
    after: str | None


class SubscriptionAsked(SubscriptionConfig):
    """The keys of `subscriptions:` in evermark.yaml, and a name. Without a secret one is made."""

    name: str


class SubscriptionChange(SubscriptionConfig):
    """What is to be changed: only the keys that are given. Null means the default."""


class PauseAsked(Asked):
    reason: Annotated[str, Field(max_length=500)] = "paused by a person"


class RotateAsked(Asked):
    """Without `secret` one is made. The former ones stay good for `overlap`, or until somebody asks to `end` it."""

    secret: Annotated[Secret, AfterValidator(signing_secret)] | None = None
    overlap: Annotated[Duration, between(timedelta(0), OVERLAP_MAX)] | None = None
    end: bool = False


class FiredAnswer(Answer):
    """What one signed request with a made-up event came to. Nothing was changed by it."""

    id: str
    accepted: bool
    verdict: Verdict
    status: int | None
    reason: str
    took_ms: float


class DeliveryAnswer(Answer):
    """A parked delivery. A dead one waits for a person; one with a `session` for that key, or behind one that does."""

    id: int
    subscription: str
    state: str
    event_id: str
    replay: str | None
    source: str
    partition: int
    batch: int
    position: str
    key: str | None
    previous_key: str | None
    attempts: int
    status: int | None
    next_attempt_at: datetime | None
    created_at: datetime
    reason: str
    session: str | None

    @classmethod
    def of(cls, row: ParkedRow) -> dict[str, Any]:
        event = row.event
        return {
            "id": row.id,
            "subscription": row.subscription,
            "state": "dead" if row.is_dead else "waiting",
            "event_id": event.event_id,
            "replay": event.replay_id or None,
            "source": event.place.source,
            "partition": event.place.partition,
            "batch": event.batch,
            "position": event.position,
            "key": event.key,
            "previous_key": event.previous_key,
            "attempts": row.attempts,
            "status": event.status,
            "next_attempt_at": row.next_attempt_at,
            "created_at": row.created_at,
            "reason": event.reason,
            "session": event.session or None,
        }


class DeliveryWhole(DeliveryAnswer):
    """The same with the event, as it stands in the log."""

    event: Any

    @classmethod
    def of(cls, row: ParkedRow) -> dict[str, Any]:
        return {**super().of(row), "event": json.loads(row.event.event)}


class DeliveryPage(Answer):
    """By id. `after` asks for the next page, and is null on the last."""

    deliveries: list[DeliveryAnswer]
    after: int | None


class ErrorTold(Answer):
    kind: Kind
    message: str
    hint: str


class ErrorAnswer(Answer):
    error: ErrorTold

    @classmethod
    def of(cls, error: EvermarkError) -> ErrorAnswer:
        told = ErrorTold(kind=error.kind, message=without_secrets(error.message), hint=without_secrets(error.hint))
        return cls(error=told)
