"""The command line: nouns, then verbs. Each command's module is loaded when it is called, not before."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command, get_group

from evermark.cli.console import said_clearly


class _Entry(NamedTuple):
    where: str  # module:attribute; a function is a command, a `typer.Typer` a noun
    text: str  # what it is for, in a line; here so that listing it loads nothing


COMMANDS = {
    "demo": _Entry("demo:demo", "See Evermark work on this machine, with crashes."),
    "init": _Entry("init:init", "Write a commented evermark.yaml to begin with."),
    "config": _Entry("config:app", "Check the file before `evermark up` does."),
    "up": _Entry("up:up", "Run the deployment until told to stop."),
    "status": _Entry("status:status", "Show sources, log and subscriptions, and how far each is."),
    "doctor": _Entry("doctor:doctor", "Examine the sources; say what is wrong and what to run."),
    "migrate": _Entry("migrate:migrate", "Upgrade the state database to this version."),
    "listen": _Entry("listen:listen", "Receive webhooks on this machine and print them."),
    "source": _Entry("source:app", "Sources: where events come from."),
    "subscription": _Entry("subscription:app", "Subscriptions: who gets which events."),
    "bot": _Entry("bot:app", "Bots: subscriptions that act for a user of block streams."),
    "delivery": _Entry("delivery:app", "Parked deliveries: waiting for a retry, or dead."),
    "replay": _Entry("replay:app", "Replays: deliver past events again."),
    "checkpoint": _Entry("checkpoint:app", "Checkpoints: how far each source was read."),
    "log": _Entry("log:app", "The log: query it, compact it."),
    "instance": _Entry("instance:app", "Running Evermark processes."),
    "replica": _Entry("replica:app", "Replicas: tables in several databases that stay equal."),
    "blocknode": _Entry("blocknode:app", "Run a block node, a server of block streams."),
}


class Commands(TyperGroup):
    """Finds commands by name in `COMMANDS`, and says the errors of all of them."""

    def __init__(self, **attrs: Any) -> None:
        super().__init__(**attrs)
        self._listing = False
        for name, entry in COMMANDS.items():
            self.add_command(TyperCommand(name, help=entry.text))

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if self._listing or cmd_name not in COMMANDS:
            return super().get_command(ctx, cmd_name)
        return loaded(cmd_name)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self._listing = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self._listing = False

    def invoke(self, ctx: Any) -> Any:
        with said_clearly():
            return super().invoke(ctx)


def loaded(name: str) -> Any:
    """The command itself."""
    module, _, attribute = COMMANDS[name].where.partition(":")
    found = getattr(importlib.import_module(f"evermark.cli.{module}"), attribute)
    if isinstance(found, typer.Typer):
        command: Any = get_group(found)
    else:
        single = typer.Typer(add_completion=False, rich_markup_mode=None)
        single.command(name)(found)
        command = get_command(single)
    command.name = name
    _name_values(command)
    return command


def _name_values(command: Any) -> None:
    """Help names the value of each option for people, where the option itself does not: no type of Python's."""
    for each in getattr(command, "commands", {}).values():
        _name_values(each)
    for param in command.params:
        if param.param_type_name == "argument":
            param.display_type_rich = lambda ctx: ""  # it has its name alone
        elif param.metavar is None and not param.is_flag and param.name not in _CHOICES:
            param.metavar = _VALUES.get(param.name, "N")


_CHOICES = ("choice", "engine", "state")  # help lists what they may be
_VALUES = {
    "config": "FILE",
    "path": "FILE",
    "record": "FILE",
    "publish": "FILE",
    "data": "FOLDER",
    "keep": "FOLDER",
    "source": "NAME",
    "subscription": "NAME",
    "role": "ROLE",
    "table": "TABLE",
    "host": "ADDRESS",
    "follow": "URL",
    "token": "TOKEN",
    "follow_token": "TOKEN",
    "secret": "SECRET",
    "session": "SESSION",
    "withdraw": "SESSION",
    "reason": "TEXT",
    "seal_after": "DURATION",
    "keepalive": "DURATION",
    "stall": "DURATION",
}


app = typer.Typer(
    cls=Commands, no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False, rich_markup_mode=None
)


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"evermark {version('evermark')}")
        raise typer.Exit


@app.callback()
def evermark(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say which version this is.")
    ] = False,
) -> None:
    """Carries events from where they are made to where they are needed, and never loses one."""


def run(args: Sequence[str] | None = None) -> None:
    """The program `evermark`. Exit codes: 0 done, 1 failed, 2 usage, 3 found something wrong."""
    if isinstance(sys.stdout, TextIOWrapper):  # what a terminal has no character for is no reason to say nothing
        sys.stdout.reconfigure(errors="backslashreplace")
    app(args=list(args) if args is not None else None, prog_name="evermark")


if __name__ == "__main__":
    run()
