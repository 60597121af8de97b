"""Which subscription wants which event of a batch, without Spark: the index finds candidates, steps decide.

What is found is exact. A subscription about which an event leaves any doubt is named instead, and Spark matches it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from evermark.predicate import Path, wanted_ops
from evermark.predicate.index import Column, Filter, Index, Table, index_of
from evermark.predicate.json_values import DOUBT
from evermark.predicate.steps import Step, every
from evermark.predicate.values import Form
from evermark.predicate.vectors import UNSURE, WORK_MAX, YES, Batch, TooMuchWorkError

I64 = npt.NDArray[np.int64]

# More is read by Spark, piece by piece: parsed JSON takes ten times its size.
PAYLOAD_BYTES_MAX = 8 * 1024 * 1024
_PAIR_WORK = 10

_NONE: I64 = np.empty(0, np.int64)


@dataclass(frozen=True)
class Wanted:
    """Pairs of a row and the number of a filter that it meets, by row."""

    rows: I64
    of: I64
    unsure: frozenset[int]  # filters that are not among `of`: some row leaves a doubt


@dataclass(frozen=True)
class TextTable:
    """Filters that need one text of a step, as in `upper(data.a) = 'X'`: the same look-up, for what no index holds."""

    step: Step
    rows: Mapping[str, tuple[int, ...]]
    wholes: Mapping[int, Step]  # the tests of its filters with this text in them: for rows whose text is in doubt


@dataclass(frozen=True)
class Matcher:
    """Filters that all have steps, made ready once for many batches."""

    index: Index
    texts: tuple[TextTable, ...]
    tested: tuple[int, ...]  # filters that are in no table: every row is tested for them
    paths: tuple[Path, ...]
    keys: Mapping[Path, Step]  # the steps that read what tables look up
    tests: Mapping[int, Step]  # what is left to decide once a filter was found; none: nothing
    count: int

    def wanted(self, rows: pa.Table | pa.RecordBatch, work_max: int = WORK_MAX) -> Wanted:
        delivered = pc.is_in(rows.column("op").cast(pa.string()), value_set=_delivered_ops()).to_numpy(
            zero_copy_only=False
        )
        kept = np.flatnonzero(delivered)
        mine = rows if len(kept) == rows.num_rows else rows.take(pa.array(kept))
        if sum(mine.column(name).nbytes for name in {path.column for path in self.paths}) > PAYLOAD_BYTES_MAX:
            return Wanted(_NONE, _NONE, frozenset(range(self.count)))
        found = _Found()
        try:
            self._find(Batch(mine, self.paths, work_max), mine, found)
        except UnicodeDecodeError:  # Spark reads such bytes in a way of its own
            return Wanted(_NONE, _NONE, frozenset(range(self.count)))
        except TooMuchWorkError:
            found.unsure |= set(range(self.count)) - found.done
        return found.wanted(kept)

    def _find(self, batch: Batch, rows: pa.Table | pa.RecordBatch, found: _Found) -> None:
        everywhere = np.arange(rows.num_rows)
        candidates: dict[int, list[I64]] = {number: [everywhere] for number in self.tested}
        for table in self.index.tables:
            for numbers, at in self._looked_up(table, rows, batch, found.unsure):
                for number in numbers:
                    candidates.setdefault(number, []).append(at)
        for texts in self.texts:
            for numbers, at in _texts_looked_up(texts, batch, found.unsure):
                for number in numbers:
                    candidates.setdefault(number, []).append(at)
        for number, pieces in candidates.items():
            if number in found.unsure:
                continue
            at = pieces[0] if len(pieces) == 1 else np.sort(np.concatenate(pieces))
            batch.work(_PAIR_WORK * len(at))
            test = self.tests.get(number)
            if test is not None:
                states = batch.condition(test)[at]
                if (states == UNSURE).any():
                    found.unsure.add(number)
                    continue
                at = at[states == YES]
            if len(at):
                found.pairs.append((number, at))
            found.done.add(number)
        # Of all others no table has anything for these rows.
        found.done |= set(range(self.count)) - candidates.keys()

    def _looked_up(
        self, table: Table, rows: pa.Table | pa.RecordBatch, batch: Batch, unsure: set[int]
    ) -> list[tuple[tuple[int, ...], I64]]:
        """The filters that a table has, with the rows that have their values; `unsure` gets those in doubt."""
        found: dict[tuple[Any, ...], list[int]] = {}
        doubted: set[tuple[Any, ...]] = set()
        columns = [self._values(column, rows, batch) for column in table.columns]
        for row, key in enumerate(zip(*columns, strict=True)):
            if DOUBT in key:
                doubted.add(key)
            elif key in table.rows:
                found.setdefault(key, []).append(row)
        for key in doubted:
            batch.work(_PAIR_WORK * len(table.rows))
            for values, numbers in table.rows.items():
                if all(mine is DOUBT or mine == value for mine, value in zip(key, values, strict=True)):
                    unsure.update(numbers)
        return [(table.rows[key], np.array(at, np.int64)) for key, at in found.items()]

    def _values(self, column: Column, rows: pa.Table | pa.RecordBatch, batch: Batch) -> list[Any]:
        if isinstance(column, str):
            return list(rows.column(column).to_pylist())
        return batch.vector(self.keys[column]).spelled()


def _texts_looked_up(table: TextTable, batch: Batch, unsure: set[int]) -> Iterator[tuple[tuple[int, ...], I64]]:
    """The filters that a table has, with the rows that have their text; `unsure` gets those in doubt."""
    found = batch.vector(table.step)
    for text in found.texts:
        if numbers := table.rows.get(text):
            yield numbers, np.flatnonzero(batch.by_row(found.spells(text)))
    doubted = np.flatnonzero(batch.by_row(found.states == UNSURE))
    if len(doubted):
        # Something else that a filter asks for may settle it.
        unsure.update(n for n, whole in table.wholes.items() if (batch.condition(whole)[doubted] == UNSURE).any())


class _Found:
    def __init__(self) -> None:
        self.pairs: list[tuple[int, I64]] = []
        self.unsure: set[int] = set()
        self.done: set[int] = set()

    def wanted(self, kept: I64) -> Wanted:
        if not self.pairs:
            return Wanted(_NONE, _NONE, frozenset(self.unsure))
        rows = np.concatenate([at for _, at in self.pairs])
        of = np.repeat([number for number, _ in self.pairs], [len(at) for _, at in self.pairs])
        order = np.argsort(rows, kind="stable")
        return Wanted(kept[rows[order]], of[order], frozenset(self.unsure))


@cache
def _delivered_ops() -> pa.Array:
    """Made when it is needed: the first array of a process loads pandas, and `up` would wait for that."""
    return pa.array(wanted_ops(()))


def matcher_of(filters: Sequence[Filter]) -> Matcher:
    """For filters whose predicates all have exact steps."""
    index = index_of(filters)
    one_of: dict[Step, Step] = {}
    tests: dict[int, Step] = {}
    listed = [number for table in index.tables for numbers in table.rows.values() for number in numbers]
    for number in {*index.tested, *listed}:
        whole = number in index.whole or number in index.tested
        if (test := _test(filters[number], whole=whole)) is not None:
            tests[number] = _shared(test, one_of)
    columns = {column for table in index.tables for column in table.columns if isinstance(column, Path)}
    keys = {path: _shared(Step("path", given=path), one_of) for path in columns}
    paths = tuple(dict.fromkeys(path for filter_ in filters for path in filter_.predicate.paths))
    texts, tested = _text_tables(index.tested, tests)
    return Matcher(index, texts, tested, paths, keys, tests, len(filters))


def _text_tables(numbers: Sequence[int], tests: dict[int, Step]) -> tuple[tuple[TextTable, ...], tuple[int, ...]]:
    """Tables of the filters that need a text, and the filters that do not. What the text says leaves their tests."""
    rows: dict[Step, dict[str, list[int]]] = {}
    wholes: dict[Step, dict[int, Step]] = {}
    tested: list[int] = []
    for number in numbers:
        whole = tests[number]
        if (needed := _needed_text(whole)) is None:
            tested.append(number)
            continue
        part, step, text = needed
        rows.setdefault(step, {}).setdefault(text, []).append(number)
        wholes.setdefault(step, {})[number] = whole
        rest = [one for one in _conjuncts(whole) if one is not part]
        if rest:
            tests[number] = every(rest)
        else:
            del tests[number]
    tables = [
        TextTable(step, {text: tuple(some) for text, some in found.items()}, wholes[step])
        for step, found in rows.items()
    ]
    return tuple(tables), tuple(tested)


def _needed_text(test: Step) -> tuple[Step, Step, str] | None:
    """A part of a test that compares a step with one text: the part, the step and the text."""
    for part in _conjuncts(test):
        if part.does == "compare" and part.given == "=":
            left, right = part.inputs
            for step, literal in ((left, right), (right, left)):
                if literal.does == "literal" and literal.given[0] == Form.STRING and step.does != "literal":
                    return part, step, literal.given[1]
    return None


def _conjuncts(test: Step) -> tuple[Step, ...]:
    return tuple(one for part in test.inputs for one in _conjuncts(part)) if test.does == "and" else (test,)


def _test(filter_: Filter, *, whole: bool) -> Step | None:
    """The steps that decide about a row: all that the filter asks for, or what its values in a table leave open."""
    exact = filter_.predicate.exact
    if exact is None:
        raise ValueError("a predicate without exact steps")
    if not whole:
        return exact.residual
    named = (("stream", filter_.streams), ("op", wanted_ops(filter_.ops) if filter_.ops else ()))
    asked = [Step("in", (Step("column", given=name),), tuple(values)) for name, values in named if values]
    return every([*asked, exact.whole])


def _shared(step: Step, one_of: dict[Step, Step]) -> Step:
    """The same steps, equal ones made one: they are carried out once for all filters."""
    inputs = tuple(_shared(one, one_of) for one in step.inputs)
    return one_of.setdefault(mine := Step(step.does, inputs, step.given), mine)
