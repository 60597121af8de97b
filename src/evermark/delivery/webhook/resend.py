"""Sends parked deliveries again: one by one within a line, and not faster than their subscription wants them.

All tries are of one subscription, and of one replay or of none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from itertools import count

import pyarrow as pa

from evermark.delivery.decide.answers import Verdict
from evermark.delivery.decide.retry import in_place_wait_s
from evermark.delivery.webhook.base import Answer, Line, Try
from evermark.delivery.webhook.body import UNRENDERABLE, Rendering, bundle, bundle_id, delivery_ids, render
from evermark.delivery.webhook.client import Endpoint, HttpLoop
from evermark.delivery.webhook.dispatch import CONCURRENCY_MAX
from evermark.delivery.webhook.parked_json import row_from_json
from evermark.errors import EvermarkError, FormatError

UNSENT = Answer(Verdict.BUSY, reason="not sent: the time given to this work ran out", sent=False)

# One try: its number among the given tries, and its event.
Waiting = tuple[int, pa.RecordBatch]


async def attempt(tries: Sequence[Try], http: HttpLoop, deadline_s: float) -> list[Answer]:
    """The answers, in the order of the tries."""
    deadline = asyncio.get_running_loop().time() + deadline_s
    try:
        endpoint = Endpoint(tries[0].spec, tries[0].open_secret)
    except EvermarkError as problem:
        return [Answer(Verdict.ENDPOINT, reason=str(problem), sent=False)] * len(tries)
    return await _Retries(tries, endpoint, http, deadline).run()


class _Retries:
    def __init__(self, tries: Sequence[Try], endpoint: Endpoint, http: HttpLoop, deadline: float) -> None:
        self._tries, self._endpoint, self._http, self._deadline = tries, endpoint, http, deadline
        self._spec, self._replay_id = tries[0].spec, tries[0].replay_id
        self._answers: list[Answer] = [UNSENT] * len(tries)
        self._probe = tries[0].probe
        self._concurrency = min(max(1, self._spec.concurrency), CONCURRENCY_MAX)
        self._gate = asyncio.Semaphore(1 if self._probe else self._concurrency)
        self._stopped: Answer | None = None

    async def run(self) -> list[Answer]:
        await asyncio.gather(*map(self._one_line, self._lines()))
        return self._answers

    def _lines(self) -> list[list[Waiting]]:
        """Sent one after another: tries of a session, of a key, or of keys between which an event moved its record."""
        lines: dict[Line | int | str, list[Waiting]] = {}
        for n, one in enumerate(self._tries):
            try:
                row = row_from_json(one.event)
            except FormatError as problem:
                self._answers[n] = Answer(Verdict.REFUSED, reason=str(problem), sent=False)
                continue
            source, stream, *keys = (row.column(of)[0].as_py() for of in ("source", "stream", "key", "previous_key"))
            names: list[Line | int | str] = [(source, stream, key) for key in keys if key is not None]
            if one.session or not names:
                names = [one.session or n]
            line = _joined(lines, names)
            line.append((n, row))
            lines.update(dict.fromkeys(names, line))
        return list({id(line): line for line in lines.values()}.values())

    async def _one_line(self, waiting: list[Waiting]) -> None:
        held = ""
        for n, row in waiting:
            if held and (self._spec.ordered or self._tries[n].session):
                self._answers[n] = Answer(Verdict.BUSY, reason=f"held behind {held}", sent=False)
                continue
            async with self._gate:
                answer = self._answers[n] = await self._try(self._tries[n], row)
            if self._stopped is None and answer.verdict in (Verdict.ENDPOINT, Verdict.GONE):
                self._stopped = replace(answer, sent=False)
            if answer.verdict is Verdict.ACCEPTED:
                self._trust()
            elif self._spec.ordered or answer.verdict is not Verdict.REFUSED:
                held = row.column("event_id")[0].as_py()

    def _trust(self) -> None:
        """The endpoint works: no longer one request at a time."""
        if self._probe:
            self._probe = False
            for _ in range(self._concurrency - 1):
                self._gate.release()

    async def _try(self, one: Try, row: pa.RecordBatch) -> Answer:
        how = Rendering(self._endpoint.style, one.historical, one.attempt, one.replay_id)
        try:
            (body,) = render(row, how)
        except UNRENDERABLE as problem:
            return Answer(Verdict.REFUSED, reason=f"unserialisable: {type(problem).__name__}", sent=False)
        ids = row.column("event_id").to_pylist()
        (ident,) = delivery_ids(ids, one.replay_id)
        if one.spec.bundle > 1:
            body, ident = bundle([body], how.style), bundle_id(ids, one.replay_id)
        if len(body) > one.spec.body_bytes_max:
            reason = f"too large: {len(body)} bytes, the limit is {one.spec.body_bytes_max}"
            return Answer(Verdict.REFUSED, reason=reason, sent=False)
        return await self._post(ident, body)

    async def _post(self, ident: str, body: bytes) -> Answer:
        """The receiver's answer; asked again shortly after a hiccup, as in a first delivery."""
        for tries in count(1):
            if not await self._may_send():
                return self._stopped or UNSENT
            answer = await self._endpoint.post(self._http, ident, body)
            wait = in_place_wait_s(answer.verdict, answer.status, answer.retry_after_s, tries)
            # A busy event is tried later, and holds up no other here.
            final = self._probe or answer.verdict is Verdict.BUSY
            if wait is None or final or asyncio.get_running_loop().time() + wait >= self._deadline:
                return answer
            await asyncio.sleep(wait)
            if self._stopped is not None:
                return answer
        raise AssertionError("unreachable: the tries end by themselves")

    async def _may_send(self) -> bool:
        if self._stopped is not None or asyncio.get_running_loop().time() >= self._deadline:
            return False
        rate = self._spec.rate_per_s
        if rate > 0 and not await self._http.turn((self._spec.name, self._replay_id), rate, self._deadline):
            return False
        return self._stopped is None


def _joined(lines: dict[Line | int | str, list[Waiting]], names: Sequence[Line | int | str]) -> list[Waiting]:
    """The line of these names; several lines become one, in order, under all their names."""
    found = {id(lines[name]): lines[name] for name in names if name in lines}
    if len(found) < 2:
        return next(iter(found.values()), [])
    together = sorted((one for line in found.values() for one in line), key=lambda waiting: waiting[0])
    lines.update({name: together for name, line in lines.items() if id(line) in found})
    return together
