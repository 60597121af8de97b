"""A webhook receiver as an ASGI application, with a handler that is a coroutine.

EVERMARK_SECRET=whsec_… uvicorn --app-dir examples/receivers --workers 4 --port 8080 asgi_app:app
"""

from __future__ import annotations

import logging
import os

from evermark_receiver import ASGIReceiver, Event, Receiver, SqliteDedup

logging.basicConfig(level=logging.INFO, format="%(message)s")
log = logging.getLogger("example")

# Several secrets, separated by spaces, while you rotate. The file is shared by all workers and kept over restarts.
receiver = Receiver(os.environ["EVERMARK_SECRET"].split(), dedup=SqliteDedup(os.environ.get("DEDUP", "handled.sqlite")))


@receiver.on_event
async def take(event: Event) -> None:
    """Your work. Returning means done for good; raise anything, and the event comes again later."""
    log.info("handled %s %s %s key=%r %r", event.delivery_id, event.stream, event.op, event.key, event.data)


# Alone in its process. In front of an application of yours: app = EvermarkMiddleware(app, receiver, path="/hooks")
app = ASGIReceiver(receiver)
