"""A node on a port."""

from __future__ import annotations

import asyncio
import errno
import signal
from collections.abc import Callable
from contextlib import AsyncExitStack

from aiohttp import web

from evermark.blocknode.database import Database
from evermark.blocknode.faults import Faults
from evermark.blocknode.follow import Follower
from evermark.blocknode.ledger import Clocks, Ledger
from evermark.blocknode.reader import Reader
from evermark.blocknode.routes import Routes
from evermark.blocknode.settings import NodeSettings
from evermark.blocknode.sync import Hub
from evermark.blocknode.writer import Writer
from evermark.errors import BusyError, DeniedError, EvermarkError, UnreachableError
from evermark.observe.logging import get_logger

_STOP_WAIT_S = 2.0


class Node:
    def __init__(self, settings: NodeSettings, faults: Faults) -> None:
        self.settings = settings
        self.port = settings.port
        self.cut_bytes = 0  # of a half-written tail, found at the start
        self._faults = faults
        self._log = get_logger(part="blocknode")

    @property
    def url(self) -> str:
        host = self.settings.host
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    async def serve(self, listening: Callable[[], None]) -> None:
        """Serve until SIGTERM or SIGINT; then finish what was asked for already, and let go of the port and the folder.
        `listening` is called when clients can connect, and `port` is the real one. Runs in the main thread."""
        stopping = asyncio.Event()
        trouble: list[BaseException] = []

        def broken(error: BaseException) -> None:
            trouble.append(error)
            stopping.set()

        for signum in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(signum, stopping.set)
        async with AsyncExitStack() as stack:
            await self._open(stack, broken)
            listening()
            await stopping.wait()
        if trouble:
            hint = "look at the disk; then start it again: nothing that was accepted is lost"
            raise EvermarkError(f"the node's disk failed: {trouble[0]}", hint=hint) from trouble[0]

    async def _open(self, stack: AsyncExitStack, broken: Callable[[BaseException], None]) -> None:
        """Open every part in the order it is needed; they are closed in reverse."""
        settings = self.settings
        database = Database(settings.data)
        connection, self.cut_bytes = database.open()
        stack.callback(database.close)
        stack.callback(connection.close)
        if self.cut_bytes:
            self._log.warning(
                "a half-written tail was cut off; no client was told that it was kept", bytes=self.cut_bytes
            )
        (node,) = connection.execute("select value from meta where name = 'node'").fetchone()
        reader = Reader(database, settings)
        stack.callback(reader.close)
        hub = Hub(reader, settings, self._faults)
        ledger = Ledger(connection, settings, Clocks())
        writer = Writer(connection, ledger, changed=hub.changed, broken=broken)
        stack.push_async_callback(writer.close)
        routes = Routes(settings, node, writer, reader, hub, self._faults)
        if settings.follow is not None:
            follower = Follower(settings, writer, reader)
            routes.followed = follower.progress
            task = asyncio.create_task(follower.run())
            stack.push_async_callback(_cancelled, task)
        runner = web.AppRunner(routes.app(), access_log=None, shutdown_timeout=_STOP_WAIT_S)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)

        def end_waiting() -> None:
            routes.stopping = True
            hub.stop()

        try:
            await web.TCPSite(runner, settings.host, settings.port).start()
        except OSError as error:
            raise _cannot_listen(settings.host, settings.port, error) from error
        stack.callback(end_waiting)
        self.port = int(runner.addresses[0][1])


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])


def _cannot_listen(host: str, port: int, error: OSError) -> EvermarkError:
    where = f"cannot listen on {host}:{port}"
    if error.errno == errno.EADDRINUSE:
        return BusyError(f"{where}: the port is taken", hint="choose another with --port, or 0 for any free one")
    if error.errno == errno.EACCES:
        return DeniedError(f"{where}: not permitted", hint="choose a port above 1023 with --port")
    return UnreachableError(f"{where}: {error.strerror or error}", hint="choose an address of this machine with --host")
