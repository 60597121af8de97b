"""Two instances of one deployment: as in a rolling deploy, and with the owner asleep."""

from __future__ import annotations

from contextlib import ExitStack

from evermark.testing.commands import REAL
from evermark.testing.pipeline import Instance
from evermark.testing.tails import TailReader, tailing
from evermark.testing.until import until
from tests.faults.conftest import SharedShop


def test_neither_a_rolling_deploy_nor_a_paused_owner_writes_twice(shop: SharedShop) -> None:
    """GIVEN two instances, and clients of their live tails WHEN the owner is stopped and continued, then terminated
    THEN no stale write lands, who handed its partition over goes on serving its clients (S6), and a client that changes
    from one to the other has every event once (D14).
    """
    first = shop.running()
    with ExitStack() as stack:
        stays = stack.enter_context(tailing(first))
        moves = _passed_on(shop, first, stack)
        committed = sorted(shop.committed())
        for reader in (stays, moves):
            until(lambda reader=reader: len(reader.ids) >= len(committed), "the tail has every event")
            assert sorted(reader.ids) == committed and reader.resyncs == []
        assert moves.connections >= 2, "to both"


def _passed_on(shop: SharedShop, first: Instance, stack: ExitStack) -> TailReader:
    with shop.writing():
        shop.wait_more(20)
        second = shop.up(commands=REAL)
        until(lambda: second.said("standing by"), "the second stands by")
        moves = stack.enter_context(tailing(second, first))
        until(lambda: second.health("shop/0").get("status") == "standby", "its health says so")
        assert second.ask("/readyz")[0] == 200 and first.health("shop/0")["status"] == "healthy"

        # WHEN the owner sleeps past its lease, and wakes up again
        first.pause()
        until(lambda: second.said("source owned") and second.said("delivering"), "it took over")
        shop.wait_more(20)
        first.wake()
        until(lambda: first.said("lease lost"), "the first noticed")
        until(lambda: first.health("shop/0")["status"] == "standby", "its health says so")
        until(lambda: _gauges(first) == {}, "it shows no old numbers of subscriptions")
        assert _gauges(second)["one"] >= 0
        shop.wait_more(20)

        # WHEN the new owner is terminated, as in a rolling deploy, the other goes on
        assert second.terminate() == 0
        shop.wait_more(20)
    return moves


def _gauges(instance: Instance) -> dict[str, float]:
    """Lags of subscriptions as an instance shows them."""
    name = 'evermark_subscription_lag_batches{subscription="'
    lines = [line for line in instance.ask("/metrics")[1].splitlines() if line.startswith(name)]
    return {line[len(name) :].split('"')[0]: float(line.rpartition(" ")[2]) for line in lines}
