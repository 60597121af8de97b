"""`evermark bot`: subscriptions that speak for a user, and the session keys of their devices.

What holds for any subscription (its other keys, pause, resume, rotate, test) is done with `evermark subscription`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from evermark.cli.console import noun, say, show, show_fields, show_json
from evermark.cli.options import DEFAULT_CONFIG, ConfigOption, Given, JsonOption, YesOption, keys_as_options
from evermark.cli.subscription import (
    NOT_OPTIONS,
    Name,
    NewSecretOption,
    SecretOption,
    removed,
    report,
    services_at,
    with_secret,
)
from evermark.config.bots import BotConfig
from evermark.config.subscriptions import SubscriptionConfig
from evermark.delivery.limits import KEYS_AT_ONCE_MAX
from evermark.errors import ConfigError

if TYPE_CHECKING:
    from evermark.server.bots import BotPage, KeyPage

app = noun("Bots: subscriptions that act for a user of block streams.")

_FILE_BYTES_MAX = 1024 * 1024
_FIXED = ("source", "user")
P = TypeVar("P", "BotPage", "KeyPage")


@app.command("list")
def list_bots(config: ConfigOption = DEFAULT_CONFIG, as_json: JsonOption = False) -> None:
    """List the bots: the user of each, its mode, state and lag. Bots of the file begin with `evermark up`."""
    with services_at(config) as (_, services):
        bots = [bot for page in _pages(services.bots.page) for bot in page.bots]
    rows = [bot.model_dump(mode="json", by_alias=True) for bot in bots]
    columns = ("name", "made_by", "source", "user", "mode", "device", "state", "lag_events")
    empty = "there is none; add one under `bots:` in the file, or with: evermark bot add"
    show(rows, (*columns, "waiting", "dead", "reason"), as_json=as_json, empty=empty)


@app.command("show")
def show_bot(name: Name, config: ConfigOption = DEFAULT_CONFIG, as_json: JsonOption = False) -> None:
    """Show all of one bot."""
    with services_at(config) as (_, services):
        found = services.bots.get(name).model_dump(mode="json", by_alias=True)
    show_fields(found, as_json=as_json)


@app.command()
@keys_as_options(BotConfig, but=NOT_OPTIONS)
def add(
    name: Name,
    given: Given,
    secret: SecretOption = None,
    new_secret: NewSecretOption = False,
    config: ConfigOption = DEFAULT_CONFIG,
    as_json: JsonOption = False,
) -> None:
    """Add a bot, beside those of the file. A running instance takes it up by itself."""
    values = with_secret(given, secret, new_secret)
    with services_at(config) as (_, services):
        made = services.bots.add(name, values)
    report(made, f"{name} is there, {made.state.value}, and speaks for {made.user}", as_json)


@app.command("set")
@keys_as_options(BotConfig, but=(*SubscriptionConfig.keys(), *_FIXED), optional=True)
def set_bot(name: Name, given: Given, config: ConfigOption = DEFAULT_CONFIG, as_json: JsonOption = False) -> None:
    """Change the mode, device or inbox of a bot.

    What is not given stays as it is; an empty text sets an option back to its default. Other options of a bot are
    changed with `evermark subscription set`.
    """
    if not given:
        raise ConfigError("nothing to change was given", hint="give --mode, --device or --inbox")
    with services_at(config) as (_, services):
        changed = services.bots.change(name, given)
    report(changed, f"{name} is changed", as_json)


@app.command()
def remove(name: Name, config: ConfigOption = DEFAULT_CONFIG, yes: YesOption = False) -> None:
    """Remove a bot and its parked deliveries. The events stay in the log, and so do the keys of its device."""
    with services_at(config) as (deployment, services):
        services.bots.get(name)  # a subscription that is no bot is not removed here
        removed(deployment, services, name, yes=yes)


@app.command()
def keys(
    name: Name,
    publish: Annotated[
        Path | None, typer.Option(help='Publish the keys in this file, {"session": "key", …}; - reads them from stdin.')
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
    with services_at(config) as (_, services):
        if withdraw is not None:
            services.bots.withdraw(name, withdraw)
            say(f"the key of {withdraw} is withdrawn")
            return
        if session is not None:
            found = services.bots.key(name, session)
            show_json(found.model_dump(mode="json")) if as_json else typer.echo(found.key)
            return
        found_keys = [key for page in _pages(lambda after: services.bots.keys(name, after, 1000)) for key in page.keys]
    rows = [key.model_dump(mode="json", exclude={"key"}) for key in found_keys]
    show(rows, ("session", "published_at"), as_json=as_json, empty="no key is published")


def _pages(ask: Callable[[str], P]) -> Iterator[P]:
    """All pages of a list; `ask` gives the page after a text."""
    after: str | None = ""
    while after is not None:
        page = ask(after)
        yield page
        after = page.after


def _publish(name: str, given: dict[str, Any], config: Path, as_json: bool) -> None:
    if not given:
        raise ConfigError("no key was given", hint='write them as {"session": "key", …}')
    sessions, published, released = sorted(given), 0, 0
    with services_at(config) as (_, services):
        for start in range(0, len(sessions), KEYS_AT_ONCE_MAX):
            some = {session: given[session] for session in sessions[start : start + KEYS_AT_ONCE_MAX]}
            done = services.bots.publish(name, {"keys": some})
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
