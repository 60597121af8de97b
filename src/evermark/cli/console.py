"""What every command says, and how: tables or JSON on stdout, everything else on stderr, exit codes."""

from __future__ import annotations

import base64
import errno
import json
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date, datetime
from typing import Any

import typer

from evermark import durations
from evermark.errors import ConfigError, EvermarkError

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_WRONG = 3  # it worked, and found something wrong
EXIT_INTERRUPTED = 130
_OS_HINTS = {
    errno.ENOSPC: "free some space, then try again; nothing was lost",
    errno.EDQUOT: "free some space or raise the quota, then try again; nothing was lost",
    errno.EACCES: "run it as a user who may, or change the owner or mode of that path",
    errno.EROFS: "the disk is mounted read-only: choose another folder, or mount it for writing",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
}
_PIPE_WIDTH = 100_000  # wider than any terminal: a row stays one line


def noun(text: str) -> typer.Typer:
    """The commands of one noun."""
    return typer.Typer(
        help=text, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
    )


@contextmanager
def said_clearly() -> Iterator[None]:
    """Errors of ours and of the operating system end a command with what, where and what to do: no traceback."""
    try:
        yield
    except EvermarkError as error:
        show_error(error)
        raise typer.Exit(EXIT_FAILED) from None
    except UnicodeEncodeError as error:
        # Python keeps a byte that is not UTF-8 as such a character; no other of these comes from whoever typed.
        if not all("\udc80" <= c <= "\udcff" for c in error.object[error.start : error.end]):
            raise
        show_error(ConfigError("an argument or a variable is not UTF-8 text", hint="names and values are UTF-8"))
        raise typer.Exit(EXIT_USAGE) from None
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except OSError as error:
        if error.errno == errno.EPIPE or error.errno is None:
            raise
        where = f" ({error.filename})" if error.filename else ""
        text = f"{(error.strerror or type(error).__name__).lower()}{where}"
        show_error(EvermarkError(text, hint=_OS_HINTS.get(error.errno, "")))
        raise typer.Exit(EXIT_FAILED) from None


def show_error(error: EvermarkError) -> None:
    from evermark.observe.logging import without_secrets

    _write("error:", without_secrets(error.message), "red")
    if error.hint:
        _write("hint:", without_secrets(error.hint), "yellow")


def say(text: str) -> None:
    """A sentence for the person at the terminal; stdout is for what was asked for."""
    sys.stderr.write(printable(text, keep="\n") + "\n")


def warn(text: str) -> None:
    _write("warning:", text, "yellow")


def show_json(document: Any) -> None:
    """One JSON document on one line."""
    sys.stdout.write(shown_as_json(document) + "\n")


def shown_as_json(document: Any) -> str:
    return json.dumps(document, default=_as_json, ensure_ascii=False)


def show(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], *, as_json: bool = False, empty: str = "") -> None:
    """Rows as one JSON list for programs, as a table of `columns` for people; `empty` says that there are none."""
    if as_json:
        show_json(list(rows))
    elif not rows and empty:
        say(empty)
    else:
        show_table(columns, [[row.get(column) for column in columns] for row in rows])


def show_fields(document: Mapping[str, Any], *, as_json: bool, but: Sequence[Any] = (None, "", [])) -> None:
    """One thing: a JSON document for programs, a line per field for people, `but` for fields with these values."""
    if as_json:
        show_json(document)
    else:
        show_table(("field", "value"), [field for field in document.items() if field[1] not in but])


def show_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(file=sys.stdout, highlight=False)
    if not console.is_terminal:
        console.width = _PIPE_WIDTH
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(Text(printable(column)), overflow="fold")
    for row in rows:
        table.add_row(*[Text(_cell(value)) for value in row])
    console.print(table)


def confirm(question: str, *, yes: bool) -> None:
    """Go on only when a person said so."""
    if yes:
        return
    try:
        agreed = typer.confirm(question, err=True)
    except typer.Abort:
        sys.stderr.write("\n")
        agreed = False
    if not agreed:
        raise EvermarkError("not confirmed: nothing was done", hint="answer y, or add --yes")


def printable(text: str, keep: str = "") -> str:
    """Texts come from databases and receivers: no control character of theirs reaches a terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def seconds(text: str, option: str) -> float:
    """A duration of the command line; `option` is where it stands."""
    try:
        return durations.parse(text).total_seconds()
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


@contextmanager
def set_by_signals(done: threading.Event) -> Iterator[None]:
    """SIGTERM and Ctrl-C set `done` while this lasts."""
    previous = {sig: signal.signal(sig, lambda *_: done.set()) for sig in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for sig, handler in previous.items():
            signal.signal(sig, handler)


def _write(label: str, text: str, colour: str) -> None:
    shown = typer.style(label, fg=colour) if sys.stderr.isatty() else label
    sys.stderr.write(f"{shown} {printable(text, keep=chr(10))}\n")


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, datetime):
        return value.isoformat(sep=" ", timespec="seconds")
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_cell, value))
    if isinstance(value, (bytes, bytearray)):
        return base64.b64encode(value).decode()
    return printable(shown_as_json(value) if isinstance(value, dict) else str(value))


def _as_json(value: Any) -> Any:
    if isinstance(value, (datetime, date)):
        return value.isoformat()
    if isinstance(value, (bytes, bytearray)):
        return base64.b64encode(value).decode()
    return str(value)
