"""The meaning of a receiver's answer, by its HTTP status and headers. Pure.

| verdict  | from                                                            | what follows                          |
|----------|-----------------------------------------------------------------|---------------------------------------|
| ACCEPTED | 2xx                                                             | the event is delivered                |
| BUSY     | 409 with Retry-After                                            | again soon; spends no attempt         |
| ENDPOINT | no answer (DNS, connect, TLS, timeout, cut), 408, 425, 429, 5xx,| the subscription waits; no event is   |
|          | 1xx and 3xx, a refused address, a wrong setting of ours         | parked, no attempt spent              |
| GONE     | 410, `webhook-delivery: disable`                                | the subscription is disabled          |
| REFUSED  | any other 4xx, `webhook-delivery: park`, too large, cannot be   | this event is parked and retried on   |
|          | rendered                                                        | the schedule                          |

A redirect is a failure of the endpoint: it is not followed, which would carry a signed body to an address that is not
configured, and it says nothing about the event. The `webhook-delivery` header is the receiver's explicit word and wins
over its status, except over 2xx: an accepted event stays accepted.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class Verdict(StrEnum):
    ACCEPTED = "accepted"
    BUSY = "busy"
    ENDPOINT = "endpoint"
    GONE = "gone"
    REFUSED = "refused"


ACCEPTED_STATUSES = range(200, 300)
_ENDPOINT_STATUSES = frozenset({408, 425, 429})


def classify(answer: int, headers: Mapping[str, str] | None = None) -> Verdict:
    """The verdict on an HTTP status. `headers` must find names without regard to case."""
    if answer in ACCEPTED_STATUSES:
        return Verdict.ACCEPTED
    said = headers.get("webhook-delivery", "").strip().lower() if headers else ""
    if said == "disable":
        return Verdict.GONE
    if said == "park":
        return Verdict.REFUSED
    if answer == 410:
        return Verdict.GONE
    if answer == 409 and headers and "retry-after" in headers:
        return Verdict.BUSY
    if 400 <= answer < 500 and answer not in _ENDPOINT_STATUSES:
        return Verdict.REFUSED
    return Verdict.ENDPOINT
