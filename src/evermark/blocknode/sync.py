"""The sync feed: one connection that is sent the blocks and events after the cookies of many streams.

Nothing is queued for a client. A change only marks the stream for the syncs that have it; each sync then reads from its
client's position, and writes when the client took what was written before. So a client that does not read costs one
mark for each stream, and resuming after a reconnect is no different from going on.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import sqlite3
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

from evermark.blocknode.bodies import text_of
from evermark.blocknode.faults import Faults, Op
from evermark.blocknode.reader import Reader, ReaderPosition, View
from evermark.blocknode.refusal import Code, Refused
from evermark.blocknode.settings import MIB, NodeSettings
from evermark.sources.blocks.chain import Cookie

_STREAMS_AT_ONCE = 64
_BYTES_AT_ONCE = 4 * MIB
_PIECE_BYTES = 64 * 1024

Send = Callable[[bytes], Awaitable[None]]


class Stalled(Exception):
    """The client of a sync reads nothing."""


class Hub:
    """All syncs, and the requests that wait for a change of any stream. Lives in the event loop."""

    def __init__(self, reader: Reader, settings: NodeSettings, faults: Faults) -> None:
        self._reader, self._settings, self._faults = reader, settings, faults
        self._syncs: dict[str, Sync] = {}
        self._by_stream: dict[str, set[Sync]] = {}
        self.next_change = asyncio.Event()  # of any stream. Take it before looking, wait for it after.
        self.cut_off = 0

    def changed(self, streams: list[str]) -> None:
        for stream in streams:
            for sync in self._by_stream.get(stream, ()):
                sync.mark(stream)
        changed, self.next_change = self.next_change, asyncio.Event()
        changed.set()

    def open(self) -> Sync:
        if len(self._syncs) >= self._settings.syncs_max:
            said = f"there are {len(self._syncs)} syncs already"
            raise Refused(Code.TOO_MANY, said, "sync several streams in one")
        sync = Sync(secrets.token_hex(16), self._reader, self._settings, self._faults)
        self._syncs[sync.id] = sync
        return sync

    def close(self, sync: Sync) -> None:
        self.remove(sync, list(sync.positions))
        self._syncs.pop(sync.id, None)

    def find(self, sync_id: str) -> Sync:
        sync = self._syncs.get(sync_id)
        if sync is None:
            hint = "it ended with its connection: open another with cookies"
            raise Refused(Code.SYNC_NOT_FOUND, "there is no such sync", hint)
        return sync

    def add(self, sync: Sync, streams: Mapping[str, Cookie | None]) -> None:
        """From these cookies on; a stream that the sync has already begins anew from the cookie given now."""
        if len(sync.positions.keys() | streams.keys()) > self._settings.sync_streams_max:
            said = f"a sync holds {self._settings.sync_streams_max} streams"
            raise Refused(Code.TOO_MANY, said, "open another one")
        for stream, cookie in streams.items():
            self._by_stream.setdefault(stream, set()).add(sync)
            sync.positions[stream] = None if cookie is None else ReaderPosition(cookie)
            sync.mark(stream)

    def remove(self, sync: Sync, streams: list[str]) -> None:
        for stream in streams:
            sync.drop(stream)
            listening = self._by_stream.get(stream, set())
            listening.discard(sync)
            if not listening:
                self._by_stream.pop(stream, None)

    def stop(self) -> None:
        self.next_change.set()
        for sync in self._syncs.values():
            sync.stop()


class Sync:
    def __init__(self, sync_id: str, reader: Reader, settings: NodeSettings, faults: Faults) -> None:
        self.id = sync_id
        self.positions: dict[str, ReaderPosition | None] = {}
        self._reader, self._settings, self._faults = reader, settings, faults
        self._marked: dict[str, None] = {}
        self._wake = asyncio.Event()
        self._stopping = False

    def mark(self, stream: str) -> None:
        self._marked[stream] = None
        self._wake.set()

    def drop(self, stream: str) -> None:
        self.positions.pop(stream, None)
        self._marked.pop(stream, None)

    def stop(self) -> None:
        self._stopping = True
        self._wake.set()

    async def feed(self, hub: Hub, send: Send) -> None:
        """Send news of the streams, until stopped. Raises Stalled when the client reads nothing for too long."""
        await self._say(send, "open", text_of({"sync": self.id}))
        while not self._stopping:
            if not self._marked:
                await self._idle(send)
                continue
            streams = list(itertools.islice(self._marked, _STREAMS_AT_ONCE))
            for stream in streams:
                del self._marked[stream]
            asked = {stream: self.positions[stream] for stream in streams}
            found = await self._reader.run(partial(self._read, asked), waits=True)
            for stream, position in asked.items():
                if stream in self.positions and self.positions[stream] is position:
                    await self._tell(hub, send, stream, found.get(stream))
        await self._say(send, "end", text_of({"code": str(Code.STOPPING)}))

    def _read(self, asked: Mapping[str, ReaderPosition | None], db: sqlite3.Connection) -> dict[str, View | Refused]:
        """As many streams as fit into one turn; runs in a thread."""
        found: dict[str, View | Refused] = {}
        size = 0
        for stream, position in asked.items():
            if size >= _BYTES_AT_ONCE:
                break
            try:
                view = self._reader.view(db, stream, position, snapshots_back=self._faults.snapshots_back(Op.SYNC))
                found[stream] = view
                size += view.size
            except Refused as refusal:
                found[stream] = refusal
        return found

    async def _tell(self, hub: Hub, send: Send, stream: str, found: View | Refused | None) -> None:
        if found is None:
            self.mark(stream)
        elif isinstance(found, Refused):
            hub.remove(self, [stream])
            await self._say(send, "gone", text_of({"stream": stream, **found.wire()}))
        else:
            self.positions[stream] = found.position
            if found.more:
                self.mark(stream)
            if found.news:
                self._faults.spoil(Op.SYNC, found)
                await self._say(send, "reset" if found.reset else "update", found.text())

    async def _idle(self, send: Send) -> None:
        self._wake.clear()
        try:
            await asyncio.wait_for(self._wake.wait(), self._settings.keepalive_s)
        except TimeoutError:
            await self._write(send, b": still here\n\n")

    async def _say(self, send: Send, event: str, data: bytes) -> None:
        await self._write(send, b"event: " + event.encode() + b"\ndata: " + data + b"\n\n")

    async def _write(self, send: Send, text: bytes) -> None:
        # In pieces: a client that reads slowly makes progress with each; a client that does not read stalls at one.
        for at in range(0, len(text), _PIECE_BYTES):
            try:
                await asyncio.wait_for(send(text[at : at + _PIECE_BYTES]), self._settings.stall_s)
            except TimeoutError:
                raise Stalled from None
