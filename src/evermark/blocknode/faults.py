"""Faults as values, for tests: which mistake a node makes, at which requests, and how often.

`Faults.parse('[{"fault": "refuse", "op": "miniblocks", "times": 3}]')` answers the first three requests for miniblocks
with 503. Each fault looks at requests of its `op` alone, lets the first `after` pass, and ends after `times` of them
(0: never).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config

from evermark.blocknode.bodies import text_of
from evermark.blocknode.reader import Page, View
from evermark.blocknode.refusal import busy
from evermark.errors import ConfigError
from evermark.sources.blocks.chain import Cookie, block_from, make_block


class Op(StrEnum):
    CREATE = "create"
    DELETE = "delete"
    ADD = "add"
    STREAM = "stream"
    MINIBLOCKS = "miniblocks"
    STREAMS = "streams"
    SYNC = "sync"


class Mistake(StrEnum):
    LATE = "late"  # answer after `seconds`
    REFUSE = "refuse"  # answer 503
    OLDER = "older"  # answer a stream from the snapshot before the latest
    LIE = "lie"  # change the `lie` of block `number`
    SKIP = "skip"  # leave block `number` out of its page


class Lie(StrEnum):
    HASH = "hash"  # a block's own hash is another one
    PREVIOUS = "previous"  # a sound block of another chain
    EVENT = "event"  # an event has other content than was hashed
    UNREADABLE = "unreadable"  # of an event comes its hash, and nothing else


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True)
class Fault:
    fault: Mistake
    op: Op
    after: int = 0
    times: int = 0
    seconds: float = 0.0
    number: int = 0
    lie: Lie = Lie.HASH


class Faults:
    """Counts requests, so that each fault has its turn."""

    def __init__(self, faults: Sequence[Fault] = ()) -> None:
        self._faults = tuple(faults)
        self._asked = [0] * len(self._faults)

    @classmethod
    def parse(cls, text: str) -> Faults:
        try:
            return cls(TypeAdapter(list[Fault]).validate_json(text))
        except ValidationError as error:
            known = ", ".join(field.name for field in fields(Fault))
            raise ConfigError(f"these are no faults: {error}", hint=f"a list of objects with {known}") from error

    def due(self, op: Op, *mistakes: Mistake) -> list[Fault]:
        """The faults whose turn it is at this request; each counts it."""
        found = []
        for at, fault in enumerate(self._faults):
            if fault.op is op and fault.fault in mistakes:
                asked = self._asked[at]
                self._asked[at] += 1
                if asked >= fault.after and (fault.times == 0 or asked < fault.after + fault.times):
                    found.append(fault)
        return found

    async def before(self, op: Op) -> None:
        """Be late, or refuse."""
        for fault in self.due(op, Mistake.LATE, Mistake.REFUSE):
            if fault.fault is Mistake.REFUSE:
                raise busy("this node refuses, as it was told to")
            await asyncio.sleep(fault.seconds)

    def snapshots_back(self, op: Op) -> int:
        return len(self.due(op, Mistake.OLDER))

    def spoil(self, op: Op, answer: View | Page) -> None:
        """Lie about blocks of this answer, or leave one out, in place."""
        for fault in self.due(op, Mistake.LIE, Mistake.SKIP):
            for at, body in enumerate(answer.blocks):
                block = json.loads(body)
                if block["header"]["number"] == fault.number:
                    spoilt = [] if fault.fault is Mistake.SKIP else [text_of(_lied(answer.stream, block, fault.lie))]
                    answer.blocks[at : at + 1] = spoilt
                    break


def _lied(stream: str, block: dict[str, Any], lie: Lie) -> dict[str, Any]:
    if lie is Lie.EVENT:
        block["events"][0]["payload"] = "something else"
    elif lie is Lie.UNREADABLE:
        block["events"][0] = {"hash": block["events"][0]["hash"]}
    elif lie is Lie.HASH:
        block["header"]["hash"] = "f" * 64
    else:
        real = block_from(block, stream)
        elsewhere = Cookie(real.number, "f" * 64)
        return make_block(stream, elsewhere, real.at_us, real.events, real.snapshot).wire()
    return block
