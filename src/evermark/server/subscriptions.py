"""Subscriptions as the command line and the HTTP API show them, make them and change them.

Every call blocks. A change is one fenced transaction, under the epoch that holds the `deliver` lease: a running
instance sees it at its next look.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Protocol, Self, TypeVar

from pydantic import AfterValidator, Field

from evermark import durations
from evermark.config.subscription_requests import asked, asked_changes
from evermark.config.subscriptions import SubscriptionConfig, signing_secret
from evermark.delivery.decide.answers import Verdict
from evermark.delivery.decide.registration import require_ours, secret_ends, start_vector
from evermark.delivery.model import MadeBy, SourcePartition, SubscriptionSpec, SubscriptionState
from evermark.delivery.ports import DeliveryStore
from evermark.delivery.status import Account, account, accounts
from evermark.delivery.webhook.base import Sink, Try
from evermark.delivery.webhook.signing import key_of, new_secret
from evermark.errors import ConfigError, ConflictError, EvermarkError
from evermark.log.read import FileRange
from evermark.observe.logging import without_secrets
from evermark.predicate import match_sql, vet
from evermark.secrets import Secret, SecretBox
from evermark.server.messages import PAGE_MAX, Answer, Asked, read_as
from evermark.settings.fields import Duration, between
from evermark.settings.problems import Problem, refused

T = TypeVar("T")

TEST_TIMEOUT_S_MAX = 30.0
OVERLAP_MAX = timedelta(days=3650)


class SecretAnswer(Answer):
    """A signing secret: when it ends. The secret itself is never told."""

    expires_at: datetime | None


class SubscriptionAnswer(Answer):
    """A subscription: its keys, its state and its lag. Values of headers may be credentials: only names are told."""

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
    retry_waits: list[str]
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
    def of(cls, account: Account, **more: Any) -> Self:
        spec = account.subscription.spec
        as_in_the_file = {
            "url": without_secrets(spec.url),
            "from": spec.start,
            "timeout": durations.show(timedelta(seconds=spec.timeout_s)),
            "rate": spec.rate_per_s,
            "headers": sorted(spec.headers),
            "body_limit": spec.body_bytes_max,
            "parked_limit": spec.parked_max,
            "retry_waits": [durations.show(timedelta(seconds=wait_s)) for wait_s in spec.retry_waits_s],
            "ttl": durations.show(timedelta(seconds=spec.ttl_s)),
            "secrets": [SecretAnswer(expires_at=end) for end in secret_ends(spec)],
        }
        found = {**vars(spec), **vars(account.subscription), **vars(account), **as_in_the_file}
        return cls.model_validate({**found, **more})  # takes what it has a field for


class SubscriptionChanged(SubscriptionAnswer):
    """A subscription as it is after a change. `warnings` names streams that were given and that nothing is known of."""

    warnings: list[str] = Field(default_factory=list)


class SubscriptionMade(SubscriptionChanged):
    """A subscription that was just made or rotated. `secret` only when it was made here: it is told this once."""

    secret: str | None = None


class SubscriptionPage(Answer):
    """By name. `after` asks for the next page, and is null on the last."""

    subscriptions: list[SubscriptionAnswer]
    after: str | None


class SubscriptionAsked(SubscriptionConfig):
    """The keys of `subscriptions:` in evermark.yaml, and a name. Without a secret, the server makes one."""

    name: str


class SubscriptionChange(SubscriptionConfig):
    """The keys to change; a key that is left out stays as it is. Null means the default."""


class PauseAsked(Asked):
    reason: Annotated[str, Field(max_length=500)] = "paused by a person"


class RotateAsked(Asked):
    """Without `secret`, the server makes one. Former secrets stay good for `overlap`, or until a request with `end`."""

    secret: Annotated[Secret, AfterValidator(signing_secret)] | None = None
    overlap: Annotated[Duration, between(timedelta(0), OVERLAP_MAX)] | None = None
    end: bool = False


class FiredAnswer(Answer):
    """The outcome of a signed request with a made-up event. It changed nothing."""

    id: str
    accepted: bool
    verdict: Verdict
    status: int | None
    reason: str
    took_ms: float


class AsDeliverer(Protocol):
    """Runs a transaction with the epoch that holds the `deliver` lease."""

    def __call__(self, step: Callable[[int], T]) -> T: ...


@dataclass(frozen=True)
class SubscriptionService:
    store: DeliveryStore
    box: SecretBox
    as_deliverer: AsDeliverer
    heads: Callable[[], Mapping[SourcePartition, int]]  # how far the log is durable
    files: Callable[[str], Sequence[FileRange]]  # of a source's log
    batch_at: Callable[[SourcePartition, str], int]  # the last batch before a time
    sink: Sink
    warnings: Callable[[Sequence[str]], list[str]]  # a sentence for each of these streams that nothing is known of
    clock: Callable[[], datetime] = lambda: datetime.now(UTC)

    def page(self, after: str = "", limit: int = PAGE_MAX) -> SubscriptionPage:
        """All subscriptions by name, including the subscriptions of the file."""
        found, more = self.accounts(after, limit)
        return SubscriptionPage(subscriptions=[SubscriptionAnswer.of(each) for each in found], after=more)

    def get(self, name: str) -> SubscriptionAnswer:
        """A subscription."""
        return SubscriptionAnswer.of(self.account(name))

    def add(self, name: str, values: Mapping[str, Any]) -> SubscriptionMade:
        """Make a subscription. From now on it gets every event that is committed after the answer.

        Without a secret in `values` a secret is made, and told in the answer.
        """
        secret, warnings = self.make(values, lambda given: asked(name, given).to_spec(name, self.box))
        return SubscriptionMade.of(self.account(name), secret=secret, warnings=warnings)

    def make(
        self, values: Mapping[str, Any], spec_of: Callable[[Mapping[str, Any]], SubscriptionSpec]
    ) -> tuple[str | None, list[str]]:
        """Make the subscription that these values ask for. Returns the secret, if it was made here, and warnings."""
        made = None if values.get("secret") is not None else new_secret()
        spec = replace(spec_of(values if made is None else {**values, "secret": made}), made_by=MadeBy.API)
        _vet(spec)
        start = start_vector(spec.start, self.heads(), self.batch_at)
        self.as_deliverer(lambda epoch: self.store.add(spec, start, epoch))
        return made, self.warnings(spec.streams)

    def change(self, name: str, values: Mapping[str, Any]) -> SubscriptionChanged:
        """Change the keys that are given, and nothing else; the subscription stays where it is in the log."""
        config, fields = asked_changes(name, values)
        spec = config.to_spec(name, self.box)
        _vet(spec)
        changes = {field: getattr(spec, field) for field in fields.values()}
        self.as_deliverer(lambda epoch: self.store.change(name, changes, epoch))
        return SubscriptionChanged.of(self.account(name), warnings=self.warnings(spec.streams))

    def remove(self, name: str) -> None:
        """Remove a subscription, with its parked deliveries."""
        self.as_deliverer(lambda epoch: self.store.remove(name, epoch))

    def pause(self, name: str, values: Mapping[str, Any]) -> SubscriptionAnswer:
        """Deliver nothing to a subscription until it is resumed; its events stay in the log."""
        reason = read_as(PauseAsked, values).reason
        self.as_deliverer(lambda epoch: self.store.suspend(name, reason, epoch))
        return self.get(name)

    def resume(self, name: str) -> SubscriptionAnswer:
        """Deliver to a subscription again now, from where it was left: after a pause, a 410, or while it waits after
        failures.
        """
        self.as_deliverer(lambda epoch: self.store.resume(name, epoch))
        return self.get(name)

    def rotate(self, name: str, values: Mapping[str, Any], where: str = "the body") -> SubscriptionMade:
        """Sign with a new secret, and with the former secrets too while the overlap lasts.

        `where` is where the values stand, for an error.
        """
        given = read_as(RotateAsked, values, where)
        if given.end:
            if len(values) > 1:
                raise refused(where, [Problem(("end",), "stands alone: it ends the overlap of the last rotation")])
            self.as_deliverer(lambda epoch: self.store.retire(name, epoch))
            return SubscriptionMade.of(self.account(name))
        if given.secret is not None:
            self._require_another(name, given.secret)
        made = new_secret() if given.secret is None else None
        sealed = self.box.seal(given.secret.reveal() if given.secret is not None else str(made))
        now = self.clock()
        until = None if given.overlap is None else now + given.overlap
        self.as_deliverer(lambda epoch: self.store.rotate(name, sealed, until, now, epoch))
        return SubscriptionMade.of(self.account(name), secret=made)

    def test(self, name: str) -> FiredAnswer:
        """Send a subscription one signed event of type evermark.test, and say what came back; changes nothing."""
        return self.test_fire(self.store.subscription(name).spec)

    def test_fire(self, spec: SubscriptionSpec) -> FiredAnswer:
        """Send a made-up event in a signed POST, the way every event goes. Whatever the answer, nothing is changed."""
        ident = f"test-{uuid.uuid4()}"
        patient = replace(spec, timeout_s=min(spec.timeout_s, TEST_TIMEOUT_S_MAX))
        begun = time.perf_counter()
        (answer,) = self.sink.attempt(
            [Try(patient, _test_event(spec.name, ident, self.clock()), 1, self.box.open)], TEST_TIMEOUT_S_MAX
        )
        return FiredAnswer(
            id=ident,
            accepted=answer.verdict is Verdict.ACCEPTED,
            verdict=answer.verdict,
            status=answer.status,
            reason=answer.reason,
            took_ms=round((time.perf_counter() - begun) * 1000, 1),
        )

    def _require_another(self, name: str, secret: Secret) -> None:
        """A person who rotates means to be rid of a secret: one that signs already must not pass for a new one."""
        spec, wanted = self.store.subscription(name).spec, key_of(secret.reveal())
        require_ours(spec, "rotated")
        for sealed in spec.secrets:
            try:
                known = key_of(self.box.open(sealed))
            except EvermarkError:  # it cannot sign, and a rotation is how that is mended
                continue
            if known == wanted:
                raise ConflictError(
                    f"subscription {name[:80]!r} is signed with this secret already",
                    hint="give another, or none: then a new one is made",
                )

    def account(self, name: str) -> Account:
        return account(self.store, name, self.heads(), self.files)

    def accounts(self, after: str, limit: int, *, bots: bool = False) -> tuple[list[Account], str | None]:
        """A page by name, and the name to ask for the next page with. Takes as many queries for many as for few."""
        known = accounts(self.store, self.heads(), self.files)
        names = sorted(n for n, each in known.items() if n > after and (each.subscription.spec.bot or not bots))
        shown = names[: max(1, min(limit, PAGE_MAX))]
        return [known[name] for name in shown], shown[-1] if len(shown) < len(names) else None


def _vet(spec: SubscriptionSpec) -> None:
    """A predicate that is not allowed must not be found by a delivery job."""
    try:
        match_sql(spec.streams, spec.ops, vet(spec.where), lambda _: "null")
    except ConfigError as error:
        raise ConfigError(f"subscription {spec.name}: {error.message}", hint=error.hint) from error


def _test_event(name: str, ident: str, now: datetime) -> str:
    """A row as the log would have it; its stream and operation make its type `evermark.test`."""
    told = now.astimezone(UTC).replace(tzinfo=None).isoformat(timespec="microseconds") + "Z"
    return json.dumps(
        {
            "event_id": ident,
            "source": "evermark",
            "partition": 0,
            "position": "",
            "batch": 0,
            "stream": "evermark",
            "op": "test",
            "event_time": told,
            "ingested_at": told,
            "payload": json.dumps({"test": True, "subscription": name}),
            "flags": ["test"],
        }
    )
