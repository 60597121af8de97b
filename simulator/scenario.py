"""What a seed stands for: sources, subscriptions, receivers and how often which fault strikes. Plain values."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

from evermark.delivery.model import BotSpec, MadeBy, SourcePartition, SubscriptionSpec

STREAMS = ("orders", "users")
BOT = "bot"
OPS = ("insert", "update", "delete")
ROWS_PER_TRANSACTION_MAX = 3
_RETRY_WAITS_S = (2.0, 3.0, 5.0, 8.0, 13.0, 21.0, 21.0)  # waits made for days would never be met


@dataclass(frozen=True)
class Rates:
    """Chance of each fault at one effect. Many seeds have some of them at zero: fewer kinds at once go deeper."""

    crash: float
    machine: float
    pause: float
    stall: float
    fail: float


@dataclass(frozen=True)
class Scenario:
    seed: int
    places: tuple[SourcePartition, ...]
    transactions: int
    instances: int
    steps: int  # effects under faults, before the calm
    switch_chance: float
    tick_s: float
    rates: Rates
    specs: tuple[SubscriptionSpec, ...]
    late_spec: SubscriptionSpec | None  # joins the file when the run is half over
    wish_chance: dict[str, float]  # how often people want what of those they made; none: nobody makes any
    calm_pace_s: float  # receivers up to this slow stay so when all else is well
    sees_gone: bool  # whether a dead holder loses its lease at once, or when it runs out
    rows_max: int  # events per batch
    repeat_chance: float  # how often the source gives an event again at a later position
    repeat_reach: int  # from how far back
    forgets_tail: float  # how often the log no longer knows where its last batch ends
    ttl_s: dict[str, float] = field(default_factory=dict)
    receiver_chance: dict[str, float] = field(default_factory=dict)
    replays: bool = False  # whether windows of the log are asked for again
    moves_keys: bool = False  # whether records get other keys
    shards: int = 1  # of delivery, at most: instances start with this many, or with fewer
    divided: bool = False  # whether instances share the partitions of a source
    sends: bool = False  # whether sources send their events, until something fails; else they are asked
    cuts: float = 0.0  # how often State does not answer an instance for a while, per second
    holes: bool = False  # whether files of the log are missing for a while
    from_now: bool = False  # whether sources begin with what is new, and checkpoints are lost while instances are down

    @property
    def has_bot(self) -> bool:
        return any(spec.bot is not None for spec in self.specs)

    @property
    def sources(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for place in self.places:
            found.setdefault(place.source, []).append(place.partition)
        return found


def scenario(seed: int) -> Scenario:
    rng = random.Random(seed)
    places = _places(rng)

    def rate(most: float) -> float:
        return most * rng.choice((0, 0.3, 1, 1, 3))

    rows_max = rng.choice((1, 4, 12))
    specs = [
        _spec(rng, "audit", rows_max),
        _spec(rng, "orders", rows_max, ("orders",)),
        _spec(rng, "users", rows_max, ("users",)),
        _spec(rng, "mirror", rows_max, start="beginning"),
    ][: rng.randint(2, 4)]
    ttl_s = {specs[-1].name: rng.uniform(5, 30)} if rng.random() < 0.25 else {}
    bots = [_bot(seed, rows_max)] if seed % 5 == 1 else []
    made = Scenario(
        seed=seed,
        places=places,
        transactions=rng.randint(8, 30),
        instances=rng.choice((1, 2, 2, 3)),
        steps=rng.randint(400, 1600),
        switch_chance=rng.choice((0.1, 0.3, 0.7)),
        tick_s=rng.choice((0.02, 0.1, 0.3)),
        rates=Rates(rate(0.004), rate(0.0012), rate(0.004), rate(0.01), rate(0.01)),
        specs=(*specs, *bots),
        late_spec=_spec(rng, "late", rows_max, start=rng.choice(("now", "beginning"))) if rng.random() < 0.4 else None,
        wish_chance=_wish_chance(rng) if rng.random() < 0.8 else {},
        calm_pace_s=rng.choice((0, 0, 1.5, 6)),
        sees_gone=rng.random() < 0.5,
        rows_max=rows_max,
        repeat_chance=rng.choice((0, 0, 0.1, 0.3)),
        repeat_reach=rng.randint(2, 8),
        forgets_tail=rng.choice((0, 0, 0.1, 0.5)),
        ttl_s=ttl_s,
        moves_keys=seed % 3 == 0,
        shards=1 + seed % 3 if seed % 4 == 3 else 1,
        sends=seed % 7 in (2, 5),
        cuts=0.02 if seed % 4 == 2 else 0.0,
        holes=seed % 7 == 3,
        receiver_chance={
            "down": rng.choice((0, 0.3, 0.7)),
            "gone": rng.choice((0, 0, 0.1)),
            "refuse": rng.choice((0, 0.1, 0.3, 0.8)),
            "lost_answer": rng.choice((0, 0.02, 0.1)),
            "slow": rng.choice((0, 0.02, 0.1)),
            "busy": max(rng.choice((0, 0.05)), 0.2 if bots else 0),
        },
    )
    if seed % 6 != 4 or bots:
        return made
    # Without a checkpoint, a log that forgot where it ends is read again from before what the source has forgotten.
    return replace(made, from_now=True, repeat_chance=0, forgets_tail=0.0)


def _bot(seed: int, rows_max: int) -> SubscriptionSpec:
    """A bot with a device. It draws from numbers of its own: seeds without one stay what they were."""
    rng = random.Random(f"bot {seed}")
    spec = _spec(rng, BOT, rows_max, start=rng.choice(("now", "beginning")))
    return replace(spec, ordered=False, bot=BotSpec("shop", "bot", device="phone"))


def session_of(partition: int, stream: str, key: str) -> str:
    """Of one key, as a session of blocks is of one stream, which is its key: others may overtake it."""
    return f"{partition}-{stream}-{key}"


def _wish_chance(rng: random.Random) -> dict[str, float]:
    """Per look of a person. Some seeds leave out one thing or another: what is left happens more often in a row."""
    return {
        "add": rng.choice((0.2, 0.5)),
        "anew": rng.choice((0, 0.05, 0.2)),
        "remove": rng.choice((0, 0.05)),
        "change": rng.choice((0, 0.1, 0.3)),
        "rotate": rng.choice((0, 0.1, 0.3)),
        "retire": rng.choice((0, 0.05)),
        "trespass": rng.choice((0, 0.05)),
    }


def asked_spec(rng: random.Random, name: str, rows_max: int) -> SubscriptionSpec:
    """What a person asks for."""
    spec = _spec(rng, name, rows_max, start=rng.choice(("now", "now", "beginning")))
    return replace(spec, **wanted(rng, rows_max, 3), made_by=MadeBy.API)


def wanted(rng: random.Random, rows_max: int, count: int) -> dict[str, Any]:
    """Other values for some of what can be changed."""
    values = {
        "streams": rng.choice(((), STREAMS[:1], STREAMS[1:], STREAMS)),
        "ops": rng.choice(((), (), OPS[:2], OPS[2:])),
        "ordered": rng.random() < 0.4,
        "bundle": rng.choice((1, 1, 3)),
        "parked_max": _parked_max(rng, rows_max),
    }
    return {name: values[name] for name in rng.sample(sorted(values), count)}


def _places(rng: random.Random) -> tuple[SourcePartition, ...]:
    places = [SourcePartition("shop", partition) for partition in range(rng.randint(1, 3))]
    if rng.random() < 0.3:
        places.append(SourcePartition("bank", 0))
    return tuple(places)


def _spec(
    rng: random.Random, name: str, rows_max: int, streams: tuple[str, ...] = (), start: str = "now"
) -> SubscriptionSpec:
    return SubscriptionSpec(
        name=name,
        url=f"https://{name}.example/hook",
        streams=streams,
        start=start,
        ordered=rng.random() < 0.3,
        bundle=rng.choice((1, 1, 1, 4)),
        parked_max=_parked_max(rng, rows_max),
        retry_waits_s=_RETRY_WAITS_S,
    )


def _parked_max(rng: random.Random, rows_max: int) -> int:
    """Less than a batch may need: it passes bit by bit, as there is room."""
    return rng.choice((0, 10_000, 10_000)) or max(2, rows_max // 2)
