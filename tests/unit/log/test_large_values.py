"""Which keys the images of one record may stand under, so that one task has them."""

from __future__ import annotations

import random
from collections import defaultdict

from evermark.log.large_values import shared_keys


def test_keys_share_a_number_exactly_if_a_record_may_have_come_from_one_to_the_other() -> None:
    """GIVEN moves at random WHEN keys are numbered THEN two have one number just where moves lead from one to the
    other, whichever way; another partition's keys are others."""
    for seed in range(60):
        rng = random.Random(seed)
        moves = [("t", rng.randrange(2), str(rng.randrange(30)), str(rng.randrange(30))) for _ in range(12)]
        beside = defaultdict(set)
        for stream, partition, key, other in moves:
            beside[stream, partition, key].add((stream, partition, other))
            beside[stream, partition, other].add((stream, partition, key))
        found = {place: number for *place_, number in shared_keys(moves) for place in [tuple(place_)]}
        assert found.keys() == beside.keys(), seed
        for place, number in found.items():
            reached, todo = {place}, [place]
            while todo:
                more = beside[todo.pop()] - reached
                reached |= more
                todo += more
            assert {each for each in found if found[each] == number} == reached, seed


def test_a_long_chain_of_moves_is_one_record() -> None:
    """GIVEN a record that moved from key to key many times WHEN its keys are numbered THEN all have one number."""
    found = shared_keys([("t", 0, str(n), str(n + 1)) for n in range(20_000)])
    assert len(found) == 20_001 and {number for *_, number in found} == {0}
