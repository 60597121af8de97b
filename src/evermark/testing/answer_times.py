"""How long a server takes to answer."""

from __future__ import annotations

import http.client
import statistics
import time
from contextlib import closing

_ASKED = 21


def median_s_of_answers(port: int, path: str) -> float:
    """Asked one after the other over one connection."""
    taken = []
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=10)) as connection:
        for _ in range(_ASKED):
            began = time.perf_counter()
            connection.request("GET", path)
            connection.getresponse().read()
            taken.append(time.perf_counter() - began)
    return statistics.median(taken)
