"""The hybrid logical clock: milliseconds and a counter in one number, so that plain order is the order of versions.

A clock reading is `milliseconds << 16 | counter`. Each change of a table takes a reading above every one that its node
has seen of that table, own or from peers; so a change always beats the version that its writer saw, however the clocks
of the machines stand to each other.
"""

from __future__ import annotations

COUNTER_BITS = 16


def at_ms(milliseconds: int) -> int:
    """The lowest reading of that time."""
    return milliseconds << COUNTER_BITS


def ms_of(reading: int) -> int:
    return reading >> COUNTER_BITS


def is_ahead(reading: int, now_ms: int, bound_ms: int) -> bool:
    """Whether a reading is so far in the future that its maker's clock must be wrong. Such an event would beat every
    honest one until then: it is quarantined instead."""
    return ms_of(reading) > now_ms + bound_ms
