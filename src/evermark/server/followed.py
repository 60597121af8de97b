"""What a client of the live tail may ask for, in the query."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from evermark.config.subscriptions import start_point
from evermark.delivery.tail.place import ID_CHARS_MAX
from evermark.predicate import STREAMS_MAX
from evermark.server.messages import Asked

_Name = Annotated[str, Field(min_length=1, max_length=200)]
_LAST_ID = Field(max_length=ID_CHARS_MAX, description="The same as the header Last-Event-ID, which comes first.")


class FollowAsked(Asked):
    """Where the tail of a subscription begins."""

    start: Annotated[
        str,
        Field(alias="from", max_length=64, description="Without an id: now, beginning, or a time."),
        AfterValidator(start_point),
    ] = "now"
    last_event_id: Annotated[str, _LAST_ID] = ""


class TailAsked(FollowAsked):
    """Which events, and from where. `source`, `stream` and `op` may be repeated."""

    source: Annotated[tuple[_Name, ...], Field(max_length=100, description="Only events of this source.")] = ()
    stream: Annotated[tuple[_Name, ...], Field(max_length=STREAMS_MAX, description="Only events of this stream.")] = ()
    op: Annotated[tuple[_Name, ...], Field(max_length=20, description="Only events of this operation.")] = ()
    where: Annotated[
        Annotated[str, Field(min_length=1, max_length=8192)] | None,
        Field(description="Only events that match, as in a subscription: op = 'insert' and data.total > 100"),
    ] = None


FOLLOWED: dict[str, type[FollowAsked]] = {
    "/v1/tail": TailAsked,
    "/v1/subscriptions/{name}/tail": FollowAsked,
}
