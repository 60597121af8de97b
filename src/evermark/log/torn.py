"""After a power cut: set aside commits that did not reach the disk whole.

Everything up to the durable head was fsynced. A commit after it may be there in part, because a rename can reach the
disk before the contents do. It was not delivered and no checkpoint passed it, so it is set aside and its events are
read again. On an object store nothing is ever there in part.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from evermark.disk import sync_folder
from evermark.log.format import MAINTENANCE_APP_ID, CommitNote, FenceNote, MaintenanceNote, Note, note_of
from evermark.log.table import last_delta_checkpoint
from evermark.storage import Place

_ADD_COLUMN = "ADD COLUMN"  # as delta-rs calls it
_READ: set[tuple[str, int]] = set()  # Delta checkpoints that could be read, and when they were written


def set_aside_torn(folder: Place, durable_version: int) -> list[int]:
    """Set aside the first torn commit after `durable_version` and all that follow it; returns their versions."""
    log = folder / "_delta_log"
    if not isinstance(folder, Path) or not isinstance(log, Path) or not log.is_dir():
        return []
    versions = sorted(int(p.stem) for p in log.glob("*.json") if p.stem.isdigit() and int(p.stem) > durable_version)
    first = _first_torn(folder, versions, durable_version)
    torn = [version for version in versions if first is not None and version >= first]
    # It may be torn where all commits are whole; those it would replace are still there, or it was durable.
    checkpoints = torn_delta_checkpoints(folder, first)
    if first is not None and _is_mended(folder, first):
        return []  # this process slept, and another has been here and has committed since
    for path in (*(_commit(folder, version) for version in torn), *checkpoints):
        with suppress(FileNotFoundError):  # never there, or cleaned by the owner before us, which has not noticed yet
            path.rename(path.with_name(f"{path.name}.torn"))
    announced, named = log / "_last_checkpoint", log.glob(f"{last_delta_checkpoint(folder):020d}.checkpoint*.parquet")
    if torn or checkpoints or (announced.exists() and not any(named)):
        # It may name a checkpoint just set aside; without it readers list the folder, which is always right.
        announced.unlink(missing_ok=True)
        sync_folder(log)
    return torn


def torn_delta_checkpoints(folder: Place, first: int | None = None) -> list[Path]:
    """The Delta checkpoints of version `first` and later, and those that cannot be read. Each is read once only."""
    if not isinstance(folder, Path):
        return []
    return [
        path
        for path in (folder / "_delta_log").glob("*.checkpoint*.parquet")
        if (first is not None and int(path.name[:20]) >= first) or not _readable(path)
    ]


def _first_torn(folder: Path, versions: list[int], durable_version: int) -> int | None:
    """A version that is missing is as torn as one that is there in part: its name did not reach the disk."""
    if not versions:
        return None
    expected = durable_version + 1
    if not _commit(folder, durable_version).exists() and any((folder / "_delta_log").glob("*.checkpoint*.parquet")):
        expected = versions[0]  # earlier versions were cleaned, behind a Delta checkpoint
    commits = {version: _actions(_commit(folder, version)) for version in versions}
    # A file that a later commit replaced may be gone by now, and rightly.
    replaced = {a["remove"]["path"] for actions in commits.values() for a in actions or () if "remove" in a}
    for version in versions:
        # Asked again: a commit that came while the folder was listed may be missing in the list.
        if version != expected and not _commit(folder, expected).exists():
            return expected
        if not _whole(folder, commits[version], replaced):
            return version
        expected = version + 1
    return None


def _is_mended(folder: Path, version: int) -> bool:
    return _commit(folder, version).exists() and _whole(folder, _actions(_commit(folder, version)), set())


def _commit(folder: Path, version: int) -> Path:
    return folder / "_delta_log" / f"{version:020d}.json"


def _actions(commit: Path) -> list[dict[str, Any]] | None:
    """None where it is not all there."""
    try:
        actions = [json.loads(line) for line in commit.read_text().splitlines()]
        return actions if all(isinstance(action, dict) for action in actions) and _says_all(actions) else None
    except ValueError:  # not JSON, not UTF-8, or a note that is cut off
        return None


def _whole(folder: Path, actions: list[dict[str, Any]] | None, replaced: set[str]) -> bool:
    if actions is None:
        return False
    if isinstance(_note(actions), MaintenanceNote):
        # Its files were durable before it. A file that is not there now was lost since, and is for a person to see:
        # setting the commit aside would bring back files that are removed, and give the merged ones away as orphans.
        return True
    return all(a["add"]["path"] in replaced or _present(folder, a["add"]) for a in actions if "add" in a)


def _says_all(actions: list[dict[str, Any]]) -> bool:
    """Cut off between two lines, a commit is still JSON: its note says what it should hold."""
    info = _info(actions)
    if info is None:
        return False
    added = {a["add"]["path"] for a in actions if "add" in a}
    applications = sum("txn" in a for a in actions)
    note = note_of(info)
    if isinstance(note, CommitNote):
        return applications == 1 and added == set(note.files)
    if isinstance(note, MaintenanceNote):
        removes = sum("remove" in a for a in actions)
        is_counted = any(a["txn"]["appId"] == MAINTENANCE_APP_ID for a in actions if "txn" in a)  # its last line
        return is_counted and (len(added), removes) == (note.adds, note.removes)
    if isinstance(note, FenceNote):
        return applications == note.fences
    if info.get("operation") == _ADD_COLUMN:
        return any("metaData" in a for a in actions)
    if any("protocol" in a or "metaData" in a for a in actions):  # the table's creation
        return any("protocol" in a for a in actions) and any("metaData" in a for a in actions)
    return len(actions) > 1


def _info(actions: list[dict[str, Any]]) -> dict[str, Any] | None:
    return next((a["commitInfo"] for a in actions if "commitInfo" in a), None)


def _note(actions: list[dict[str, Any]]) -> Note | None:
    info = _info(actions)
    return note_of(info) if info is not None else None


def _present(folder: Path, add: dict[str, Any]) -> bool:
    path = folder / str(add["path"])
    return path.exists() and path.stat().st_size == int(add["size"])


def _readable(checkpoint: Path) -> bool:
    """Or gone: cleaned by the owner before us, which has not noticed yet."""
    try:
        known = (str(checkpoint), checkpoint.stat().st_mtime_ns)
        if known not in _READ:
            pq.read_table(checkpoint)
            _READ.add(known)
    except FileNotFoundError:
        return True
    except (OSError, pa.ArrowException):
        return False
    return True
