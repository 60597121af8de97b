"""Which deliveries were handled already: bounded in memory and in time, and fair between streams.

An id is *unseen*, *in progress* (a handler has it) or *done* (its handler succeeded). Only success is remembered:

    unseen ──claim──▶ in progress ──done──▶ done ──ttl_s, or a bound──▶ unseen
       ▲                   │
       └──release, or progress_ttl_s (the handler was abandoned)

Forgetting an id early is safe, for delivery is at least once anyway: it costs one more call of the handler. It is
counted all the same (`evicted`, `expired`, `abandoned`).
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

# The sender's default retries span 27.6 hours; three days leave room for a weekend.
TTL_S = 3 * 24 * 3600.0

# The place of streams beyond max_streams; a hash is never empty.
OVERFLOW = b""
SWEEP_ENTRIES_MAX = 16


class State(Enum):
    UNSEEN = "unseen"
    IN_PROGRESS = "in progress"
    DONE = "done"


@dataclass(frozen=True)
class Claim:
    """What the id was when it was asked for. UNSEEN means: it is yours now, end it with `done` or `release`."""

    state: State
    stream: bytes = b""
    identity: bytes = b""
    token: int = 0


class DedupError(Exception):
    """What was handled cannot be looked up or written down just now. The receiver answers 503."""


class Dedup(Protocol):
    """What a receiver needs. `DedupCache` and `SqliteDedup` are two; implement it over a store of your own for more.

    Calls come from several threads. Of several claims of one id at a time, exactly one gets UNSEEN. A call that cannot
    do its work raises; a claim that raises must not be taken for a claim by anybody.
    """

    def claim(self, stream: tuple[str, str], delivery_id: str) -> Claim: ...

    def done(self, claim: Claim) -> None: ...

    def release(self, claim: Claim) -> None: ...


class DedupCache:
    """Remembers ids in this process.

    - At most `max_entries` ids a stream, `max_total` in all, each for at most `ttl_s`.
    - At `max_total` the stream that holds most gives up its oldest id: a stream with fewer than
      `max_total / (max_streams + 1)` ids never loses one to another stream.
    - Streams beyond `max_streams` share one more place and evict only each other.
    - At most `max_in_progress` ids are with a handler; beyond that a new id is answered as if it were in progress.
      One that is not ended within `progress_ttl_s` counts as abandoned, and the next claim gets it.

    Ids are kept as 16-byte hashes, so long ones take no more room than short ones.
    """

    def __init__(
        self,
        *,
        max_entries: int = 50_000,
        max_streams: int = 1_000,
        max_total: int = 250_000,
        max_in_progress: int = 10_000,
        ttl_s: float = TTL_S,
        progress_ttl_s: float = 300.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if min(max_entries, max_streams, max_total, max_in_progress) < 1 or not min(ttl_s, progress_ttl_s) > 0:
            raise ValueError("the bounds of a DedupCache are at least 1, and its times above 0")
        self.max_entries = max_entries
        self.max_streams = max_streams
        self.max_total = max_total
        self.max_in_progress = max_in_progress
        self.ttl_s = ttl_s
        self.progress_ttl_s = progress_ttl_s
        self.evicted = 0
        self.expired = 0
        self.abandoned = 0
        self._clock = clock
        self._lock = threading.Lock()
        self._in_progress: OrderedDict[bytes, tuple[int, float]] = OrderedDict()
        self._places: OrderedDict[bytes, OrderedDict[bytes, float]] = OrderedDict()
        self._total = 0
        self._by_size: dict[int, dict[bytes, None]] = {}
        self._size_max = 0
        self._token = 0

    def claim(self, stream: tuple[str, str], delivery_id: str) -> Claim:
        """Ask for an id. Only the claim that says UNSEEN may handle it."""
        place, identity = hashed(stream, delivery_id)
        with self._lock:
            now = self._clock()
            self._sweep(now)
            if self._is_done(place, identity, now):
                return Claim(State.DONE)
            self._drop_abandoned(now)
            if identity in self._in_progress or len(self._in_progress) >= self.max_in_progress:
                return Claim(State.IN_PROGRESS)
            self._token += 1
            self._in_progress[identity] = (self._token, now + self.progress_ttl_s)
            return Claim(State.UNSEEN, place, identity, self._token)

    def done(self, claim: Claim) -> None:
        """The handler succeeded: remember it, even if this claim was taken for abandoned meanwhile."""
        if claim.state is not State.UNSEEN:
            return
        with self._lock:
            now = self._clock()
            self._in_progress.pop(claim.identity, None)
            if not self._is_done(claim.stream, claim.identity, now):
                self._remember(claim.stream, claim.identity, now + self.ttl_s)

    def release(self, claim: Claim) -> None:
        """The handler failed: forget it, unless another claim has it by now."""
        if claim.state is not State.UNSEEN:
            return
        with self._lock:
            held = self._in_progress.get(claim.identity)
            if held is not None and held[0] == claim.token:
                del self._in_progress[claim.identity]

    def state(self, stream: tuple[str, str], delivery_id: str) -> State:
        place, identity = hashed(stream, delivery_id)
        with self._lock:
            now = self._clock()
            if self._is_done(place, identity, now):
                return State.DONE
            held = self._in_progress.get(identity)
            return State.IN_PROGRESS if held is not None and held[1] > now else State.UNSEEN

    def __len__(self) -> int:
        """How many ids are remembered as done."""
        return self._total

    @property
    def streams(self) -> int:
        """How many streams have a place of their own."""
        return len(self._places) - (OVERFLOW in self._places)

    @property
    def in_progress(self) -> int:
        return len(self._in_progress)

    def _is_done(self, place: bytes, identity: bytes, now: float) -> bool:
        for key in (place, OVERFLOW):
            ids = self._places.get(key)
            if ids is not None and ids.get(identity, now) > now:
                return True
        return False

    def _remember(self, place: bytes, identity: bytes, until: float) -> None:
        if place not in self._places and self.streams >= self.max_streams:
            place = OVERFLOW
        # An expired entry that no sweep met yet would keep its old turn in the order of expiry.
        self._forget(place, identity)
        if len(self._places.get(place, ())) >= self.max_entries:
            self._evict_from(place)
        elif self._total >= self.max_total:
            self._evict_from(next(iter(self._by_size[self._size_max])))
        ids = self._places.setdefault(place, OrderedDict())
        ids[identity] = until
        self._resized(place, len(ids) - 1, len(ids))

    def _evict_from(self, place: bytes) -> None:
        self._forget(place, next(iter(self._places[place])))
        self.evicted += 1

    def _forget(self, place: bytes, identity: bytes) -> None:
        ids = self._places.get(place)
        if ids is None or ids.pop(identity, None) is None:
            return
        self._resized(place, len(ids) + 1, len(ids))
        if not ids:
            del self._places[place]

    def _resized(self, place: bytes, old: int, new: int) -> None:
        """Keep places by their size, so that the largest is found without looking at all of them."""
        self._total += new - old
        if old:
            del self._by_size[old][place]
            if not self._by_size[old]:
                del self._by_size[old]
        if new:
            self._by_size.setdefault(new, {})[place] = None
        self._size_max = max(self._size_max, new)
        while self._size_max and self._size_max not in self._by_size:
            self._size_max -= 1

    def _sweep(self, now: float) -> None:
        """Drop what expired in one place, another at each call: quiet streams give their memory back too."""
        if not self._places:
            return
        place = next(iter(self._places))
        self._places.move_to_end(place)
        ids = self._places[place]
        for _ in range(SWEEP_ENTRIES_MAX):
            if not ids:
                break
            oldest = next(iter(ids))
            if ids[oldest] > now:
                break
            self._forget(place, oldest)
            self.expired += 1

    def _drop_abandoned(self, now: float) -> None:
        while self._in_progress:
            identity, (_, until) = next(iter(self._in_progress.items()))
            if until > now:
                break
            del self._in_progress[identity]
            self.abandoned += 1


def hashed(stream: tuple[str, str], delivery_id: str) -> tuple[bytes, bytes]:
    """What a stream and an id are kept as: 16 bytes each, however long they are."""
    return _digest(*stream), _digest(*stream, delivery_id)


def _digest(*parts: str) -> bytes:
    """Lengths are hashed too: ("a", "bc") and ("ab", "c") are two things."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        raw = part.encode("utf-8", "surrogatepass")
        digest.update(len(raw).to_bytes(8, "big"))
        digest.update(raw)
    return digest.digest()
