"""`evermark delivery`: parked deliveries, and what a person decides about them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from enum import StrEnum
from itertools import islice
from typing import TYPE_CHECKING, Annotated

import typer

from evermark.cli.console import confirm, noun, say, show, show_fields, show_json
from evermark.cli.deployment import opened
from evermark.cli.options import DEFAULT_CONFIG, ConfigOption, JsonOption, YesOption
from evermark.cli.parked import all_parked, in_parts
from evermark.delivery.model import ParkedRow
from evermark.errors import ConfigError, NotFoundError

if TYPE_CHECKING:
    from evermark.app.build import Deployment

app = noun("Parked deliveries: waiting for a retry, or dead.")


class ParkedState(StrEnum):
    WAITING = "waiting"
    DEAD = "dead"


Ids = Annotated[list[int] | None, typer.Argument(metavar="ID...", min=1, show_default=False)]
SubscriptionOption = Annotated[str | None, typer.Option("--subscription", "-s", help="Only of this subscription.")]
StateOption = Annotated[ParkedState | None, typer.Option("--state", help="Only deliveries in this state.")]


@app.command("list")
def list_deliveries(
    config: ConfigOption = DEFAULT_CONFIG,
    subscription: SubscriptionOption = None,
    state: StateOption = None,
    after: Annotated[int, typer.Option(min=0, help="Only ids above this id: the next page.")] = 0,
    limit: Annotated[int, typer.Option(min=1, max=100_000, help="Deliveries at most.")] = 100,
    as_json: JsonOption = False,
) -> None:
    """List the parked deliveries, oldest first."""
    from evermark.server.deliveries import DeliveryAnswer

    with opened(config) as deployment:
        found = list(islice(_parked(deployment, subscription, state, after), limit + 1))
    rows = [DeliveryAnswer.of(row).model_dump() for row in found[:limit]]
    if len(found) > limit:
        say(f"there are more: add --after {rows[-1]['id']}")
    columns = ("id", "subscription", "state", "event_id", "key", "attempts", "status", "next_attempt_at", "reason")
    show(rows, columns, as_json=as_json, empty="nothing is parked" if state is None else f"nothing is {state}")


@app.command("show")
def show_delivery(
    delivery: Annotated[int, typer.Argument(metavar="ID", min=1)],
    config: ConfigOption = DEFAULT_CONFIG,
    as_json: JsonOption = False,
) -> None:
    """Show a parked delivery, with its event."""
    from evermark.server.deliveries import DeliveryWhole

    with opened(config) as deployment:
        row = _found(deployment, [delivery])[0]
    document = DeliveryWhole.of(row).model_dump()
    if as_json:
        show_json(document)
    else:
        event = document.pop("event")
        show_fields(document, as_json=False, but=())
        say("")
        typer.echo(json.dumps(event, indent=2, ensure_ascii=False))


@app.command()
def retry(
    ids: Ids = None,
    config: ConfigOption = DEFAULT_CONFIG,
    subscription: SubscriptionOption = None,
    state: StateOption = None,
) -> None:
    """Try them again now, dead or not: by id, or all of a subscription. It spends none of their attempts."""
    with opened(config) as deployment:
        chosen = _chosen(deployment, ids, subscription, state)
        now = datetime.now(UTC)
        count = in_parts(deployment, chosen, lambda ids, epoch: deployment.delivery.parked.release(ids, now, epoch))
        held_up = _held_up(deployment, chosen)
    say(f"{count} to be tried again now")
    for name, why in held_up.items():
        say(f"subscription {name} {why}; try it now with: evermark subscription resume {name}")


@app.command()
def drop(
    ids: Ids = None,
    config: ConfigOption = DEFAULT_CONFIG,
    subscription: SubscriptionOption = None,
    state: StateOption = None,
    yes: YesOption = False,
) -> None:
    """Give parked deliveries up: they are never delivered. The events stay in the log; the drops are counted."""
    with opened(config) as deployment:
        chosen = _chosen(deployment, ids, subscription, state)
        confirm(f"Drop {len(chosen)} parked deliveries? They will never be delivered.", yes=yes)
        count = in_parts(deployment, chosen, deployment.delivery.parked.drop)
    say(f"{count} dropped")


def _parked(
    deployment: Deployment, subscription: str | None, state: ParkedState | None, after: int = 0
) -> Iterator[ParkedRow]:
    dead = None if state is None else state is ParkedState.DEAD
    return all_parked(deployment, subscription, dead=dead, after=after)


def _chosen(
    deployment: Deployment, ids: list[int] | None, subscription: str | None, state: ParkedState | None
) -> list[ParkedRow]:
    if bool(ids) == (subscription is not None) or (ids and state is not None):
        raise ConfigError(
            "which deliveries?", hint="name their ids (see `evermark delivery list`), or a --subscription [--state]"
        )
    if subscription is None:
        return _found(deployment, ids or [])
    rows = list(_parked(deployment, subscription, state))
    if not rows and subscription not in {*deployment.delivery.subscriptions(), *(s.name for s in deployment.specs)}:
        from evermark.delivery.decide.registration import unknown

        raise unknown(subscription)
    return rows


def _found(deployment: Deployment, ids: list[int]) -> list[ParkedRow]:
    """The deliveries with exactly these ids, or an error: a person who mistyped an id may have mistyped another."""
    rows, missing = [], []
    for each in sorted(set(ids)):
        page = deployment.delivery.parked.rows(after_id=each - 1, limit=1)
        if page and page[0].id == each:
            rows.append(page[0])
        else:
            missing.append(str(each))
    if missing:
        raise NotFoundError(f"no parked delivery has the id {', '.join(missing)}", hint="see `evermark delivery list`")
    return rows


def _held_up(deployment: Deployment, rows: list[ParkedRow]) -> dict[str, str]:
    """Subscriptions for which nothing is tried now, whatever is asked of their parked deliveries, and why."""
    from evermark.delivery.decide.group import waits_because

    now, names = datetime.now(UTC), {row.subscription for row in rows}
    known = deployment.delivery.subscriptions()
    reasons = {name: waits_because(known[name], now) for name in sorted(names & known.keys())}
    return {name: why for name, why in reasons.items() if why}
