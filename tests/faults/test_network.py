"""S13: a network between an instance and its Postgres that is slow, loses everything for a while, or is cut."""

from __future__ import annotations

from pathlib import Path

from psycopg.conninfo import conninfo_to_dict, make_conninfo

from evermark.testing.chaos_engine import resumed_s
from evermark.testing.pipeline import PATIENCE_S, Scene, Writer
from evermark.testing.servers import PostgresServer
from evermark.testing.tcp_proxy import TcpProxy
from evermark.testing.until import until


class FarScene(Scene):
    """The shop's database and State are beyond the network; whoever writes into the shop is not."""

    sections = 'state: {dsn: "${FAR_DSN}"}\n'
    embeds_state = False

    def __init__(self, folder: Path, dsn: str, proxy: TcpProxy) -> None:
        super().__init__(folder, dsn, {"one": None})
        far = make_conninfo("", **{**conninfo_to_dict(dsn), "port": proxy.port})
        self.env |= {"FAR_DSN": far, "SHOP_DSN": far}

    def more_committed(self, count: int) -> None:
        before = len(self.committed())
        until(lambda: len(self.committed()) > before + count, "the shop goes on selling", timeout_s=PATIENCE_S)


def test_s13_a_slow_a_partitioned_and_a_cut_network_lose_nothing(
    tmp_path: Path, pg_server: PostgresServer, pg_dsn: str
) -> None:
    """GIVEN an instance that reaches its databases over a network WHEN that delays and throttles, loses everything for
    longer than leases last, and is cut, THEN events arrive after each, and none is lost or handled twice.
    """
    with TcpProxy("127.0.0.1", pg_server.port) as proxy, FarScene(tmp_path, pg_dsn, proxy) as scene:
        instance = scene.up()
        writer = Writer(pg_dsn)
        writer.start()
        try:
            scene.wait_delivered(20)
            proxy.delay_s, proxy.bytes_per_s = 0.05, 500_000.0
            resumed_s(scene, within_s=PATIENCE_S)
            proxy.hang()
            scene.more_committed(1_000)
            proxy.restore()
            resumed_s(scene, within_s=PATIENCE_S)
            proxy.cut()
            scene.more_committed(200)
            proxy.restore()
            resumed_s(scene, within_s=PATIENCE_S)
        finally:
            writer.finish()
        assert scene.check_complete().has_each_once
        assert instance.terminate() == 0
