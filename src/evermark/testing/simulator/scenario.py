"""What a seed stands for: sources, subscriptions, receivers and how often which fault strikes. Plain values."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from evermark.delivery.base import Place, SubscriptionSpec

STREAMS = ("orders", "users")
ROWS_PER_TRANSACTION_MAX = 3


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
    places: tuple[Place, ...]
    transactions: int
    instances: int
    steps: int  # effects under faults, before the calm
    switch_chance: float
    tick_s: float
    rates: Rates
    specs: tuple[SubscriptionSpec, ...]
    late_spec: SubscriptionSpec | None  # joins the file when the run is half over
    api_spec: SubscriptionSpec | None  # made by a person while delivery is under way
    sees_gone: bool  # whether a dead holder loses its lease at once, or when it runs out
    rows_max: int  # events per batch
    repeat_chance: float  # how often the source gives an event again at a later position
    repeat_reach: int  # from how far back
    forgets_tail: float  # how often the log no longer knows where its last batch ends
    ttl_s: dict[str, float] = field(default_factory=dict)
    receiver_chance: dict[str, float] = field(default_factory=dict)

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
    return Scenario(
        seed=seed,
        places=places,
        transactions=rng.randint(8, 30),
        instances=rng.choice((1, 2, 2, 3)),
        steps=rng.randint(400, 1600),
        switch_chance=rng.choice((0.1, 0.3, 0.7)),
        tick_s=rng.choice((0.02, 0.1, 0.3)),
        rates=Rates(rate(0.004), rate(0.0012), rate(0.004), rate(0.01), rate(0.01)),
        specs=tuple(specs),
        late_spec=_spec(rng, "late", rows_max, start=rng.choice(("now", "beginning"))) if rng.random() < 0.4 else None,
        api_spec=_spec(rng, "api", rows_max) if rng.random() < 0.7 else None,
        sees_gone=rng.random() < 0.5,
        rows_max=rows_max,
        repeat_chance=rng.choice((0, 0, 0.1, 0.3)),
        repeat_reach=rng.randint(2, 8),
        forgets_tail=rng.choice((0, 0, 0.1, 0.5)),
        ttl_s=ttl_s,
        receiver_chance={
            "down": rng.choice((0, 0.3, 0.7)),
            "gone": rng.choice((0, 0, 0.1)),
            "refuse": rng.choice((0, 0.1, 0.3)),
            "lost_answer": rng.choice((0, 0.02, 0.1)),
            "slow": rng.choice((0, 0.02, 0.1)),
            "busy": rng.choice((0, 0.05)),
        },
    )


def _places(rng: random.Random) -> tuple[Place, ...]:
    places = [Place("shop", partition) for partition in range(rng.randint(1, 3))]
    if rng.random() < 0.3:
        places.append(Place("bank", 0))
    return tuple(places)


def _spec(
    rng: random.Random, name: str, rows_max: int, streams: tuple[str, ...] = (), start: str = "now"
) -> SubscriptionSpec:
    """`parked_max` leaves room for any one batch: a batch that never fits would need a person."""
    return SubscriptionSpec(
        name=name,
        url=f"https://{name}.example/hook",
        streams=streams,
        start=start,
        ordered=rng.random() < 0.3,
        parked_max=rng.choice((0, 10_000, 10_000)) or rows_max + ROWS_PER_TRANSACTION_MAX,
    )
