"""`evermark bot`: subscriptions that speak for a user, and the session keys of their devices.

What holds for any subscription (its other keys, pause, resume, rotate, test) is done with `evermark subscription`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from evermark.cli.console import JsonOption, YesOption, confirm, noun, say, show, show_json, show_table
from evermark.cli.deployment import DEFAULT_CONFIG, ConfigOption, warn_of_streams
from evermark.cli.subscription import (
    Bundle,
    Concurrency,
    From,
    Header,
    Name,
    Ops,
    ParkedLimit,
    Rate,
    SecretOption,
    Streams,
    Timeout,
    Ttl,
    Where,
    desk_at,
    given_keys,
    report,
)
from evermark.errors import ConfigError

if TYPE_CHECKING:
    from evermark.server.bot_desk import BotDesk
    from evermark.server.desk import Desk

app = noun("Bots: subscriptions that act for a user of block streams.")

_FILE_BYTES_MAX = 1024 * 1024

Mode = Annotated[
    str | None, typer.Option(metavar="MODE", help="Which events: all, mentions_replies_reactions or none.")
]
Device = Annotated[
    str | None,
    typer.Option(metavar="DEVICE", help="The device whose session keys the bot uses, for encrypted messages."),
]
Inbox = Annotated[
    str | None, typer.Option(metavar="STREAM", help="The stream that is the bot's inbox, if the log does not say.")
]


@app.command("list")
def list_bots(config: ConfigOption = DEFAULT_CONFIG, as_json: JsonOption = False) -> None:
    """List the bots: the user of each, its mode, state and lag. Bots of the file begin with `evermark up`."""
    rows: list[dict[str, Any]] = []
    with desk_at(config) as (_, desk):
        page = _bots(desk).page()
        while True:
            rows += [bot.model_dump(mode="json", by_alias=True) for bot in page.bots]
            if page.after is None:
                break
            page = _bots(desk).page(page.after)
    columns = (
        "name",
        "made_by",
        "source",
        "user",
        "mode",
        "device",
        "state",
        "lag_events",
        "waiting",
        "dead",
        "reason",
    )
    empty = "there is none; add one under `bots:` in the file, or with: evermark bot add"
    show(rows, columns, as_json=as_json, empty=empty)


@app.command("show")
def show_bot(name: Name, config: ConfigOption = DEFAULT_CONFIG, as_json: JsonOption = False) -> None:
    """Show all of one bot."""
    with desk_at(config) as (_, desk):
        found = _bots(desk).one(name).model_dump(mode="json", by_alias=True)
    if as_json:
        show_json(found)
    else:
        show_table(("field", "value"), [(key, value) for key, value in found.items() if value not in (None, "", [])])


@app.command()
def add(
    name: Name,
    url: Annotated[str, typer.Option(metavar="URL", help="Where to send the events.", show_default=False)],
    source: Annotated[str, typer.Option(metavar="SOURCE", help="The source that has its streams.", show_default=False)],
    user: Annotated[str, typer.Option(metavar="USER", help="The user it acts for.", show_default=False)],
    mode: Mode = None,
    device: Device = None,
    inbox: Inbox = None,
    secret: SecretOption = None,
    new_secret: Annotated[bool, typer.Option("--new-secret", help="Make a secret, and print it this once.")] = False,
    streams: Streams = None,
    ops: Ops = None,
    where: Where = None,
    start: From = None,
    bundle: Bundle = None,
    concurrency: Concurrency = None,
    timeout: Timeout = None,
    rate: Rate = None,
    header: Header = None,
    parked_limit: ParkedLimit = None,
    ttl: Ttl = None,
    config: ConfigOption = DEFAULT_CONFIG,
    as_json: JsonOption = False,
) -> None:
    """Add a bot, beside those of the file. A running instance takes it up by itself."""
    if bool(secret) is new_secret:
        raise ConfigError("which secret?", hint="give one with --secret, or have one made with --new-secret")
    given = given_keys(
        url=url,
        source=source,
        user=user,
        mode=mode,
        device=device,
        inbox=inbox,
        secret=secret,
        streams=streams,
        ops=ops,
        where=where,
        start=start,
        bundle=bundle,
        concurrency=concurrency,
        timeout=timeout,
        rate=rate,
        headers=header,
        parked_limit=parked_limit,
        ttl=ttl,
    )
    with desk_at(config) as (deployment, desk):
        made = _bots(desk).add(name, {key: value for key, value in given.items() if value is not None})
        warn_of_streams(deployment, given.get("streams") or ())
    report(made, f"{name} is there, {made.state.value}, and speaks for {made.user}", as_json)


@app.command("set")
def set_bot(
    name: Name,
    mode: Mode = None,
    device: Device = None,
    inbox: Inbox = None,
    config: ConfigOption = DEFAULT_CONFIG,
    as_json: JsonOption = False,
) -> None:
    """Change the mode, device or inbox of a bot.

    What is not given stays as it is; an empty text sets an option back to its default. Other options of a bot are
    changed with `evermark subscription set`.
    """
    changes = given_keys(mode=mode, device=device, inbox=inbox)
    if not changes:
        raise ConfigError("nothing to change was given", hint="give --mode, --device or --inbox")
    with desk_at(config) as (_, desk):
        changed = _bots(desk).change(name, changes)
    report(changed, f"{name} is changed", as_json)


@app.command()
def remove(name: Name, config: ConfigOption = DEFAULT_CONFIG, yes: YesOption = False) -> None:
    """Remove a bot and its parked deliveries. The events stay in the log, and so do the keys of its device."""
    with desk_at(config) as (deployment, desk):
        from evermark.delivery.decide.registration import require_ours

        found = _bots(desk).one(name)
        require_ours(deployment.delivery.subscription(name).spec, "removed")
        confirm(f"Remove {name}? {found.waiting + found.dead} parked deliveries go with it.", yes=yes)
        _bots(desk).remove(name)
    say(f"{name} is removed")


@app.command()
def keys(
    name: Name,
    publish: Annotated[
        Path | None,
        typer.Option(help='Publish the keys in this file, {"session": "key", …}; - reads them from stdin.'),
    ] = None,
    session: Annotated[str | None, typer.Option(help="Print the key of this session.")] = None,
    withdraw: Annotated[str | None, typer.Option(help="Remove the key of this session; its events wait again.")] = None,
    config: ConfigOption = DEFAULT_CONFIG,
    as_json: JsonOption = False,
) -> None:
    """List, publish or withdraw session keys of a bot's device.

    Deliveries that waited for a key are sent when it is published.
    """
    if sum(given is not None for given in (publish, session, withdraw)) > 1:
        raise ConfigError("publish, print, or withdraw?", hint="give --publish, --session or --withdraw")
    if publish is not None:
        _publish(name, _read(publish), config, as_json)
        return
    with desk_at(config) as (_, desk):
        if withdraw is not None:
            _bots(desk).withdraw(name, withdraw)
            say(f"the key of {withdraw} is withdrawn")
            return
        if session is not None:
            found = _bots(desk).key(name, session)
            show_json(found.model_dump(mode="json")) if as_json else typer.echo(found.key)
            return
        rows: list[dict[str, Any]] = []
        page = _bots(desk).keys(name, limit=1000)
        while True:
            rows += [key.model_dump(mode="json", exclude={"key"}) for key in page.keys]
            if page.after is None:
                break
            page = _bots(desk).keys(name, page.after, 1000)
    show(rows, ("session", "published_at"), as_json=as_json, empty="no key is published")


def _publish(name: str, given: dict[str, Any], config: Path, as_json: bool) -> None:
    from evermark.delivery.base import KEYS_AT_ONCE_MAX

    if not given:
        raise ConfigError("no key was given", hint='write them as {"session": "key", …}')
    sessions, published, released = sorted(given), 0, 0
    with desk_at(config) as (_, desk):
        for start in range(0, len(sessions), KEYS_AT_ONCE_MAX):
            some = {session: given[session] for session in sessions[start : start + KEYS_AT_ONCE_MAX]}
            done = _bots(desk).publish(name, some)
            published, released = published + done.published, released + done.released
    if as_json:
        show_json({"published": published, "released": released})
    else:
        say(f"{published} keys are published; {released} deliveries waited for them")


def _read(path: Path) -> dict[str, Any]:
    try:
        text = sys.stdin.read(_FILE_BYTES_MAX + 1) if str(path) == "-" else path.read_text(encoding="utf-8")
        found = json.loads(text) if len(text) <= _FILE_BYTES_MAX else None
    except (OSError, ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ConfigError(
            "--publish: expected a JSON object of at most 1 MiB", hint='write the keys as {"session": "key", …}'
        )
    return found


def _bots(desk: Desk) -> BotDesk:
    if desk.bots is None:
        raise ConfigError("this deployment has no desk for bots")
    return desk.bots
