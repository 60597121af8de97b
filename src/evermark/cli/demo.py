"""`evermark demo`: the whole thing on one machine, in a minute."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from evermark.cli.console import say


def demo(
    seconds: Annotated[float, typer.Option(min=1, max=3600, help="How many seconds orders are made for.")] = 60.0,
    rate: Annotated[float, typer.Option(min=0.1, max=10_000, help="Orders a second.")] = 200.0,
    keep: Annotated[
        Path | None, typer.Option(help="Work in this folder and leave it there; by default nothing is left.")
    ] = None,
) -> None:
    """See Evermark work on this machine, with crashes: a shop, a chat, three receivers and two bots. Takes minutes."""
    from evermark.app.demo import run_demo

    raise typer.Exit(run_demo(seconds, rate, keep, say))
