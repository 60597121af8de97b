"""Which instance takes which leases: balanced, sticky, and the same wherever it is computed."""

from __future__ import annotations

import time
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from evermark.cluster.assignment import assigned
from evermark.cluster.fence import deliver_lease, source_lease
from evermark.cluster.holding import LIMITS

_NAMES = st.lists(st.sampled_from([f"i{n}" for n in range(6)]), min_size=1, unique=True)
_LEASES = st.builds(
    lambda partitions, shards: frozenset(
        [*(source_lease("chat", p) for p in range(partitions)), *(deliver_lease(s) for s in range(shards))]
    ),
    st.integers(0, 14),
    st.integers(1, 4),
)


def _loads(found: dict[str, str], instances: list[str], kind: str) -> list[int]:
    counted = Counter(owner for lease, owner in found.items() if lease.startswith(kind))
    return [counted[name] for name in instances]


def _moves_least(leases: frozenset[str], owners: dict[str, str], instances: list[str], kind: str) -> int:
    """How many leases that a living instance has must change hands for loads that differ by one at most."""
    mine = [lease for lease in leases if lease.startswith(kind)]
    have = sorted((sum(owners.get(lease) == name for lease in mine) for name in instances), reverse=True)
    each, more = divmod(len(mine), len(instances))
    return sum(max(0, load - (each + (place < more))) for place, load in enumerate(have))


@given(_LEASES, _NAMES, st.randoms(use_true_random=False))
def test_every_lease_has_one_living_owner_and_loads_differ_by_one_at_most(leases, instances, random) -> None:  # type: ignore[no-untyped-def]
    """GIVEN any owners, some of them dead WHEN leases are assigned THEN each has one living owner, loads of a kind are
    level, no more leases move than have to, and the same rows in another order give the same.
    """
    owners = {lease: random.choice(["", "dead", *instances]) for lease in leases}
    found = assigned(dict.fromkeys(instances, leases), owners)
    assert found.keys() == leases and set(found.values()) <= set(instances)
    for kind in ("source:", "deliver"):
        loads = _loads(found, instances, kind)
        assert max(loads) - min(loads) <= 1
        moved = [x for x in leases if x.startswith(kind) and owners[x] in instances and found[x] != owners[x]]
        assert len(moved) == _moves_least(leases, owners, instances, kind)
    shuffled = random.sample(instances, len(instances))
    assert assigned(dict.fromkeys(shuffled, sorted(leases, reverse=True)), dict(reversed(owners.items()))) == found


@given(_LEASES, _NAMES)
def test_what_is_assigned_stays_so(leases, instances) -> None:  # type: ignore[no-untyped-def]
    """GIVEN an assignment that was carried out WHEN it is computed again THEN nothing moves."""
    found = assigned(dict.fromkeys(instances, leases), {})
    assert assigned(dict.fromkeys(instances, leases), found) == found


def test_a_lease_goes_only_to_an_instance_that_can_take_it() -> None:
    """GIVEN an instance of an older file WHEN a source is new THEN the instances that know it have it."""
    old, new = [source_lease("chat", p) for p in range(4)], source_lease("shop")
    found = assigned({"a": old, "b": [*old, new]}, dict.fromkeys(old, "a"))
    assert found[new] == "b"
    assert Counter(found.values()) == {"a": 3, "b": 2}


def test_one_source_and_its_delivery_stay_together() -> None:
    """GIVEN one source and one shard WHEN a second instance joins THEN it stands by: events pass no other process."""
    leases = [source_lease("shop"), deliver_lease(0)]
    found = assigned({"b": leases, "a": leases}, {})
    assert set(found.values()) == {"a"}
    assert assigned({"0": leases, "a": leases}, found) == found


def test_of_nobody_nothing_is_assigned() -> None:
    """GIVEN no instance that is to have work THEN no lease has an owner."""
    assert assigned({}, {source_lease("shop"): "gone"}) == {}


def test_ten_thousand_sources_are_shared_out_within_a_look() -> None:
    """GIVEN an instance that has ten thousand sources WHEN a second one comes THEN who gets which is known long before
    the first would be taken for dead: it took half a minute, as each move looked at all that could be made."""
    leases = frozenset(source_lease(f"s{n:05}") for n in range(10_000))
    began = time.process_time()
    found = assigned({"a": leases, "b": leases}, dict.fromkeys(leases, "a"))
    assert time.process_time() - began < LIMITS.ttl_s / 4
    assert Counter(found.values()) == {"a": 5_000, "b": 5_000}
