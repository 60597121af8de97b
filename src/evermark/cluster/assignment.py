"""Which instance takes which leases. Pure: every instance computes the same from the same rows of State.

Nothing depends on two instances agreeing at every moment: a lease has one holder whatever they compute, and they agree
again at the next look.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from heapq import heappop, heappush


def assigned(
    able: Mapping[str, Collection[str]], owners: Mapping[str, str], kinds: Iterable[str] = ("source:",)
) -> dict[str, str]:
    """The instance for each lease. `able` has, by instance that lives and is to have work, the leases it can take;
    `owners` says which instance has a lease now.

    An instance that has a lease keeps it, as far as loads allow: the loads of two instances that can take the same
    leases differ by one at most. Leases that begin with one of `kinds`, and all others, are balanced apart: a shard is
    no partition.
    """
    if len(able) == 1:  # looked at every second, for ever, by an instance that is alone
        ((name, leases),) = able.items()
        return dict.fromkeys(leases, name)
    wanted = sorted({lease for leases in able.values() for lease in leases})
    found: dict[str, str] = {}
    for kind in (*kinds, ""):
        mine = [lease for lease in wanted if lease not in found and lease.startswith(kind)]
        found |= _balanced(mine, able, owners)
    return found


def _balanced(leases: list[str], able: Mapping[str, Collection[str]], owners: Mapping[str, str]) -> dict[str, str]:
    those = {name: frozenset(able[name]) for name in sorted(able)}
    can = {lease: [name for name, mine in those.items() if lease in mine] for lease in leases}
    found = {lease: owners[lease] for lease in leases if owners.get(lease) in can[lease]}
    loads = dict.fromkeys(sorted(able), 0)
    for name in found.values():
        loads[name] += 1
    for lease in leases:
        if lease not in found:
            found[lease] = min(can[lease], key=lambda name: (loads[name], name))
            loads[found[lease]] += 1
    _level(found, can, loads)
    return found


def _level(found: dict[str, str], can: Mapping[str, list[str]], loads: dict[str, int]) -> None:
    """Move leases from one of the most loaded to one of the least that can take them, until nothing is won by it."""
    # By who has them and who can take them: of ten thousand sources nearly all are alike.
    alike: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for lease in sorted(found):
        alike.setdefault((found[lease], tuple(can[lease])), []).append(lease)  # each a heap: the first by name in front
    while True:
        moves = [
            (loads[to] - loads[name], to, leases[0], name, those)
            for (name, those), leases in alike.items()
            if leases
            for to in those
            if loads[to] + 1 < loads[name]
        ]
        if not moves:
            return
        _, to, lease, name, those = min(moves)
        heappop(alike[name, those])
        heappush(alike.setdefault((to, those), []), lease)
        loads[name] -= 1
        loads[to] += 1
        found[lease] = to
