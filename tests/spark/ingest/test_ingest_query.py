"""Stopping an ingest query: between batches, and never each waiting for the other."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
from evermark.spark.ingest import IngestQuery

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class Frame:
    """A batch that tells when it is read."""

    def __init__(self) -> None:
        self.read = 0

    def collect(self) -> list[Any]:
        self.read += 1
        return []


@pytest.fixture
def query(tmp_path: Path) -> IngestQuery:
    class Taker:
        epoch = 1

    nothing = cast("Any", None)
    return IngestQuery(nothing, nothing, cast("Any", Taker()), tmp_path, lambda _: None)


def test_a_batch_that_comes_while_the_query_is_stopped_does_not_wait_for_it(query: IngestQuery) -> None:
    """GIVEN a query being stopped, which waits for its batch WHEN that batch comes THEN it gives way at once."""
    frame = Frame()
    query._busy.acquire()  # as `run` holds it while it stops the query
    query.stop()
    batch = threading.Thread(target=query._on_batch, args=(cast("DataFrame", frame), 7), daemon=True)
    batch.start()
    batch.join(5)
    assert not batch.is_alive(), "each waits for the other"
    assert frame.read == 0


def test_a_batch_is_read_once_and_not_at_all_after_the_end(query: IngestQuery) -> None:
    """GIVEN a running query WHEN it has ended THEN no further batch is read."""
    frame = Frame()
    query._on_batch(cast("DataFrame", frame), 0)
    assert frame.read == 1
    query.stop()
    query._on_batch(cast("DataFrame", frame), 1)
    assert frame.read == 1
