"""Take Evermark's webhooks: verified, without duplicates, each event handed to your code once.

In short:

    receiver = Receiver("whsec_…")

    @receiver.on_event
    def take(event: Event) -> None: ...

    response = receiver.handle(request_headers, request_body)
"""

from evermark_receiver.asgi import ASGIReceiver, EvermarkMiddleware
from evermark_receiver.dedup import Claim, Dedup, DedupCache, DedupError, State
from evermark_receiver.event import BodyError, Event
from evermark_receiver.receiver import Busy, Counters, Disable, Park, Receiver, Refusal, Response
from evermark_receiver.signature import VerificationError, Verified, sign, verify
from evermark_receiver.sqlite_dedup import SqliteDedup
from evermark_receiver.wsgi import wsgi_app

__all__ = [
    "ASGIReceiver",
    "BodyError",
    "Busy",
    "Claim",
    "Counters",
    "Dedup",
    "DedupCache",
    "DedupError",
    "Disable",
    "Event",
    "EvermarkMiddleware",
    "Park",
    "Receiver",
    "Refusal",
    "Response",
    "SqliteDedup",
    "State",
    "VerificationError",
    "Verified",
    "sign",
    "verify",
    "wsgi_app",
]
