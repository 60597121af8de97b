"""A sink that prints: one body per line. For trying things out, and as the smallest example of a sink."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from time import monotonic
from typing import TextIO

import pyarrow as pa

from evermark.delivery.base import Fate
from evermark.delivery.decide.retry import Verdict
from evermark.delivery.webhook.base import Answer, Job, Prefix, Result, Try
from evermark.delivery.webhook.body import Rendering, Style, render
from evermark.delivery.webhook.parked_json import row_from_json
from evermark.delivery.webhook.tally import Tally

_PIECE_ROWS = 1_000


class StdoutSink:
    """See `Sink` for the contract. A closed pipe counts as a failed endpoint: nothing is lost by `| head`."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = sys.stdout if out is None else out

    def deliver(
        self, jobs: Sequence[Job], deadline_s: float, grace_s: float | None = None, slack_s: float | None = None
    ) -> list[Result]:
        return [result for some in self.deliver_each(jobs, deadline_s, grace_s) for result in some]

    def deliver_each(
        self, jobs: Sequence[Job], deadline_s: float, grace_s: float | None = None, slack_s: float | None = None
    ) -> Iterator[list[Result]]:
        until = monotonic() + deadline_s
        for job in jobs:
            tally, fate, reason = self._deliver(job, until)
            yield tally.results(fate, reason, None)

    def deliver_prefix(self, job: Job, deadline_s: float, grace_s: float | None = None) -> Prefix:
        tally, fate, reason = self._deliver(job, monotonic() + deadline_s)
        return tally.through(fate, reason, None)

    def _deliver(self, job: Job, until: float) -> tuple[Tally, Fate, str]:
        tally = Tally(job.spec.name, job.events)
        how = Rendering(_style(job.spec.body), job.historical, job.attempt, job.replay_id)
        for start in range(0, job.events.num_rows, _PIECE_ROWS):
            if monotonic() >= until:
                return tally, Fate.UNFINISHED, "the time given to this work ran out"
            piece = job.events.slice(start, _PIECE_ROWS)
            if problem := self._print(piece, how):
                return tally, Fate.ENDPOINT_FAILED, problem
            tally.accept(range(start, start + piece.num_rows))
        return tally, Fate.DONE, ""

    def attempt(self, tries: Sequence[Try], deadline_s: float) -> list[Answer]:
        answers = []
        for one in tries:
            how = Rendering(_style(one.spec.body), one.historical, one.attempt, one.replay_id)
            problem = self._print(row_from_json(one.event), how)
            answers.append(Answer(Verdict.ENDPOINT, reason=problem) if problem else Answer(Verdict.ACCEPTED))
        return answers

    def _print(self, events: pa.Table | pa.RecordBatch, how: Rendering) -> str:
        try:
            for body in render(events, how):
                # Line breaks in JSON text are blanks between its parts; inside its strings they are escaped.
                self._out.write(body.decode().replace("\n", " ").replace("\r", " ") + "\n")
            self._out.flush()
        except (OSError, ValueError) as problem:
            return f"cannot print: {type(problem).__name__}"
        return ""

    def close(self) -> None:
        return None


def _style(body: str) -> Style:
    return Style(body) if body in set(Style) else Style.STANDARD
