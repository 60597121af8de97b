"""Replays beside live deliveries, under the simulator's faults; and the proof that this can fail."""

from __future__ import annotations

from collections import Counter
from functools import cache

from evermark.delivery.replay.plan import ReplayState
from simulator.__main__ import run_replays
from simulator.run import Ran

SEEDS = 12


@cache
def once(seed: int) -> Ran:
    return run_replays(seed)


def test_every_replay_reaches_its_handlers_and_disturbs_nobody() -> None:
    """Windows asked for at any time, again and overlapping, by SQL and by people, for one or all, under all faults."""
    met: Counter[str] = Counter()
    for seed in range(SEEDS):
        ran = once(seed)
        assert not ran.failure, f"seed {seed}: {ran.failure}\n{ran.trace}"
        met.update(ran.met)
    ends = [f"replay {state}" for state in (ReplayState.DONE, ReplayState.CANCELLED, ReplayState.FAILED)]
    wanted = ("replayed", "replays.register", "replays.request", "replays.end_target", "replays.cleared", *ends)
    assert not [what for what in wanted if not met[what]], met


def test_same_seed_gives_the_same_run() -> None:
    """A failure can be reproduced."""
    first, second = once(7), run_replays(7)
    assert (first.fingerprint, first.met) == (second.fingerprint, second.met)
