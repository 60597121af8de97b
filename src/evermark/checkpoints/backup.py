"""Checkpoints as a file: JSON, version 1 (see docs/formats.md). Positions and numbers only; nothing secret is in it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from evermark.checkpoints.base import Checkpoint
from evermark.disk import write_whole
from evermark.errors import ConfigError, DiskFullError, FormatError, NotFoundError

FORMAT = "evermark-checkpoints"
VERSION = 1
FILE_BYTES_MAX = 64 * 1024 * 1024
POSITION_CHARS_MAX = 4096


@dataclass(frozen=True)
class Backup:
    deployment: str
    made_at: str
    checkpoints: Mapping[tuple[str, int], Checkpoint]  # by source and partition


def to_text(deployment: str, checkpoints: Mapping[tuple[str, int], Checkpoint], now: datetime) -> str:
    rows = [
        {"source": source, "partition": partition, **vars(checkpoint)}
        for (source, partition), checkpoint in sorted(checkpoints.items())
    ]
    document = {"format": FORMAT, "version": VERSION, "deployment": deployment, "made_at": now.isoformat()}
    return json.dumps({**document, "checkpoints": rows}, indent=1) + "\n"


def from_text(text: str, name: str) -> Backup:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        raise FormatError(f"{name} is not JSON", hint="name a file made by `evermark checkpoint backup`") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise FormatError(f"{name} holds no checkpoints", hint="name a file made by `evermark checkpoint backup`")
    if document.get("version") != VERSION:
        raise FormatError(
            f"{name} has version {str(document.get('version'))[:20]}; this program knows {VERSION}",
            hint="use the Evermark that made it",
        )
    try:
        found = dict(_row(row) for row in document["checkpoints"])
        return Backup(str(document["deployment"]), str(document.get("made_at", "")), found)
    except (KeyError, TypeError, ValueError):
        raise FormatError(f"{name} is damaged", hint="take another backup") from None


def _row(row: Any) -> tuple[tuple[str, int], Checkpoint]:
    source, partition, position, batch, epoch = (
        row[key] for key in ("source", "partition", "position", "batch", "epoch")
    )
    whole = all(type(number) is int and 0 <= number < 2**63 for number in (partition, batch, epoch))
    if not (whole and isinstance(source, str) and isinstance(position, str) and len(position) <= POSITION_CHARS_MAX):
        raise ValueError("not a checkpoint")
    if not _is_kept_as_text(source + position):
        raise ValueError("not a text that any store keeps")
    return (source, partition), Checkpoint(position, batch, epoch)


def _is_kept_as_text(text: str) -> bool:
    """JSON can name the character NUL and halves of a surrogate pair."""
    return "\0" not in text and not any("\ud800" <= c <= "\udfff" for c in text)


def write_backup(path: Path, text: str, *, force: bool = False) -> None:
    """Whole and durable, or not at all; an existing file is replaced only with `force`."""
    try:
        write_whole(path, text, replace=force)
    except FileExistsError:
        raise ConfigError(f"{path} exists already", hint="name another file, or add --force") from None
    except OSError as error:
        raise DiskFullError(
            f"cannot write {path}: {(error.strerror or 'unknown reason').lower()}",
            hint="is there space, does the folder exist, and may you write to it?",
        ) from None


def read_backup(path: Path) -> Backup:
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except FileNotFoundError:
        raise NotFoundError(f"there is no file {path}", hint="make one with: evermark checkpoint backup FILE") from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {(error.strerror or 'unknown reason').lower()}") from None
    if len(data) > FILE_BYTES_MAX:
        raise FormatError(f"{path.name} is larger than {FILE_BYTES_MAX} bytes", hint="is it the right file?")
    return from_text(data.decode("utf-8", "replace"), path.name)
