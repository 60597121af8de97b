"""A replica, put together: it answers its peers (`answers`), meets them (`meetings`) and keeps itself up (`upkeep`)."""

from __future__ import annotations

from evermark.replicas.answers import Answers
from evermark.replicas.bootstrap import Bootstrap
from evermark.replicas.greetings import Greetings
from evermark.replicas.local_node import LocalNode
from evermark.replicas.meetings import Meetings
from evermark.replicas.snapshots import Snapshots
from evermark.replicas.stored_events import StoredEvents
from evermark.replicas.upkeep import Upkeep


class Replica:
    """One node on one store. Not thread-safe: each thread has a `Replica` on a store of its own."""

    def __init__(self, node: LocalNode, snapshots: Snapshots) -> None:
        self.node, self.store = node, node.store
        self.greetings, events = Greetings(node), StoredEvents(node)
        self.answers = Answers(node, self.greetings, events, snapshots)
        self.meetings = Meetings(node, self.greetings, events, Bootstrap(node, snapshots))
        self.upkeep = Upkeep(node)
