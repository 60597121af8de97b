"""`evermark replay`: deliver a window of the past once more."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

import typer

from evermark.cli.console import noun, say, show, show_fields, show_json, warn
from evermark.cli.deployment import as_deliverer, known_source, opened
from evermark.cli.options import DEFAULT_CONFIG, ConfigOption, JsonOption
from evermark.delivery.limits import REPLAY_RATE_MAX
from evermark.errors import ConfigError, NotFoundError

app = noun("Replays: deliver past events again.")

COLUMNS = ("id", "state", "source", "subscription", "streams", "since", "until", "percent", "delivered", "parked")
Id = Annotated[str, typer.Argument(metavar="ID", show_default=False)]


@app.command()
def start(
    since: Annotated[str, typer.Option(metavar="TIME", help="From this time on: 2026-11-01, or 2026-11-14T12:00Z.")],
    until: Annotated[
        str | None, typer.Option(metavar="TIME", help="Up to and including this time; by default up to now.")
    ] = None,
    config: ConfigOption = DEFAULT_CONFIG,
    subscription: Annotated[
        str | None,
        typer.Option(
            "--subscription", "-s", help="Only to this subscription; by default to all that get these events."
        ),
    ] = None,
    stream: Annotated[
        list[str] | None, typer.Option(metavar="STREAM", help="Only events of this stream. Repeatable.")
    ] = None,
    where: Annotated[
        str | None, typer.Option(metavar="PREDICATE", help="Only events that match, as in a subscription.")
    ] = None,
    rate: Annotated[
        float, typer.Option(min=0.0, max=REPLAY_RATE_MAX, help="Requests a second at most; 0: no limit.")
    ] = 0.0,
    source: Annotated[str | None, typer.Option(help="Replay this source; needed if there are several.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Deliver the events of a window of time again. Without a running instance, the next `evermark up` begins it."""
    from evermark.app.checking import stream_warnings
    from evermark.delivery.replay.plan import AskedBy, Request
    from evermark.delivery.replay.request import STREAMS_MAX, window_of
    from evermark.predicate import vet

    with opened(config) as deployment:
        begin, end = window_of(since, until, datetime.now(UTC), "--")
        if len(stream or ()) > STREAMS_MAX:
            raise ConfigError(f"more than {STREAMS_MAX} streams", hint="leave --stream out, or use --where")
        vet(where)
        known = {*deployment.delivery.subscriptions(), *(spec.name for spec in deployment.specs)}
        if subscription is not None and subscription not in known:
            text = f"no subscription is called {subscription[:80]!r}"
            raise NotFoundError(text, hint="see `evermark subscription list`")
        for text in stream_warnings(deployment.config, deployment.log_root, stream or ()):
            warn(text)
        request = Request(
            AskedBy.CLI,
            known_source(deployment.sources, source),
            begin,
            end,
            streams=tuple(dict.fromkeys(stream or ())),
            where=where,
            subscription=subscription,
            rate_per_s=rate,
        )
        made = as_deliverer(deployment, lambda epoch: deployment.replays.request(request, epoch))
    if as_json:
        show_json({"id": made})
    else:
        typer.echo(made)
        say(f"asked for; see how far it is with: evermark replay show {made}")


@app.command("list")
def list_replays(
    config: ConfigOption = DEFAULT_CONFIG,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="Replays at most.")] = 100,
    as_json: JsonOption = False,
) -> None:
    """List the replays, the newest first."""
    from evermark.delivery.replay.shown import summary

    with opened(config) as deployment:
        rows = [summary(replay) for replay in deployment.replays.newest(limit)]
    show(rows, (*COLUMNS, "reason"), as_json=as_json, empty="nothing was replayed yet")


@app.command("show")
def show_replay(replay: Id, config: ConfigOption = DEFAULT_CONFIG, as_json: JsonOption = False) -> None:
    """Show a replay, and how far it is with each subscription."""
    from evermark.delivery.replay.shown import summary, target_shown

    with opened(config) as deployment:
        found = deployment.replays.one(replay)
    targets = [target_shown(found, target) for target in found.targets]
    if as_json:
        show_json({**summary(found), "targets": targets})
        return
    show_fields(summary(found), as_json=False, but=(None,))
    say("")
    columns = ("subscription", "state", "percent", "at", "delivered", "parked", "failures", "next_attempt_at", "reason")
    show(targets, columns, empty="no subscription has been chosen yet" if found.state == "waiting" else "to nobody")


@app.command()
def cancel(replay: Id, config: ConfigOption = DEFAULT_CONFIG) -> None:
    """End a replay now. Its parked deliveries are dropped; delivered events stay delivered."""
    with opened(config) as deployment:
        ended = as_deliverer(deployment, lambda epoch: deployment.replays.cancel(replay, epoch))
        state = deployment.replays.one(replay).state
    say(f"{replay} is cancelled" if ended else f"{replay} was {state} already: nothing to cancel")
