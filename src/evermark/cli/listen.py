"""`evermark listen`: a local receiver that shows what it gets, verifies it, and can misbehave."""

from __future__ import annotations

import io
import json
import os
import random
import sys
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from evermark.cli.console import printable, seconds, set_by_signals
from evermark.errors import EvermarkError
from evermark_receiver import Response

if TYPE_CHECKING:
    from evermark.testing.listener import Record

SHOWN_CHARS_MAX = 200


class _Printer:
    """Writes received events to stdout; ends the listener when stdout is closed."""

    def __init__(self, *, as_json: bool, done: threading.Event) -> None:
        self._as_json = as_json
        self._done = done

    def line(self, text: str, **fields: Any) -> None:
        if self._done.is_set():
            return
        try:
            print(json.dumps(fields) if self._as_json else printable(text), flush=True)
        except OSError:
            self._done.set()
            # What print could not write is written again when Python ends: give it somewhere to go.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def record(self, record: Record) -> None:
        event = record.event
        marks = ["duplicate"] * record.duplicate + ["historical"] * event.historical
        marks += [f"attempt {event.attempt}"] * (event.attempt > 1)
        data = json.dumps(event.data, ensure_ascii=False)
        shown = data if len(data) <= SHOWN_CHARS_MAX else data[:SHOWN_CHARS_MAX] + "…"
        key = "no key" if event.key is None else f"key={event.key}"
        if event.previous_key is not None:
            key += f", before {event.previous_key}"
        self.line(
            f"{record.at[11:23]} {event.stream} {event.op} {key} {shown} id={event.delivery_id}"
            + (f" ({', '.join(marks)})" if marks else ""),
            **record.fields(),
            data=event.data,
        )

    def refusal(self, response: Response) -> None:
        try:
            reason = str(json.loads(response.body)["reason"])
        except (ValueError, KeyError, TypeError):
            reason = ""
        at = datetime.now(UTC).isoformat()
        self.line(f"{at[11:23]} answered {response.status}: {reason}", status=response.status, reason=reason, at=at)


def listen(
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes any free one.")] = 8080,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    secret: Annotated[
        list[str] | None,
        typer.Option(
            envvar="EVERMARK_SECRET",
            show_default=False,
            metavar="SECRET",
            help="The signing secret, whsec_…; repeat it during a rotation.",
        ),
    ] = None,
    fail: Annotated[
        str | None,
        typer.Option(
            metavar="STATUS:HOW_OFTEN", help="Fail on purpose: 503:3 answers 503 to the first 3, 503:10% to one in ten."
        ),
    ] = None,
    slow: Annotated[
        str | None, typer.Option(metavar="DURATION", help="Take this long for each request, for example 5s.")
    ] = None,
    record: Annotated[Path | None, typer.Option(help="Append each event to this file, as JSON lines.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the random failures.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines.")] = False,
) -> None:
    """Receive webhooks on this machine and print them. It verifies signatures, drops repeats, and fails on request."""
    from evermark.testing.listener import Failing, Listener

    try:
        failing = Failing.parse(fail) if fail else None
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--fail") from None
    chosen_seed = random.randrange(2**32) if seed is None else seed
    done = threading.Event()
    printer = _Printer(as_json=as_json, done=done)
    try:
        listener = Listener(
            secrets=secret or (),
            host=host,
            port=port,
            failing=failing,
            slow_s=seconds(slow, "--slow") if slow else 0.0,
            record=record,
            records_max=1,
            on_record=printer.record,
            on_refusal=printer.refusal,
            rng=random.Random(chosen_seed),
        ).start()
    except EvermarkError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    if failing is not None and failing.share:
        typer.echo(f"random failures with --seed {chosen_seed}", err=True)
    if not secret:
        typer.echo("WARNING: no --secret: signatures are NOT VERIFIED, anybody can send anything here", err=True)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    with set_by_signals(done):
        try:
            printer.line(f"listening on {listener.url}", listening=listener.url, port=listener.port)
            done.wait()
        finally:
            listener.stop()
    counts = listener.counts()
    typer.echo(", ".join(f"{name.replace('_', ' ')} {count}" for name, count in counts.items()), err=True)
