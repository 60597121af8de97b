"""The demo's proof: which changes of the shop the log must have, and which a lost slot may have hidden."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal

from evermark.app.demo_book import Change, Compared, Logged, compare

NOW = datetime(2026, 11, 19, tzinfo=UTC)


def logged(op: str, order: int, number: int | None, batch: int, *, repaired: bool = False) -> Logged:
    total = None if number is None else Decimal(9)
    return Logged(f"{op}-{order}-{number}-{batch}", op, order, number, total, NOW, batch, repaired)


def placed(order: int, number: int) -> Change:
    return Change("insert", order, number)


def paid(order: int, number: int) -> Change:
    return Change("update", order, number)


def cancelled(order: int, number: int) -> Change:
    return Change("delete", order, number)


def test_a_log_with_every_change_lacks_nothing() -> None:
    """GIVEN an insert, an update and a delete, each in the log WHEN compared THEN all are taken."""
    book = [placed(1, 1), paid(1, 2), cancelled(1, 3)]
    log = [logged("insert", 1, 1, 1), logged("update", 1, 2, 1), logged("delete", 1, None, 2)]
    assert compare(book, log, 0) == Compared(3, 0, (), ())


def test_without_a_repair_every_missing_change_is_lost() -> None:
    """GIVEN no repaired event WHEN an update and a delete are in no event THEN both are lost, whatever came later."""
    book = [placed(1, 1), paid(1, 2), paid(1, 3), cancelled(2, 4)]
    log = [logged("insert", 1, 1, 1), logged("update", 1, 3, 2)]
    assert compare(book, log, 4).lost == (paid(1, 2), cancelled(2, 4))


def test_a_repaired_event_is_the_newest_change_and_hides_those_before_it() -> None:
    """GIVEN a gap WHEN an order was paid twice in it, another placed and paid, a third paid and cancelled THEN each
    repaired event counts for the newest change, and the others are overwritten."""
    book = [placed(1, 1), placed(3, 2), paid(1, 3), paid(1, 4), placed(2, 5), paid(2, 6), paid(3, 7), cancelled(3, 8)]
    read = [logged("insert", 1, 1, 1), logged("insert", 3, 2, 1)]
    repair = [
        logged("delete", 3, None, 2, repaired=True),
        logged("update", 1, 4, 2, repaired=True),
        logged("insert", 2, 6, 2, repaired=True),
    ]
    assert compare(book, read + repair, 8) == Compared(5, 3, (), ())


def test_an_order_that_came_and_went_in_the_gap_leaves_nothing() -> None:
    """GIVEN a gap WHEN an order was placed, paid and cancelled in it THEN its three changes are overwritten."""
    book = [placed(1, 1), placed(2, 2), paid(2, 3), cancelled(2, 4), paid(1, 5)]
    log = [logged("insert", 1, 1, 1), logged("update", 1, 5, 2, repaired=True)]
    assert compare(book, log, 5) == Compared(2, 3, (), ())


def test_an_order_whose_end_was_read_has_its_beginning_repaired_or_lost() -> None:
    """GIVEN a gap WHEN an order was placed in it and its delete was read later THEN the insert has to be repaired."""
    book = [placed(1, 1), placed(2, 2), placed(3, 3), cancelled(2, 4)]
    log = [logged("insert", 1, 1, 1), logged("insert", 3, 3, 2, repaired=True), logged("delete", 2, None, 3)]
    assert compare(book, log, 4).lost == (placed(2, 2),)


def test_what_came_before_the_gap_cannot_be_overwritten() -> None:
    """GIVEN a repair WHEN a change is missing that is older than one that was read before it THEN it is lost."""
    book = [placed(1, 1), paid(1, 2), placed(2, 3), paid(1, 4)]
    log = [logged("insert", 1, 1, 1), logged("insert", 2, 3, 1), logged("update", 1, 4, 2, repaired=True)]
    assert compare(book, log, 4) == Compared(3, 0, (paid(1, 2),), ())


def test_what_came_after_the_repair_cannot_be_overwritten() -> None:
    """GIVEN a gap that was closed WHEN a later change is missing THEN it is lost, though the order has a repaired
    event, and though the order came and went."""
    book = [placed(1, 1), paid(1, 2), paid(1, 3), placed(4, 4), cancelled(4, 5)]
    log = [logged("insert", 1, 1, 1), logged("update", 1, 2, 2, repaired=True)]
    assert compare(book, log, 2) == Compared(2, 0, (paid(1, 3), placed(4, 4), cancelled(4, 5)), ())


def test_a_change_that_is_newer_than_the_repaired_event_is_lost() -> None:
    """GIVEN a gap WHEN the repaired event has an older image than the last change in the gap THEN that one is lost."""
    book = [placed(1, 1), paid(1, 2), paid(1, 3)]
    log = [logged("insert", 1, 1, 1), logged("update", 1, 2, 2, repaired=True)]
    assert compare(book, log, 3).lost == (paid(1, 3),)


def test_an_update_of_an_order_whose_repair_is_missing_is_lost() -> None:
    """GIVEN a gap WHEN the repair found another order and not this one THEN its change is lost."""
    book = [placed(1, 1), placed(2, 2), paid(1, 3), paid(2, 4)]
    log = [logged("insert", 1, 1, 1), logged("insert", 2, 2, 1), logged("update", 1, 3, 2, repaired=True)]
    assert compare(book, log, 4).lost == (paid(2, 4),)


def test_events_of_changes_that_nobody_made_are_told() -> None:
    """GIVEN events, read and repaired, that fit no change WHEN compared THEN they are named."""
    book = [placed(1, 1)]
    log = [logged("insert", 1, 1, 1), logged("update", 1, 7, 1), logged("update", 1, 8, 2, repaired=True)]
    assert compare(book, log, 1).made_up == ("update-1-7-1", "update-1-8-2")
