"""`evermark subscription`: who wants what, and how far they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from evermark.cli.console import EXIT_FAILED, JsonOption, YesOption, confirm, noun, say, show, show_json, show_table
from evermark.cli.deployment import DEFAULT_CONFIG, ConfigOption, as_deliverer, opened, warn_of_streams
from evermark.cli.standing import subscription_rows
from evermark.errors import ConfigError, NotFoundError

if TYPE_CHECKING:
    from evermark.app.build import Deployment
    from evermark.server.desk import Desk
    from evermark.server.shapes import SubscriptionAnswer, SubscriptionMade

OPS = "insert, update, delete, truncate, read, message"  # spelt out: help loads nothing; a test compares

app = noun("Subscriptions: who gets which events.")

Name = Annotated[str, typer.Argument(metavar="NAME", show_default=False)]
# The keys of the file, as options; `""` takes one back to its default.
Url = Annotated[str | None, typer.Option(metavar="URL", help="Where to send the events.", show_default=False)]
SecretOption = Annotated[
    str | None,
    typer.Option("--secret", envvar="EVERMARK_SIGNING_SECRET", help="The signing secret, whsec_…", show_default=False),
]
Streams = Annotated[
    list[str] | None,
    typer.Option(
        "--streams", "--stream", metavar="STREAM", help="Only events of this stream. Repeat it, or write a,b."
    ),
]
Ops = Annotated[
    list[str] | None,
    typer.Option("--ops", "--op", metavar="OP", help=f"Only these operations: {OPS}. Repeat it, or write a,b."),
]
Where = Annotated[
    str | None, typer.Option(metavar="PREDICATE", help="Only events that match: op = 'insert' and data.total > 100")
]
From = Annotated[
    str | None, typer.Option("--from", metavar="TIME", help="Begin at: now, beginning, or 2026-11-01T12:00Z.")
]
Ordered = Annotated[bool | None, typer.Option("--ordered/--unordered", help="Keep order per key through retries.")]
Bundle = Annotated[int | None, typer.Option(metavar="N", help="Events in one request, at most.")]
Concurrency = Annotated[int | None, typer.Option(metavar="N", help="Requests at the same time, at most.")]
Timeout = Annotated[str | None, typer.Option(metavar="DURATION", help="How long one request may take: 10s.")]
Rate = Annotated[str | None, typer.Option(metavar="RATE", help="Requests at most: 50/s or 600/m. 0: no limit.")]
Body = Annotated[str | None, typer.Option(metavar="FORM", help="The form of the body: standard, cloudevents or raw.")]
Header = Annotated[
    list[str] | None,
    typer.Option("--header", metavar="NAME=VALUE", help="A header to send with each request. Repeatable."),
]
BodyLimit = Annotated[str | None, typer.Option(metavar="SIZE", help="An event with a larger body is parked: 1MiB.")]
ParkedLimit = Annotated[
    int | None, typer.Option(metavar="N", help="With so many parked deliveries the subscription stops.")
]
Ttl = Annotated[
    str | None,
    typer.Option(metavar="DURATION", help="Give up events that could not be delivered for so long: 7d. 0: never."),
]


@app.command("list")
def list_subscriptions(config: ConfigOption = DEFAULT_CONFIG, as_json: JsonOption = False) -> None:
    """List the subscriptions: what each gets, its state, and its lag."""
    with opened(config) as deployment:
        rows = subscription_rows(deployment)
    columns = (
        "subscription",
        "made_by",
        "url",
        "streams",
        "where",
        "state",
        "lag_events",
        "oldest",
        "waiting",
        "dead",
        "reason",
    )
    empty = "there is none; add one under `subscriptions:` in the file, or with: evermark subscription add"
    show(rows, columns, as_json=as_json, empty=empty)


@app.command()
def add(
    name: Name,
    url: Annotated[str, typer.Option(metavar="URL", help="Where to send the events.", show_default=False)],
    secret: SecretOption = None,
    new_secret: Annotated[bool, typer.Option("--new-secret", help="Make a secret, and print it this once.")] = False,
    streams: Streams = None,
    ops: Ops = None,
    where: Where = None,
    start: From = None,
    ordered: Ordered = None,
    bundle: Bundle = None,
    concurrency: Concurrency = None,
    timeout: Timeout = None,
    rate: Rate = None,
    body: Body = None,
    header: Header = None,
    body_limit: BodyLimit = None,
    parked_limit: ParkedLimit = None,
    ttl: Ttl = None,
    config: ConfigOption = DEFAULT_CONFIG,
    as_json: JsonOption = False,
) -> None:
    """Add a subscription, beside those of the file. A running instance takes it up by itself."""
    if bool(secret) is new_secret:
        raise ConfigError("which secret?", hint="give one with --secret, or have one made with --new-secret")
    given = given_keys(
        url=url,
        secret=secret,
        streams=streams,
        ops=ops,
        where=where,
        start=start,
        ordered=ordered,
        bundle=bundle,
        concurrency=concurrency,
        timeout=timeout,
        rate=rate,
        body=body,
        headers=header,
        body_limit=body_limit,
        parked_limit=parked_limit,
        ttl=ttl,
    )
    with desk_at(config) as (deployment, desk):
        made = desk.add(name, {key: value for key, value in given.items() if value is not None})
        warn_of_streams(deployment, given.get("streams") or ())
    report(made, f"{name} is there, {made.state.value}; try it with: evermark subscription test {name}", as_json)


@app.command("set")
def set_subscription(
    name: Name,
    url: Url = None,
    streams: Streams = None,
    ops: Ops = None,
    where: Where = None,
    ordered: Ordered = None,
    bundle: Bundle = None,
    concurrency: Concurrency = None,
    timeout: Timeout = None,
    rate: Rate = None,
    body: Body = None,
    header: Header = None,
    body_limit: BodyLimit = None,
    parked_limit: ParkedLimit = None,
    ttl: Ttl = None,
    config: ConfigOption = DEFAULT_CONFIG,
    as_json: JsonOption = False,
) -> None:
    """Change a subscription. What is not given stays as it is.

    An empty text sets an option back to its default. The subscription keeps its place in the log.
    """
    changes = given_keys(
        url=url,
        streams=streams,
        ops=ops,
        where=where,
        ordered=ordered,
        bundle=bundle,
        concurrency=concurrency,
        timeout=timeout,
        rate=rate,
        body=body,
        headers=header,
        body_limit=body_limit,
        parked_limit=parked_limit,
        ttl=ttl,
    )
    if not changes:
        raise ConfigError("nothing to change was given", hint="for example --url or --where; see --help")
    with desk_at(config) as (deployment, desk):
        changed = desk.change(name, changes)
        warn_of_streams(deployment, changes.get("streams") or ())
    report(changed, f"{name} is changed", as_json)


@app.command()
def rotate(
    name: Name,
    secret: SecretOption = None,
    overlap: Annotated[
        str | None,
        typer.Option(metavar="DURATION", help="How long the former secrets stay good: 24h. Without it: until --end."),
    ] = None,
    end: Annotated[bool, typer.Option("--end", help="End the overlap: the newest secret alone signs.")] = False,
    config: ConfigOption = DEFAULT_CONFIG,
    as_json: JsonOption = False,
) -> None:
    """Replace the signing secret of a subscription.

    Without --secret a new one is made, and printed this once. The former secrets sign too, for as long as --overlap.
    """
    asked = {"secret": secret or None, "overlap": overlap, "end": end or None}
    with desk_at(config) as (_, desk):
        from evermark.server import routes

        made = routes.rotate(desk, name, {k: v for k, v in asked.items() if v is not None}, f"rotating {name}")
    count = len(made.secrets)
    ends = next((s.expires_at for s in made.secrets[1:] if s.expires_at is not None), None)
    until = f"until {ends:%Y-%m-%d %H:%M:%S} UTC" if ends else f"until: evermark subscription rotate {name} --end"
    report(made, f"{name} is signed with {count} secrets, {until}" if count > 1 else f"{name} has one secret", as_json)


@app.command("test")
def fire(name: Name, config: ConfigOption = DEFAULT_CONFIG, as_json: JsonOption = False) -> None:
    """Send a subscription one signed test event, and print the answer.

    The event has the type evermark.test. The exit code is 1 unless the receiver accepted it.
    """
    with desk_at(config) as (deployment, desk):
        fired = desk.test_fire(_spec(deployment, name))
    if as_json:
        show_json(fired.model_dump(mode="json"))
    else:
        show_table(("field", "value"), [(key, value) for key, value in fired.model_dump().items() if value != ""])
    if not fired.accepted:
        raise typer.Exit(EXIT_FAILED)


@app.command()
def remove(name: Name, config: ConfigOption = DEFAULT_CONFIG, yes: YesOption = False) -> None:
    """Remove a subscription and its parked deliveries. The events stay in the log."""
    with desk_at(config) as (deployment, desk):
        from evermark.delivery.decide.registration import require_ours

        require_ours(deployment.delivery.subscription(name).spec, "removed")
        found = desk.one(name)
        parked = found.waiting + found.dead
        confirm(f"Remove {name}? {parked} parked deliveries go with it.", yes=yes)
        desk.remove(name)
    say(f"{name} is removed")


@app.command()
def secret() -> None:
    """Make a fresh signing secret and print it."""
    from evermark.delivery.webhook.signing import new_secret

    typer.echo(new_secret())


@app.command()
def pause(
    name: Name,
    config: ConfigOption = DEFAULT_CONFIG,
    reason: Annotated[str, typer.Option(help="Shown by `status`.")] = "paused by a person",
) -> None:
    """Stop delivering to a subscription until it is resumed. The events stay in the log."""
    with opened(config) as deployment:
        store = deployment.delivery
        as_deliverer(deployment, lambda epoch: store.suspend(name, reason[:500], epoch))
    say(f"{name} is paused; go on with: evermark subscription resume {name}")


@app.command()
def resume(name: Name, config: ConfigOption = DEFAULT_CONFIG) -> None:
    """Deliver to it again now, from where it was left.

    After a pause, after a 410, or while it waits for its next try after failures.
    """
    with opened(config) as deployment:
        store = deployment.delivery
        as_deliverer(deployment, lambda epoch: store.resume(name, epoch))
    say(f"{name} is resumed, from where it was left: a running instance tries it now")


@contextmanager
def desk_at(config: Path) -> Iterator[tuple[Deployment, Desk]]:
    with opened(config) as deployment:
        from evermark.app.serving import desk_of

        desk = desk_of(deployment)
        try:
            yield deployment, desk
        finally:
            desk.sink.close()


def given_keys(**options: Any) -> dict[str, Any]:
    """The options that were given, as the keys of the file; None for one that is to be its default."""
    given: dict[str, Any] = {}
    for option, value in options.items():
        key = "from" if option == "start" else option
        if value is None or value == []:
            continue
        if key == "headers":
            given[key] = _headers(value)
        elif isinstance(value, list):
            given[key] = [part.strip() for text in value for part in text.split(",") if part.strip()] or None
        else:
            given[key] = None if value == "" else value
    return given


def _headers(texts: list[str]) -> dict[str, str] | None:
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals and text:
            raise ConfigError("--header: expected NAME=VALUE", hint="for example --header X-Team=billing")
        if name:
            found[name.strip()] = value
    return found or None


def _spec(deployment: Deployment, name: str) -> Any:
    """What is known of it; one of the file that no instance has seen yet may be tried too."""
    try:
        return deployment.delivery.subscription(name).spec
    except NotFoundError:
        found = next((spec for spec in deployment.specs if spec.name == name), None)
        if found is None:
            raise
        return found


def report(answer: SubscriptionAnswer | SubscriptionMade, said: str, as_json: bool) -> None:
    made = getattr(answer, "secret", None)
    if as_json:
        show_json(answer.model_dump(mode="json", by_alias=True, exclude=set() if made else {"secret"}))
        return
    if made:
        typer.echo(made)
        say("this secret is shown this once: give it to the receiver")
    say(said)
