"""Reading the log: which files hold which batches.

Readers ask for batches, time windows and predicates; they never see table versions. Compaction may replace files while
a reader works: replaced files stay on disk for an hour, so a list of files stays readable that long.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, fields
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
from deltalake.exceptions import TableNotFoundError

from evermark.errors import ConfigError, NotFoundError
from evermark.event import EVENT, TIMESTAMP, Op, Seen
from evermark.log.commits import read_commit
from evermark.log.format import FORGOTTEN_APP_ID, app_id, unpack
from evermark.log.opened import columns_of, opened, require_whole
from evermark.log.table import TableHandle, commit_identity, last_delta_checkpoint
from evermark.storage import Place, storage_of, trouble_is_said

if TYPE_CHECKING:
    import deltalake


@dataclass(frozen=True)
class FileRange:
    """One file of the log and the batches it holds (several after compaction)."""

    path: str
    partition_min: int
    partition_max: int
    batch_min: int
    batch_max: int
    rows: int
    size: int
    event_time_max: datetime | None = None
    position_max: str | None = None
    event_time_min: datetime | None = None
    ingested_at_max: datetime | None = None
    position_min: str | None = None
    timeless: int | None = None  # events without a time


# Delta's flattened statistics call `batch_min` min.batch; these fields they call otherwise.
_STATISTICS = {"path": "path", "rows": "num_records", "size": "size_bytes", "timeless": "null_count.event_time"}
_PIECE_ROWS = 65_536
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class LogReader:
    """The log of one source, as a reader sees it. Keeps the list of files, and reads the commits that have come since:
    a library would list all files anew, and batches come many times a second.
    """

    def __init__(self, folder: Place) -> None:
        self.folder = folder
        self._handle: TableHandle | None = None
        self.version = -1  # of the list of files
        self._at: Hashable | None = None  # which commit had that version
        self._files: dict[str, FileRange] = {}  # by path
        self._ends: dict[str, int] = {}  # of partitions, as commits say it that were read since they were asked for
        self._lock = threading.Lock()

    def refresh(self) -> deltalake.DeltaTable:
        if self._handle is None:
            try:
                self._handle = TableHandle(self.folder)
            except TableNotFoundError as error:
                raise NotFoundError(
                    f"no log at {self.folder}", hint="`evermark up` makes it when the source's first event is taken"
                ) from error
        return self._handle.refresh()

    def files(self) -> list[FileRange]:
        """Every file of the newest snapshot."""
        with self._lock:
            if not self._catch_up():
                table = self.refresh()
                with trouble_is_said(self.folder):
                    self.version, self._files = table.version(), {f.path: f for f in files_at(self.folder, table)}
                self._ends.clear()
                self._at = commit_identity(self.folder, self.version)
            return list(self._files.values())

    def _catch_up(self) -> bool:
        """Read the commits that have come since; False where the table has to be opened for it."""
        if self.version < 0 or self._at is None or self._at != commit_identity(self.folder, self.version):
            return False
        began = self.version
        while (actions := read_commit(self.folder, self.version + 1)) is not None:
            for action in actions:
                if "remove" in action:
                    self._files.pop(str(self.folder / action["remove"]["path"]), None)
                elif "add" in action:
                    if (file := added_file(self.folder, action["add"])) is None:
                        return False
                    self._files[file.path] = file
                elif "txn" in action:
                    self._ends[action["txn"]["appId"]] = action["txn"]["version"]
            self.version += 1
        if self.version > began:
            self._at = commit_identity(self.folder, self.version)
        return last_delta_checkpoint(self.folder) <= self.version  # if not, we slept through the cleaning of commits

    def files_if_any(self) -> list[FileRange]:
        """The same; none where there is no log yet."""
        try:
            return self.files()
        except NotFoundError:
            return []

    def ends_at(self, partition: int) -> int:
        """The last batch committed, as known when `files` was asked last, or later; most often without reading any."""
        name = app_id(partition)
        with self._lock, trouble_is_said(self.folder):
            if name not in self._ends:
                self._ends[name] = self.refresh().transaction_version(name) or 0
            return unpack(self._ends[name])[1]

    def require_whole(self, partition: int, taken: int, where: str) -> None:
        """Raises `FormatError` where the log ends before a batch that was taken. Batches without a file were removed by
        retention: so readers would pass over those whose commits are gone."""
        if self.ends_at(partition) < taken:
            self.files()
            require_whole(self.ends_at(partition), taken, where)

    def tail_batch(self, partition: int) -> int:
        """The last batch committed, also when compaction or retention left no file that shows it."""
        with self._lock, trouble_is_said(self.folder):  # the library reads commits to answer
            return unpack(self.refresh().transaction_version(app_id(partition)) or 0)[1]

    def forgotten(self) -> int:
        """How often events were taken out by `log forget`."""
        with self._lock, trouble_is_said(self.folder):
            self.refresh()
            return self._handle.counted(FORGOTTEN_APP_ID) if self._handle is not None else 0

    def files_of(self, partition: int, after_batch: int, to_batch: int) -> list[FileRange]:
        """The files that hold batches `after_batch < batch <= to_batch` of one partition (and perhaps others)."""
        return [f for f in self.files() if overlaps(f, partition, after_batch, to_batch)]

    def ids_from(self, partition: int, position: str) -> pa.Array:
        """The ids of the partition's events at `position` and after it (see `ingest.dedup`)."""
        found: list[pa.Array] = []
        for file in self._files_with(partition):
            if file.position_max is not None and file.position_max < position:
                continue
            rows = columns_of(file.path, ["event_id", "partition", "position"])
            mine = pc.and_(pc.equal(rows["partition"], partition), pc.greater_equal(rows["position"], position))
            found += rows.filter(mine)["event_id"].chunks
        return pa.concat_arrays(found) if found else pa.array([], pa.string())

    def holds(self, partition: int, position: str) -> bool:
        """Whether the log has an event of the partition at exactly this position."""
        for file in self._files_with(partition):
            low, high = file.position_min, file.position_max
            if (low is not None and low > position) or (high is not None and high < position):
                continue
            rows = columns_of(file.path, ["partition", "position"])
            if pc.any(pc.and_(pc.equal(rows["partition"], partition), pc.equal(rows["position"], position))).as_py():
                return True
        return False

    def position_max(self, partition: int) -> str | None:
        """The greatest position in the last batch, read from its rows: for when nothing else knows where it ended.

        Not the greatest of all: positions of two histories of a source have no common order.
        """
        last = self._last_row(partition)
        return str(last["position"]) if last is not None else None

    def newest(self, partition: int) -> Seen | None:
        """The last event of the last batch."""
        last = self._last_row(partition, "event_id", "event_time", "ingested_at")
        return Seen(last["event_id"], last["event_time"], last["ingested_at"]) if last is not None else None

    def _last_row(self, partition: int, *columns: str) -> dict[str, Any] | None:
        """The row with the greatest position of the greatest batch, looked for piece by piece: a batch may be huge."""
        best: dict[str, Any] | None = None
        for file in sorted(self._files_with(partition), key=lambda f: f.batch_max, reverse=True):
            if best is not None and file.batch_max < best["batch"]:
                break
            with opened(file.path) as parquet:
                for piece in parquet.iter_batches(_PIECE_ROWS, columns=["partition", "batch", "position", *columns]):
                    rows = pa.table(piece).filter(pc.equal(piece["partition"], partition))
                    if not rows.num_rows:
                        continue  # a file of several partitions
                    rows = rows.filter(pc.equal(rows["batch"], pc.max(rows["batch"])))
                    (row,) = rows.slice(pc.index(rows["position"], pc.max(rows["position"])).as_py(), 1).to_pylist()
                    if best is None or (row["batch"], row["position"]) > (best["batch"], best["position"]):
                        best = row
        return best

    def controls(self, partition: int, after_batch: int, to_batch: int) -> pa.Table:
        """The control events of batches `after_batch < batch <= to_batch`, in log order."""
        columns = ["event_id", "partition", "batch", "position", "stream", "event_time", "payload"]
        found = [EVENT.empty_table().select(columns)]

        def wanted(rows: pa.RecordBatch | pa.Table) -> pa.ChunkedArray:
            return pc.and_(in_batches(rows, partition, after_batch, to_batch), pc.equal(rows["op"], str(Op.CONTROL)))

        # Payloads are read only beside a control event, piece by piece: a batch may hold millions of other events.
        for file in self.files_of(partition, after_batch, to_batch):
            with opened(file.path) as parquet:
                for group in range(parquet.num_row_groups):
                    if not pc.any(wanted(parquet.read_row_group(group, columns=["partition", "batch", "op"]))).as_py():
                        continue
                    pieces = parquet.iter_batches(_PIECE_ROWS, row_groups=[group], columns=[*columns, "op"])
                    found += [pa.table(piece).filter(wanted(piece)).select(columns) for piece in pieces]
        return pa.concat_tables(found).sort_by([("batch", "ascending"), ("position", "ascending")])

    def batch_at(self, partition: int, since: str) -> int:
        """The last batch all of whose events are older than `since` (an ISO time): where "from a time" begins."""
        moment = moment_of(since)
        first: int | None = None
        for file in sorted(self._files_with(partition), key=lambda f: f.batch_min):
            if first is not None and file.batch_min >= first:
                break
            if file.event_time_max is not None and file.event_time_max < moment:
                continue
            rows = columns_of(file.path, ["partition", "batch", "event_time"])
            late = rows.filter(
                pc.and_(pc.equal(rows["partition"], partition), pc.greater_equal(rows["event_time"], pa.scalar(moment)))
            )
            lowest = pc.min(late["batch"]).as_py()
            if lowest is not None:
                first = lowest if first is None else min(first, lowest)
        return first - 1 if first is not None else self.tail_batch(partition)

    def _files_with(self, partition: int) -> list[FileRange]:
        return [f for f in self.files() if f.partition_min <= partition <= f.partition_max]


def files_at(folder: Place, table: deltalake.DeltaTable) -> list[FileRange]:
    """Every file of the snapshot a handle is at."""
    # Not `pa.table`, which loads pandas to see whether it is given one of its frames.
    actions = pa.RecordBatchReader.from_stream(table.get_add_actions(flatten=True)).read_all()

    def values(field: str) -> Any:
        column, _, end = field.rpartition("_")
        name = _STATISTICS.get(field, f"{end}.{column}")
        if name not in actions.column_names:
            return [None] * actions.num_rows
        found = actions[name]
        return _moments(found) if pa.types.is_timestamp(found.type) else found.to_pylist()

    rows = zip(*(values(field.name) for field in fields(FileRange)), strict=True)
    return [FileRange(str(folder / path), *rest) for path, *rest in rows]


def _moments(column: pa.ChunkedArray) -> list[datetime | None]:
    """By hand: for a list of times Arrow loads pandas, which takes a reader of a few files most of its time."""
    numbers = column.cast(TIMESTAMP).cast(pa.int64()).to_pylist()
    return [_EPOCH + timedelta(microseconds=us) if us is not None else None for us in numbers]


def added_file(folder: Place, add: Mapping[str, Any]) -> FileRange | None:
    """A file as the commit that added it describes it; None: without statistics, so none of ours."""
    stats = json.loads(add.get("stats") or "{}")
    low, high = stats.get("minValues", {}), stats.get("maxValues", {})
    if "batch" not in low or "partition" not in low:
        return None
    return FileRange(
        str(folder / add["path"]),
        low["partition"],
        high["partition"],
        low["batch"],
        high["batch"],
        stats["numRecords"],
        add["size"],
        _moment(high.get("event_time")),
        high.get("position"),
        _moment(low.get("event_time")),
        _moment(high.get("ingested_at")),
        low.get("position"),
        stats["nullCount"].get("event_time"),
    )


def _moment(text: str | None) -> datetime | None:
    return datetime.fromisoformat(text) if text is not None else None


def overlaps(file: FileRange, partition: int, after_batch: int, to_batch: int) -> bool:
    """Whether a file may hold such rows. A file of several partitions is judged by its bounds alone."""
    return (
        file.partition_min <= partition <= file.partition_max
        and file.batch_max > after_batch
        and file.batch_min <= to_batch
    )


def in_batches(rows: pa.RecordBatch | pa.Table, partition: int, after: int, to: int) -> pa.ChunkedArray:
    """Which rows are of the partition's batches `after < batch <= to`."""
    wanted = pc.and_(pc.greater(rows["batch"], after), pc.less_equal(rows["batch"], to))
    return pc.and_(wanted, pc.equal(rows["partition"], partition))


def within(file: FileRange, since: datetime | None, until: datetime | None) -> bool:
    """Whether a file may hold events with `since` ≤ event_time < `until`."""
    too_old = since is not None and file.event_time_max is not None and file.event_time_max < since
    too_new = until is not None and file.event_time_min is not None and file.event_time_min >= until
    return not (too_old or too_new)


def moment_of(text: str) -> datetime:
    """An ISO time; without a zone it is UTC, whatever zone the reader's session is in."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise ConfigError(f"{text!r} is not a time", hint="write it as 2026-11-01 or 2026-11-14T12:00Z") from error
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def sources_at(root: Place) -> list[str]:
    """The sources that have a log under `root`."""
    storage = storage_of(root)
    return [name for name in storage.folders(root) if storage.has_folder(root / name / "_delta_log")]
