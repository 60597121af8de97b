"""The tests' own S3 server decides between writers of one place as S3 does."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from evermark.testing.s3_process import with_conditional_puts_in_turn


def test_conditional_puts_come_in_turn_and_nothing_else_waits() -> None:
    """GIVEN a server that looks first and puts then WHEN eight put at once on condition THEN one wins; while one of
    them takes its time, a put without condition and a read are answered."""
    taken, looked, go_on = set[str](), threading.Event(), threading.Event()

    def slow(environ: dict[str, Any], _: Any) -> Iterable[bytes]:
        if "HTTP_IF_NONE_MATCH" not in environ:
            return [b"answered"]
        is_free = "place" not in taken
        looked.set()
        go_on.wait(10)
        taken.add("place")
        return [b"won" if is_free else b"lost"]

    server = with_conditional_puts_in_turn(slow)
    conditional = {"REQUEST_METHOD": "PUT", "HTTP_IF_NONE_MATCH": "*"}
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(server, conditional, None) for _ in range(8)]
        assert looked.wait(10)
        for method in ("PUT", "GET"):
            assert server({"REQUEST_METHOD": method}, None) == [b"answered"]
        go_on.set()
        answers = [answer for each in asked for answer in each.result()]
    assert sorted(answers) == [b"lost"] * 7 + [b"won"]
