"""One streaming query per source. Spark holds no truth: its scratch folder is new at every start, offsets are ours."""

from __future__ import annotations

import json
import shutil
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from evermark.errors import EngineError, EvermarkError
from evermark.ingest.gather import WHOLE_SOURCE, gather
from evermark.ingest.take import Taken, Taker, take_each
from evermark.spark.datasource import IngestPlan, source_class

_STOP_POLL_S = 0.2


@dataclass(eq=False)
class IngestQuery:
    """Runs until it fails, is stopped, or `over` says so. `run` returns the failures, by partition."""

    spark: SparkSession
    plan: IngestPlan
    taker: Taker
    scratch: Path
    on_taken: Callable[[Taken], None]
    over: Callable[[], bool] = lambda: False
    _ended: threading.Event = field(default_factory=threading.Event, init=False)
    _busy: threading.Lock = field(default_factory=threading.Lock, init=False)
    _failed: dict[int, EvermarkError] = field(default_factory=dict, init=False)

    def run(self) -> dict[int, EvermarkError]:
        query = self._start()
        try:
            while not query.awaitTermination(_STOP_POLL_S):  # type: ignore[arg-type] # a fraction is fine
                if self._is_ended():
                    # Between batches only: a query stopped in the middle of one leaves its slot in use.
                    with self._busy:
                        query.stop()
                    break
        except Exception as error:
            if not (self._is_ended() and isinstance(error, StreamingQueryException)):
                raise engine_error(f"the ingest query of {self.plan.name} ended", error) from error
        finally:
            # A JVM that died leaves the batch that was being taken to a thread of its own: its end is waited for, so
            # that nobody takes this source's next batch beside it.
            self._ended.set()
            with self._busy:
                pass
        return self._failed

    def stop(self) -> None:
        self._ended.set()

    def _is_ended(self) -> bool:
        if self.over():
            self._ended.set()
        return self._ended.is_set()

    def _start(self) -> StreamingQuery:
        self.spark.dataSource.register(source_class(self.plan))
        self.scratch.mkdir(parents=True, exist_ok=True)
        folder = tempfile.mkdtemp(prefix=f"{self.plan.name}-", dir=self.scratch)
        for old in self.scratch.glob(f"{self.plan.name}-*"):
            if str(old) != folder:
                shutil.rmtree(old, ignore_errors=True)
        stream = self.spark.readStream.format(f"evermark-ingest-{self.plan.name}").load()
        return (
            stream.writeStream.queryName(f"ingest {self.plan.name}")
            .option("checkpointLocation", folder)
            .foreachBatch(self._on_batch)
            .start()
        )

    def _on_batch(self, frame: DataFrame, _batch_id: int) -> None:
        """Never raises: a failure is kept here, and `run` ends the query before the next batch is read."""
        while not self._busy.acquire(timeout=_STOP_POLL_S):
            # `run` holds the lock, and waits for us to return: the query is being stopped.
            if self._ended.is_set():
                return
        try:
            if not self._is_ended():
                self._work(frame)
        finally:
            self._busy.release()

    def _work(self, frame: DataFrame) -> None:
        try:
            rows = [json.loads(row[0]) for row in frame.collect()]  # the one action: each more would read again
        except Exception as error:  # noqa: BLE001 - after any error of Spark's the query starts again
            self._failed = {WHOLE_SOURCE: engine_error(f"a batch of {self.plan.name} could not be read", error)}
            self._ended.set()
            return
        gathered = gather(rows, self.taker.epoch)
        self._failed = {**gathered.failed, **take_each(self.taker, gathered.taken, self.on_taken)}
        if self._failed:
            self._ended.set()


def engine_error(what: str, error: Exception) -> EngineError:
    """What Spark raised, in one line; its stack traces are in spark.log beside the data."""
    said = next((line.strip() for line in str(error).splitlines() if line.strip(" :\t")), type(error).__name__)
    return EngineError(
        f"{what}: {said[:300]}", hint="it is started again; spark.log in the data folder has the details"
    )
