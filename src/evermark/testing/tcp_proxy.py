"""A TCP proxy that can cut its connections, hold back what they carry, or be slow: a network that fails."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from typing import Self

_BYTES = 65536
_POLL_S = 0.1


class TcpProxy:
    """Listens on 127.0.0.1 and passes everything on to one address. `with` starts and stops it."""

    def __init__(self, host: str, port: int) -> None:
        self._to = (host, port)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self.delay_s = 0.0  # each piece of data arrives so much later
        self.bytes_per_s = 0.0  # of each direction of a connection; 0: as fast as it goes
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._is_cut = False
        self._flows = threading.Event()
        self._flows.set()

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, name="proxy", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listening.close()
        self.cut()

    def cut(self) -> None:
        """Every connection ends, and new ones end at once."""
        self._flows.set()
        with self._lock:
            self._is_cut = True
            ended, self._open = self._open, set()
        for each in ended:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def hang(self) -> None:
        """Connections stay, and nothing passes."""
        self._flows.clear()

    def restore(self) -> None:
        """What was held back passes now, new connections do, and nothing is slow any more."""
        self.delay_s = self.bytes_per_s = 0.0
        self._is_cut = False
        self._flows.set()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listening.accept()
            except OSError:
                return
            far = None
            if not self._is_cut:
                with suppress(OSError):
                    far = socket.create_connection(self._to)
            if far is None:
                near.close()
                continue
            with self._lock:
                passes = not self._is_cut  # it may have been cut since it was asked above
                if passes:
                    self._open |= {near, far}
            if not passes:
                near.close()
                far.close()
                continue
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._pump, args=(source, sink), name="proxied", daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(_BYTES):
                time.sleep(self.delay_s + (len(data) / self.bytes_per_s if self.bytes_per_s else 0.0))
                while not self._flows.wait(_POLL_S):
                    pass
                sink.sendall(data)
        for each in (source, sink):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._open -= {source, sink}
        source.close()
