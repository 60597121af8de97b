"""The shelf on which the table of a stream is kept beside its log: its layers, and the files they are made of.

`<log>/<source>/_tables/<digest of the stream>/` holds Parquet files of KEPT rows in layers: the lowest has a row for
each key, every later one the rows of keys that events spoke of since. `kept.json` names the layers, and says up to
which batch of each partition they hold everything. Nothing in it is truth: it may be deleted at any time, and where a
file is not as it was written, nothing is used.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from evermark.disk import sync_file, sync_folder, write_whole
from evermark.log.format import KEPT
from evermark.log.frames import KEPT_SCHEMA, files_frame
from evermark.log.implied_table import Truncates
from evermark.storage import Place

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FORMAT = 2
FOLDER = "_tables"
UNUSED_AGE_S = 3600.0
_CHECKSUMS: dict[tuple[int, ...], int] = {}  # of files, as they were last changed
_CHECKSUMS_MAX = 10_000
# Images that are held at a time. Rows that are read at a time are bounded besides: Spark writes what many rows have in
# common once, so that a file does not tell how large they are.
IMAGES_BYTES = 16 * 1024 * 1024
_ROWS_MAX = 2048
# A page is read as a whole, and ends where so many rows were written.
_PAGE_STEP_ROWS = 64


@dataclass(frozen=True)
class KeptFile:
    name: str
    rows: int
    size: int
    crc: int


@dataclass(frozen=True)
class Mark:
    """How far a partition was read: its last batch, how many events it had up to there, and when that batch was taken,
    which tells it from another batch of this number."""

    batch: int
    rows: int
    taken_us: int


@dataclass(frozen=True)
class Layer:
    """Its own files; all else is said of this layer with all below it."""

    files: tuple[KeptFile, ...]
    marks: Mapping[int, Mark]
    partitions: tuple[int, ...]  # that have events of the stream
    truncates: tuple[Truncates, ...] = ()
    moment_us_max: int | None = None  # no event is later; None: not known

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.files)


def layer_from(body: Mapping[str, Any]) -> Layer:
    return Layer(
        tuple(KeptFile(**{**file, "name": Path(file["name"]).name}) for file in body["files"]),
        {int(partition): Mark(**mark) for partition, mark in body["marks"].items()},
        tuple(body["partitions"]),
        tuple(Truncates(**one) for one in body["truncates"]),
        body["moment_us_max"],
    )


def newest_of_each(tables: Sequence[pa.Table]) -> pa.Table:
    """Rows of KEPT: of each key of a partition, the rows of the first table that has the key."""
    rows = pa.concat_tables(tables)
    codes = rows["row_key"].combine_chunks().dictionary_encode().indices.to_numpy().astype(np.int64)
    _, firsts = np.unique((codes << 32) + rows["partition"].to_numpy(), return_index=True)
    return rows.take(pa.array(np.sort(firsts)))


def forget_kept(log: Place) -> list[Path]:
    """Events have left the log: what was made of them is used no more, and its files go when their readers are done.
    Returns the folders in which it could not be removed: of another user's, say.
    """
    if not isinstance(log, Path):
        return []
    return [known.parent for known in (log / FOLDER).glob("*/kept.json") if not _put_out_of_use(known.parent)]


def _put_out_of_use(folder: Path) -> bool:
    """Whether the table that is kept in the folder is used no more."""
    for path in folder.glob("*.parquet"):
        with suppress(OSError):  # it goes earlier then, and no table is kept in use by it
            os.utime(path)
    try:
        (folder / "kept.json").unlink(missing_ok=True)
    except OSError:
        return False
    return True


def remove_forgotten(log: Place, now: float, forgotten: Callable[[], int]) -> None:
    """Remove kept files that no table is made of any more, and drafts of such, when their readers are done: the events
    they were made of may have left the log. `forgotten`: how often events were; a table from before is put out of use,
    should the process that forgot them not have lived to do so.
    """
    if not isinstance(log, Path) or not (folders := list((log / FOLDER).glob("*"))):
        return
    count = forgotten()
    for folder in folders:
        if (used := _used_in(folder, count)) is not None:
            _remove_unused(folder, used, now)


def _used_in(folder: Path, forgotten: int) -> set[str] | None:
    """The names of the files that the kept table is made of; None: it is one of another program, and left alone."""
    try:
        body = json.loads((folder / "kept.json").read_text())
        if body["format"] != FORMAT:
            return None
        if body.get("forgotten", 0) < forgotten and _put_out_of_use(folder):
            return set()
        return {file["name"] for layer in body["layers"] for file in layer["files"]}
    except FileNotFoundError:
        return set()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _remove_unused(folder: Path, used: Collection[str], now: float) -> None:
    for path in folder.glob("*"):
        if path.name in used or path.name == "kept.json":
            continue
        with suppress(OSError):
            # Spark writes a draft's files in folders deep in it.
            changed = max(each.stat().st_mtime for each in (path, *path.rglob("*")))
            if now - changed >= UNUSED_AGE_S:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


@dataclass
class Shelf:
    """The folder of one stream's kept table. Two processes that write it at once do not harm each other: each writes
    files of its own, and the later `kept.json` stays. `forgotten`: how often events of the log were, which tells layers
    that were made of them."""

    log: Path
    stream: str
    clock: Callable[[], float] = time.time
    forgotten: int = 0
    folder: Path = field(init=False)

    def __post_init__(self) -> None:
        self.folder = self.log / FOLDER / hashlib.sha256(self.stream.encode()).hexdigest()[:32]

    def layers(self) -> list[Layer]:
        """As they were written; none where anything is not as it was written."""
        layers = self._named()
        try:
            return layers if all(self._is_whole(file) for layer in layers for file in layer.files) else []
        except OSError:
            return []

    def _named(self) -> list[Layer]:
        """As `kept.json` has them, whatever their files are."""
        try:
            body = json.loads((self.folder / "kept.json").read_text())
            if body["format"] != FORMAT or body["stream"] != self.stream:
                return []
            if body.get("forgotten", 0) != self.forgotten:
                return []
            return [layer_from(layer) for layer in body["layers"]]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return []

    def _is_whole(self, file: KeptFile) -> bool:
        path = self.folder / file.name
        return path.stat().st_size == file.size and _crc(path) == file.crc

    def frame(self, spark: SparkSession, layer: Layer) -> DataFrame:
        return files_frame(spark, [str(self.folder / file.name) for file in layer.files], KEPT_SCHEMA)

    def open(self) -> bool:
        """Make the folder; False where nothing can be kept."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            return False
        return os.access(self.folder, os.W_OK)

    def keep(self, layers: Sequence[Layer], is_current: Callable[[], bool] = lambda: True) -> None:
        """`is_current`: whether nothing was forgotten since these layers were begun. Who forgets puts the table out of
        use after its commit: what is written here is seen there, or the commit here.
        """
        if not is_current():
            return
        used = {file.name for layer in layers for file in layer.files}
        for layer in self._named():
            for file in layer.files:
                if file.name not in used:
                    with suppress(FileNotFoundError):  # a reader was given it a moment ago: its hour begins now
                        os.utime(self.folder / file.name)
        sync_folder(self.folder)
        told = {"format": FORMAT, "stream": self.stream, "forgotten": self.forgotten}
        body = {**told, "layers": [asdict(layer) for layer in layers]}
        write_whole(self.folder / "kept.json", json.dumps(body), replace=True)
        if not is_current():
            _put_out_of_use(self.folder)
        _remove_unused(self.folder, used, self.clock())

    def written(self, frame: DataFrame) -> tuple[KeptFile, ...]:
        """Files with these rows, by Spark."""
        draft = self.folder / f"draft-{secrets.token_hex(8)}"
        try:
            frame.write.option("compression", "snappy").parquet(str(draft))
            return tuple(self._moved(path) for path in sorted(draft.glob("*.parquet")))
        except Exception as error:  # if it was not the disk but the query, the next try without keeping says so
            raise OSError(f"the table of {self.stream} could not be kept") from error
        finally:
            shutil.rmtree(draft, ignore_errors=True)

    def size_of(self, layer: Layer) -> int:
        """In memory, where we wrote it: a file may be much smaller."""
        files = [pq.read_metadata(self.folder / file.name) for file in layer.files]
        return sum(file.row_group(number).total_byte_size for file in files for number in range(file.num_row_groups))

    def merged(self, layers: Sequence[Layer]) -> Sequence[Layer]:
        """The layers as one; as they are where Spark has written one: it may have other types for the same."""
        paths = [self.folder / file.name for layer in reversed(layers) for file in layer.files]
        if any(pq.read_schema(path) != KEPT for path in paths):
            return layers
        tables = [pq.read_table(path) for path in paths]
        path = self.folder / f"{secrets.token_hex(16)}.parquet"
        write_kept(path, [newest_of_each(tables)])
        return [replace(layers[-1], files=(described(path),))]

    def _moved(self, path: Path) -> KeptFile:
        target = self.folder / f"{secrets.token_hex(16)}.parquet"
        path.rename(target)
        return described(target)


def write_kept(path: Path, tables: Iterable[pa.Table]) -> None:
    """Rows of KEPT; no file is left where they cannot be written, or made."""
    try:
        with pq.ParquetWriter(
            path, KEPT, compression="snappy", use_dictionary=["op"], write_batch_size=_PAGE_STEP_ROWS
        ) as writer:
            for rows in tables:
                writer.write_table(rows)
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def images_of(keys: Sequence[str], files: Sequence[Path]) -> Iterator[dict[str, str | None]]:
    """The images that kept rows have of these keys, of each by the first file that has it; none of what is gone. In
    pieces, as all of them may be larger than a process: large values are what is looked for here."""
    wanted = pa.array(keys, pa.string())
    seen: set[str] = set()
    piece: dict[str, str | None] = {}
    size = 0
    for path in files:
        for rows in _rows_of(wanted, path):
            for row in rows.to_pylist():
                if row["row_key"] in seen:
                    continue
                seen.add(row["row_key"])
                image = piece[row["row_key"]] = None if row["gone"] else row["payload"]
                size += len(image or "")
                if size >= IMAGES_BYTES:
                    yield piece
                    piece, size = {}, 0
    if piece:
        yield piece


def _rows_of(wanted: pa.Array, path: Path) -> Iterator[pa.RecordBatch]:
    """The file's rows of these keys, few at a time."""
    with pq.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file:
        payload = file.metadata.schema.names.index("payload")
        for group in range(file.num_row_groups):
            is_one = pc.is_in(file.read_row_group(group, columns=["row_key"])["row_key"], value_set=wanted)
            if not pc.any(is_one).as_py():
                continue
            about = file.metadata.row_group(group)
            rows_max = IMAGES_BYTES * about.num_rows // (about.column(payload).total_uncompressed_size + 1)
            first = 0
            for rows in file.iter_batches(
                min(max(rows_max, 1), _ROWS_MAX), [group], ["row_key", "gone", "payload"], use_threads=False
            ):
                chosen = is_one.slice(first, rows.num_rows)
                first += rows.num_rows
                if pc.any(chosen).as_py():
                    yield rows.filter(chosen.combine_chunks())


def described(path: Path) -> KeptFile:
    sync_file(path)
    return KeptFile(path.name, pq.read_metadata(path).num_rows, path.stat().st_size, _crc(path))


def _crc(path: Path) -> int:
    """Of a file as it was last changed: read once a process, which takes a tenth of a second for a million rows."""
    known = _identity(path)
    if (found := _CHECKSUMS.get(known)) is None:
        found = 0
        with path.open("rb") as file:
            while piece := file.read(1 << 20):
                found = zlib.crc32(piece, found)
        _remember(known, found)
    return found


def remember_checksum(folder: Path, file: KeptFile) -> None:
    """Of a file that another process of ours has just written, and read for its checksum: it is not read again."""
    _remember(_identity(folder / file.name), file.crc)


def _identity(path: Path) -> tuple[int, ...]:
    now = path.stat()
    return now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns


def _remember(known: tuple[int, ...], checksum: int) -> None:
    if len(_CHECKSUMS) >= _CHECKSUMS_MAX:
        _CHECKSUMS.clear()
    _CHECKSUMS[known] = checksum
