"""Where wishes of people and programs about subscriptions and parked deliveries are taken: by the CLI and by HTTP.

Every call blocks. What it changes, it changes in one fenced transaction, under the epoch of whoever delivers: a running
instance sees it at its next look.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from evermark.config.asked import asked, asked_changes
from evermark.delivery.base import MadeBy, ParkedRow, SourcePartition, SubscriptionSpec
from evermark.delivery.decide.registration import start_vector
from evermark.delivery.decide.retry import Verdict
from evermark.delivery.ports import DeliveryStore
from evermark.delivery.status import Account, account, accounts
from evermark.delivery.webhook.base import Sink, Try
from evermark.delivery.webhook.signing import new_secret
from evermark.errors import ConfigError, ConflictError, NotFoundError
from evermark.log.read import FileRange
from evermark.predicate import match_sql, vet
from evermark.secrets import SecretBox
from evermark.server.shapes import (
    DeliveryAnswer,
    DeliveryPage,
    DeliveryWhole,
    FiredAnswer,
    SubscriptionAnswer,
    SubscriptionMade,
    SubscriptionPage,
)

if TYPE_CHECKING:
    from evermark.server.bot_desk import BotDesk

T = TypeVar("T")

PAGE_MAX = 1000
TEST_TIMEOUT_S_MAX = 30.0


class AsDeliverer(Protocol):
    """Does one transaction with the epoch that holds the `deliver` lease."""

    def __call__(self, step: Callable[[int], T]) -> T: ...


@dataclass(frozen=True)
class Desk:
    store: DeliveryStore
    box: SecretBox
    as_deliverer: AsDeliverer
    heads: Callable[[], Mapping[SourcePartition, int]]  # how far the log is durable
    files: Callable[[str], Sequence[FileRange]]  # of a source's log
    batch_at: Callable[[SourcePartition, str], int]  # the last batch before a time
    sink: Sink
    clock: Callable[[], datetime] = lambda: datetime.now(UTC)
    bots: BotDesk | None = None

    # subscriptions

    def page(self, after: str = "", limit: int = PAGE_MAX) -> SubscriptionPage:
        """By name, in a number of queries that does not depend on how many there are."""
        known = accounts(self.store, self.heads(), self.files)
        names = [name for name in sorted(known) if name > after]
        shown = names[: max(1, min(limit, PAGE_MAX))]
        return SubscriptionPage(
            subscriptions=[SubscriptionAnswer(**SubscriptionAnswer.of(known[name])) for name in shown],
            after=shown[-1] if len(shown) < len(names) else None,
        )

    def one(self, name: str) -> SubscriptionAnswer:
        return SubscriptionAnswer(**self._told(name))

    def add(self, name: str, values: Mapping[str, Any]) -> SubscriptionMade:
        """Make one. Without a secret in `values` one is made, and told in the answer."""

        def spec_of(given: Mapping[str, Any]) -> SubscriptionSpec:
            return replace(asked(name, given).to_spec(name, self.box), made_by=MadeBy.API)

        made = self.make(values, spec_of)
        return SubscriptionMade(**self._told(name), secret=made)

    def make(self, values: Mapping[str, Any], spec_of: Callable[[Mapping[str, Any]], SubscriptionSpec]) -> str | None:
        """Make the subscription that these values ask for; the secret, if it was made here."""
        made = None if values.get("secret") is not None else new_secret()
        spec = spec_of(values if made is None else {**values, "secret": made})
        _vet(spec)
        start = start_vector(spec.start, self.heads(), self.batch_at)
        self.as_deliverer(lambda epoch: self.store.add(spec, start, epoch))
        return made

    def change(self, name: str, values: Mapping[str, Any]) -> SubscriptionAnswer:
        """Change what is named in `values`, and nothing else."""
        config, fields = asked_changes(name, values)
        wanted = config.to_spec(name, self.box)
        _vet(wanted)
        changes = {field: getattr(wanted, field) for field in fields.values()}
        self.as_deliverer(lambda epoch: self.store.change(name, changes, epoch))
        return self.one(name)

    def remove(self, name: str) -> None:
        self.as_deliverer(lambda epoch: self.store.remove(name, epoch))

    def pause(self, name: str, reason: str) -> SubscriptionAnswer:
        self.as_deliverer(lambda epoch: self.store.suspend(name, reason, epoch))
        return self.one(name)

    def resume(self, name: str) -> SubscriptionAnswer:
        self.as_deliverer(lambda epoch: self.store.resume(name, epoch))
        return self.one(name)

    def rotate(self, name: str, secret: str | None, overlap: timedelta | None) -> SubscriptionMade:
        """A new secret; the former ones stay good for `overlap`, or until `end_overlap`."""
        made = new_secret() if secret is None else None
        sealed = self.box.seal(secret or made or "")
        now = self.clock()
        until = None if overlap is None else now + overlap
        self.as_deliverer(lambda epoch: self.store.rotate(name, sealed, until, now, epoch))
        return SubscriptionMade(**self._told(name), secret=made)

    def end_overlap(self, name: str) -> SubscriptionMade:
        self.as_deliverer(lambda epoch: self.store.retire(name, epoch))
        return SubscriptionMade(**self._told(name))

    def test(self, name: str) -> FiredAnswer:
        return self.test_fire(self.store.subscription(name).spec)

    def test_fire(self, spec: SubscriptionSpec) -> FiredAnswer:
        """One signed POST of a made-up event, the way every event goes. Whatever comes of it, nothing is changed."""
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

    def _told(self, name: str) -> dict[str, Any]:
        return SubscriptionAnswer.of(self.account(name))

    def account(self, name: str) -> Account:
        return account(self.store, name, self.heads(), self.files)

    # parked deliveries

    def deliveries(
        self, subscription: str | None = None, *, dead: bool | None = None, after: int = 0, limit: int = 100
    ) -> DeliveryPage:
        most = max(1, min(limit, PAGE_MAX))
        rows = self.store.parked.rows(subscription, dead=dead, after_id=after, limit=most + 1)
        shown = [DeliveryAnswer(**DeliveryAnswer.of(row)) for row in rows[:most]]
        return DeliveryPage(deliveries=shown, after=shown[-1].id if len(rows) > most else None)

    def delivery(self, ident: int) -> DeliveryWhole:
        return DeliveryWhole(**DeliveryWhole.of(self._row(ident)))

    def retry(self, ident: int) -> DeliveryAnswer:
        """To be tried again now, dead or not."""
        row, now = self._row(ident), self.clock()
        if row.waits:
            raise ConflictError(
                f"delivery {ident} waits for the key of session {row.event.session[:80]!r}",
                hint="publish it: evermark bot keys, or PUT /v1/bots/{name}/keys",
            )
        if self.as_deliverer(lambda epoch: self.store.parked.release([ident], now, epoch)) == 0:
            raise _no_delivery(ident)
        return DeliveryAnswer(**DeliveryAnswer.of(replace(row, next_attempt_at=now)))

    def drop(self, ident: int) -> None:
        """Given up: never delivered, and counted."""
        if self.as_deliverer(lambda epoch: self.store.parked.drop([ident], epoch)) == 0:
            raise _no_delivery(ident)

    def _row(self, ident: int) -> ParkedRow:
        for row in self.store.parked.rows(after_id=ident - 1, limit=1):
            if row.id == ident:
                return row
        raise _no_delivery(ident)


def _vet(spec: SubscriptionSpec) -> None:
    """A predicate that is not allowed must not be found by a delivery job."""
    try:
        match_sql(spec.streams, spec.ops, vet(spec.where), lambda _: "null")
    except ConfigError as error:
        raise ConfigError(f"subscription {spec.name}: {error.message}", hint=error.hint) from error


def _no_delivery(ident: int) -> NotFoundError:
    return NotFoundError(
        f"no parked delivery has the id {ident}", hint="it was delivered or dropped, or expired; list those there are"
    )


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
