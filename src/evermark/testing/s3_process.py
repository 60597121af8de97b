"""The process of the tests' S3 server: moto, with conditional puts one after another, given a port.

moto looks whether a place is free, and then puts, in a thread for each request: of two writers at once both may be told
that they won. S3 does it in one step.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import run_simple

Application = Callable[[dict[str, Any], Any], Iterable[bytes]]


def with_conditional_puts_in_turn(application: Application) -> Application:
    lock = threading.Lock()

    def answer(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        is_conditional = environ["REQUEST_METHOD"] == "PUT" and "HTTP_IF_NONE_MATCH" in environ
        with lock if is_conditional else nullcontext():
            return application(environ, start_response)

    return answer


def main(port: int) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    application = with_conditional_puts_in_turn(DomainDispatcherApplication(create_backend_app))
    run_simple("127.0.0.1", port, application, threaded=True, request_handler=MotoRequestHandler)


if __name__ == "__main__":
    main(int(sys.argv[1]))
