"""Work done side by side by Spark tasks that report to the driver; and how an error of Spark's is said.

Tasks are run without Spark SQL: its first query takes as much of the processor as all the rest of a start.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, takewhile
from typing import Any

from pyspark import RDD, SparkContext

from evermark.errors import BusyError, DiskFullError, EngineError, EvermarkError, UnreachableError
from evermark.ingest.pieces import Piece, ReadFrom

Report = dict[str, Any]
_OURS = re.compile(r"evermark\.errors\.(\w+): (.+)")
_HINT = "hint: "
_CALLED = re.compile(r"An error occurred while calling ")
_PASSING = {each.__name__: each for each in (BusyError, UnreachableError, DiskFullError)}
_TRACE = ("at ", "Driver stacktrace", "Traceback (most recent call last)")


def run_tasks(
    context: SparkContext, count: int, reports: Callable[[int], Iterable[Report]], failed: str
) -> list[Report]:
    """What the tasks 0, 1 … `count` - 1 report, in this order. `failed` begins the error, if one is raised.

    `reports` travels to the tasks.
    """
    try:
        # Nothing but numbers goes to the tasks, and Spark knows those: `parallelize` would write a file into scratch.
        none = context._jvm.java.util.ArrayList()  # type: ignore[union-attr] # noqa: SLF001
        places: RDD[Any] = RDD(context._jsc.parallelize(none, count), context)  # noqa: SLF001
        return places.mapPartitionsWithIndex(_Task(reports)).collect()
    except EngineError:
        raise
    except Exception as error:
        raise engine_error(failed, error) from error


@dataclass(frozen=True)
class _Task:
    reports: Callable[[int], Iterable[Report]]

    def __call__(self, number: int, rows: Iterable[Any]) -> Iterator[Report]:
        for _ in rows:
            pass  # a worker that leaves something unread is not used again, and its successor imports everything anew
        return iter(self.reports(number))


def written_by_tasks(context: SparkContext, of: ReadFrom, pieces: Sequence[Piece]) -> list[Report]:
    """`WritePieces` on Spark, a task for each piece. Only reports come back: files are written where they are read."""
    return run_tasks(context, len(pieces), _Write(of, tuple(pieces)), f"a batch of {of.name} could not be read")


@dataclass(frozen=True)
class _Write:
    of: ReadFrom
    pieces: tuple[Piece, ...]

    def __call__(self, number: int) -> list[Report]:
        return [self.of.written(self.pieces[number])]


def run_long_task(context: SparkContext, name: str, work: Callable[[str], None]) -> None:
    """Run `work(name)` in one task of a job of its own; returns when it has ended."""
    context.setJobGroup(name, name, interruptOnCancel=True)  # of this thread
    run_tasks(context, 1, partial(_without_report, work, name), f"{name} ended")


def _without_report(work: Callable[[str], None], name: str, _number: int) -> list[Report]:
    work(name)
    return []


def cancel_long_task(context: SparkContext, name: str) -> None:
    """Its process is killed after a moment."""
    context.cancelJobGroup(name)


def engine_error(what: str, error: Exception) -> EngineError:
    """What Spark raised, in one line; its stack traces are in spark.log beside the data."""
    lines = [line.strip(" :\t") for line in str(error).splitlines()]
    # What a task raised stands at the end of its traceback, far below what Spark says about it.
    ours = [found[2] for line in lines if (found := _OURS.search(line))]
    telling = takewhile(lambda line: not line.startswith(_TRACE), (line for line in lines if not _CALLED.match(line)))
    said = ours[0] if ours else " ".join(filter(None, telling)) or type(error).__name__
    return EngineError(
        f"{what}: {said[:300]}", hint="it is started again; spark.log in the data folder has the details"
    )


def error_of_task(what: str, error: Exception) -> EvermarkError:
    """What a task of ours raised, if it passes by itself: a place that is busy or away is no failure of Spark's. Any
    other as `engine_error` has it.
    """
    lines = [line.strip() for line in str(error).splitlines()]
    raised = [(found, after) for line, after in pairwise([*lines, ""]) if (found := _OURS.search(line))]
    found, after = raised[-1] if raised else (None, "")  # the last of those that led to each other
    if found is None or found[1] not in _PASSING:
        return engine_error(what, error)
    hint = after.removeprefix(_HINT) if after.startswith(_HINT) else ""
    return _PASSING[found[1]](f"{what}: {found[2][:300]}", hint=hint)
