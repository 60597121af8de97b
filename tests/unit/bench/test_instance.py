"""What the benches count of an instance's processes."""

from __future__ import annotations

import psutil

from bench.instance import Memory


class _Alone:
    """A process whose shared pages the system tells to nobody."""

    def memory_full_info(self) -> None:
        raise psutil.AccessDenied(1)

    def memory_info(self) -> object:
        return type("Info", (), {"rss": 3 * 2**20})()


class _Gone:
    def memory_full_info(self) -> None:
        raise psutil.NoSuchProcess(1)


def test_memory_that_is_not_told_by_shares_is_told_whole() -> None:
    """And it is said that it is; a process that has ended holds nothing."""
    assert Memory.of([_Alone(), _Gone()]) == Memory(3.0, shared_once=False)  # type: ignore[list-item]
