"""The log's durable format: what is packed comes back, and notes survive their commit."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evermark.log.format import (
    BATCH_MAX,
    EPOCH_MAX,
    CommitNote,
    MaintenanceNote,
    app_id,
    note_of,
    pack,
    stats_json,
    unpack,
)

epochs = st.integers(0, EPOCH_MAX)
batches = st.integers(0, BATCH_MAX)


@given(epochs, batches)
def test_epoch_and_batch_come_back(epoch: int, batch: int) -> None:
    """And fit into what Delta has for a version: a signed 64-bit number."""
    assert unpack(pack(epoch, batch)) == (epoch, batch)
    assert 0 <= pack(epoch, batch) < 2**63


@given(epochs, batches, epochs, batches)
def test_packed_order_is_epoch_then_batch(epoch: int, batch: int, epoch2: int, batch2: int) -> None:
    """A higher epoch is always a higher version."""
    assert (pack(epoch, batch) < pack(epoch2, batch2)) == ((epoch, batch) < (epoch2, batch2))


@pytest.mark.parametrize(("epoch", "batch"), [(-1, 0), (0, -1), (EPOCH_MAX + 1, 0), (0, BATCH_MAX + 1)])
def test_what_does_not_fit_is_refused(epoch: int, batch: int) -> None:
    """Rather than written as something else."""
    with pytest.raises(ValueError, match="out of range"):
        pack(epoch, batch)


@given(st.integers(0, 2**31 - 1), batches, epochs, st.text(), st.text(), st.integers(0), st.lists(st.text()))
def test_a_note_comes_back(
    partition: int, batch: int, epoch: int, start: str, end: str, rows: int, files: list[str]
) -> None:
    """Through the JSON of a commit, with whatever a source calls a position."""
    note = CommitNote(partition, batch, epoch, start, end, rows, tuple(files))
    info = json.loads(json.dumps({"operation": "WRITE", **note.as_metadata()}))
    assert note_of(info) == note


def test_notes_of_care_are_not_batches() -> None:
    """Compaction and fences do not move a tail."""
    note = MaintenanceNote("compact", 1, 32)
    assert note_of(note.as_metadata()) == note
    assert note_of({}) is None


def test_statistics_leave_out_what_is_unknown() -> None:
    """A bound that is not known is absent; its nulls are still counted."""
    stats = json.loads(stats_json(2, {"batch": (1, 2, 0), "event_time": (None, None, 2)}))
    assert stats == {
        "numRecords": 2,
        "minValues": {"batch": 1},
        "maxValues": {"batch": 2},
        "nullCount": {"batch": 0, "event_time": 2},
    }


def test_partitions_have_applications_of_their_own() -> None:
    """Or they would fence each other."""
    assert len({app_id(p) for p in range(100)}) == 100


def test_importing_evermark_is_light() -> None:
    """Neither Spark nor Delta nor Arrow is loaded before it is used."""
    code = "import sys, evermark; print([m for m in ('pyspark', 'deltalake', 'pyarrow') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
