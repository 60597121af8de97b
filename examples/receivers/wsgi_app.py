"""A webhook receiver with nothing but the standard library and evermark-receiver.

EVERMARK_SECRET=whsec_… python examples/receivers/wsgi_app.py 8080

Or with workers: gunicorn --chdir examples/receivers --workers 4 wsgi_app:app
"""

from __future__ import annotations

import logging
import os
import sys
from wsgiref.simple_server import make_server

from evermark_receiver import Event, Receiver, SqliteDedup, wsgi_app

logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
log = logging.getLogger("example")

# Several secrets, separated by spaces, while you rotate. The file is shared by all workers and kept over restarts.
receiver = Receiver(os.environ["EVERMARK_SECRET"].split(), dedup=SqliteDedup(os.environ.get("DEDUP", "handled.sqlite")))


@receiver.on_event
def take(event: Event) -> None:
    """Your work. Returning means done for good; raise anything, and the event comes again later."""
    log.info("handled %s %s %s key=%r %r", event.delivery_id, event.stream, event.op, event.key, event.data)


app = wsgi_app(receiver)

if __name__ == "__main__":
    with make_server("127.0.0.1", int(sys.argv[1]) if len(sys.argv) > 1 else 8080, app) as server:
        log.info("listening on http://127.0.0.1:%d/", server.server_port)
        server.serve_forever()
