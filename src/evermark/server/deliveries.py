"""Parked deliveries as the HTTP API shows them, and a person's decisions about them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field
from pydantic.json_schema import SkipJsonSchema

from evermark.delivery.model import ParkedRow
from evermark.delivery.ports import DeliveryStore
from evermark.errors import ConflictError, NotFoundError
from evermark.server.messages import PAGE_MAX, Answer, Asked, Limit
from evermark.server.subscriptions import AsDeliverer

_ID_MAX = 2**63 - 1
_Truth = Annotated[bool, BeforeValidator(lambda text: {"true": True, "false": False}.get(text, ""))]


class DeliveryAnswer(Answer):
    """A parked delivery. A dead delivery waits for a person. A delivery with a `session` waits for the key of that
    session, or behind another delivery that does.
    """

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
    def of(cls, row: ParkedRow, **more: Any) -> Self:
        event = row.event
        shown = {
            "state": "dead" if row.is_dead else "waiting",
            "replay": event.replay_id or None,
            "session": event.session or None,
        }
        return cls.model_validate({**vars(row), **vars(event), **vars(event.place), **shown, **more})


class DeliveryWhole(DeliveryAnswer):
    """A parked delivery with its event, as it stands in the log."""

    event: Any

    @classmethod
    def of(cls, row: ParkedRow, **more: Any) -> Self:
        return super().of(row, event=json.loads(row.event.event), **more)


class DeliveryPage(Answer):
    """By id. `after` asks for the next page, and is null on the last."""

    deliveries: list[DeliveryAnswer]
    after: int | None


class DeliveriesAsked(Asked):
    subscription: Annotated[str | SkipJsonSchema[None], Field(description="Only of this subscription.")] = None
    dead: Annotated[
        _Truth | SkipJsonSchema[None],
        Field(description="true: only dead deliveries; false: only deliveries that wait for a retry."),
    ] = None
    after: Annotated[int, Field(ge=0, lt=_ID_MAX, description="Only ids above this id: the next page.")] = 0
    limit: Limit = 100


@dataclass(frozen=True)
class DeliveryService:
    store: DeliveryStore
    as_deliverer: AsDeliverer
    clock: Callable[[], datetime] = lambda: datetime.now(UTC)

    def page(
        self, subscription: str | None = None, *, dead: bool | None = None, after: int = 0, limit: int = 100
    ) -> DeliveryPage:
        """Parked deliveries by id: waiting for a retry, or dead."""
        most = max(1, min(limit, PAGE_MAX))
        rows = self.store.parked.rows(subscription, dead=dead, after_id=after, limit=most + 1)
        shown = [DeliveryAnswer.of(row) for row in rows[:most]]
        return DeliveryPage(deliveries=shown, after=shown[-1].id if len(rows) > most else None)

    def get(self, ident: int) -> DeliveryWhole:
        """A parked delivery, with its event."""
        return DeliveryWhole.of(self._row(ident))

    def retry(self, ident: int) -> DeliveryAnswer:
        """Try a parked delivery again now, even if it is dead; spends none of its attempts."""
        row, now = self._row(ident), self.clock()
        if row.waits:
            raise ConflictError(
                f"delivery {ident} waits for the key of session {row.event.session[:80]!r}",
                hint="publish it: evermark bot keys, or PUT /v1/bots/{name}/keys",
            )
        if self.as_deliverer(lambda epoch: self.store.parked.release([ident], now, epoch)) == 0:
            raise _no_delivery(ident)
        return DeliveryAnswer.of(replace(row, next_attempt_at=now))

    def drop(self, ident: int) -> None:
        """Give a parked delivery up: never delivered, and counted as dropped."""
        if self.as_deliverer(lambda epoch: self.store.parked.drop([ident], epoch)) == 0:
            raise _no_delivery(ident)

    def _row(self, ident: int) -> ParkedRow:
        for row in self.store.parked.rows(after_id=ident - 1, limit=1):
            if row.id == ident:
                return row
        raise _no_delivery(ident)


def _no_delivery(ident: int) -> NotFoundError:
    return NotFoundError(
        f"no parked delivery has the id {ident}",
        hint="it was delivered or dropped, or expired; GET /v1/deliveries lists the others",
    )
