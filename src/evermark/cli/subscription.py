"""`evermark subscription`: who wants what, and how far they are."""

from __future__ import annotations

from typing import Annotated

import typer

from evermark.cli.console import JsonOption, noun, say, show
from evermark.cli.deployment import DEFAULT_CONFIG, ConfigOption, as_deliverer, opened
from evermark.cli.standing import subscription_rows

app = noun("Who wants which events.")

Name = Annotated[str, typer.Argument(metavar="NAME", show_default=False)]


@app.command("list")
def list_subscriptions(config: ConfigOption = DEFAULT_CONFIG, as_json: JsonOption = False) -> None:
    """All of them, with what they want and where they are."""
    with opened(config) as deployment:
        rows = subscription_rows(deployment)
    columns = ("subscription", "url", "streams", "where", "state", "lag_batches", "waiting", "dead", "reason")
    show(rows, columns, as_json=as_json, empty="there is none; add one under `subscriptions:` in the file")


@app.command()
def secret() -> None:
    """Make a fresh signing secret and print it."""
    from evermark.delivery.signing import new_secret

    typer.echo(new_secret())


@app.command()
def pause(
    name: Name,
    config: ConfigOption = DEFAULT_CONFIG,
    reason: Annotated[str, typer.Option(help="Shown by `status`.")] = "paused by a person",
) -> None:
    """Deliver nothing to it until it is resumed. Its events stay in the log."""
    with opened(config) as deployment:
        store = deployment.delivery
        as_deliverer(deployment, lambda epoch: store.suspend(name, reason[:500], epoch))
    say(f"{name} is paused; go on with: evermark subscription resume {name}")


@app.command()
def resume(name: Name, config: ConfigOption = DEFAULT_CONFIG) -> None:
    """Deliver to it again, from where it was left."""
    with opened(config) as deployment:
        store = deployment.delivery
        as_deliverer(deployment, lambda epoch: store.resume(name, epoch))
    say(f"{name} is resumed, from where it was left")
