"""What tasks report, put together: a partition's batch is whole or not at all."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from evermark.errors import EvermarkError, UnreachableError
from evermark.ingest.task_reports import WHOLE_SOURCE, gather


def row(partition: int, name: str | None, **more: Any) -> dict[str, Any]:
    files = [] if name is None else [{"path": name, "rows": 2, "size": 10, "stats": {}}]
    return {"partition": partition, "batch": 4, "start": "a", "end": "b", "files": files, **more}


def test_slices_of_a_partition_become_one_batch() -> None:
    """Their files together, their duplicates counted, slices without rows left out."""
    found = gather([row(1, "x", duplicates=2), row(1, None, duplicates=1), row(1, "y")], epoch=9)
    (written,) = found.written
    assert (written.partition, written.batch, written.start, written.end, written.duplicates) == (1, 4, "a", "b", 3)
    assert [f.path for f in written.files] == ["x", "y"]
    assert (written.epoch, written.rows, found.failed) == (9, 4, {})


def test_a_partition_without_rows_is_still_taken() -> None:
    """Its checkpoint moves."""
    (written,) = gather([row(0, None)], epoch=1).written
    assert written.files == ()


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=12))
def test_one_failed_slice_holds_back_its_partition_and_no_other(slices: list[tuple[int, bool]]) -> None:
    """Whatever the order in which tasks end."""
    error = {"kind": "unreachable", "message": "gone", "hint": "wait"}
    rows = [row(p, None, error=error) if bad else row(p, f"f{i}") for i, (p, bad) in enumerate(slices)]
    found = gather(rows, epoch=1)
    failed = {p for p, bad in slices if bad}
    assert set(found.failed) == failed
    assert {t.partition for t in found.written} == {p for p, _ in slices} - failed
    assert all(isinstance(e, UnreachableError) and e.hint == "wait" for e in found.failed.values())
    assert sum(len(t.files) for t in found.written) == sum(p not in failed for p, _ in slices)


def test_an_error_of_no_partition_is_the_whole_source_s() -> None:
    """And an error of a kind nobody knows is still an error."""
    found = gather([{"error": {"kind": "odd", "message": "what?"}}], epoch=1)
    assert found.written == []
    assert type(found.failed[WHOLE_SOURCE]) is EvermarkError
