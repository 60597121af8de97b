"""Hellos: what this node says of itself and of others, and what it learns when a peer says so."""

from __future__ import annotations

from evermark.errors import ConflictError, DeniedError, SetupError
from evermark.replicas import clock
from evermark.replicas import members as membership
from evermark.replicas.event import born_ms, member_of
from evermark.replicas.exchange import Hello, Standing
from evermark.replicas.local_node import LocalNode
from evermark.replicas.members import Member, Said
from evermark.replicas.ranges import NOTHING


class Greetings:
    def __init__(self, node: LocalNode) -> None:
        self._node, self._store = node, node.store

    def hello(self) -> Hello:
        said = self._store.said()
        if not self._store.is_noted():
            # Others collect what this node says it holds: a backup that holds less must be found out. So what is said
            # is read first: users write meanwhile.
            self._node.note()
            if self._node.origin() != said.origin:
                return self.hello()  # it was a backup, and goes on as another
        known = {name: each.said for name, each in self._store.members().items() if each.said is not None}
        return Hello(self._node.name, self._node.protocol, self._node.now_ms(), self._store.tables(), said, known)

    def standing(self) -> Standing:
        """What this node has; unlike a hello it changes nothing, here or with the asker."""
        node, store = self._node, self._store
        tables = store.tables()
        held, clocks = {name: store.held(name) for name in tables}, store.clocks()
        said = Said(node.origin(), 0, held, clocks, store.evicted())
        hello = Hello(node.name, node.protocol, node.now_ms(), tables, said, {})
        return Standing(hello, {name: store.floors(name) for name in tables})

    def learn(self, peer: str, theirs: Hello) -> None:
        """Learn from a peer's hello: which members there are, what each holds, which are evicted."""
        _check_names(peer, theirs)
        now = self._node.now_ms()
        readings = {
            table: reading
            for table, reading in theirs.said.clocks.items()
            if not clock.is_ahead(reading, now, self._node.limits.skew_ms)
        }
        if self._store.joined():
            self._store.raise_clocks(readings)
        else:
            self._store.join(readings)
        if self._node.origin() in theirs.said.evicted:
            if theirs.said.origin in self._store.evicted():
                raise SetupError(
                    f"{self._node.name} and {theirs.node} have evicted each other",
                    hint="keep one of them; remove the folder of the other, and `evermark replica init` it again",
                )
            self._store.evict_self(self._node.next_origin())
        self._check_own_head(theirs)
        own = self._node.origin()
        mine = {table: self._store.held(table) for table in self._store.tables()}
        known = self._store.members()
        for name, said in {**theirs.members, theirs.node: theirs.said}.items():
            if name == self._node.name:
                self._check_namesake(said, own)
                continue
            known[name] = membership.heard(known.get(name, Member(name)), said, now)
        known = {name: membership.settled(member, mine) for name, member in known.items()}
        self._store.save_members(known, theirs.said.evicted | self._store.evicted())

    def _check_namesake(self, said: Said, own: str) -> None:
        if born_ms(said.origin) > born_ms(own):
            raise ConflictError(
                f"another node calls itself {self._node.name}: {said.origin}, and this one is {own}",
                hint="this is a copy of it: give it a name and a key of its own, or stop it",
            )

    def _check_own_head(self, theirs: Hello) -> None:
        """A peer that holds more of this node's events than it made: it was restored. It goes on as another origin, and
        takes what it had made as it takes any other's."""
        own = self._node.origin()
        for table in self._store.tables():
            made = self._store.held(table).get(own, NOTHING)
            if not made.covers(theirs.said.held.get(table, {}).get(own, NOTHING)):
                self._store.renew(self._node.next_origin(), is_noted=False)
                return


def _check_names(peer: str, theirs: Hello) -> None:
    """What a node says of itself, and passes on of others, is under their own names."""
    every = {**theirs.members, theirs.node: theirs.said}
    if theirs.node != peer or any(member_of(said.origin) != name for name, said in every.items()):
        raise DeniedError(
            f"{peer} speaks in another node's name: {theirs.node[:60]!r}", hint="a key belongs to one node alone"
        )
