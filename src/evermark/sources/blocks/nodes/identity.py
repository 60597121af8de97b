"""Which nodes belong to a source. A node that was never seen, and follows none that was, is refused: with it every
stream would look recreated."""

from __future__ import annotations

from collections.abc import Sequence

from evermark.errors import EvermarkError, IdentityError
from evermark.sources.blocks.nodes.client import TRANSIENT, UNWELL, Node, NodeInfo
from evermark.sources.blocks.store.base import Plans


class NodeIdentity:
    def __init__(self, nodes: Sequence[Node], plans: Plans, partitions: int) -> None:
        self._nodes, self._plans, self._partitions = nodes, plans, partitions
        self._ours: frozenset[str] = frozenset()

    def check(self) -> frozenset[str]:
        """Ask every node for its id; the ids that belong to the source. At the first start the first node decides.

        Nothing is written down: that is `learn`.
        """
        known = self._plans.known_nodes(self._partitions)
        seen: dict[str, NodeInfo] = {}
        errors: list[EvermarkError] = []
        for node in self._nodes:
            try:
                seen[node.url] = node.about()
            except UNWELL as error:
                errors.append(error)
        if not seen:
            raise min(errors, key=lambda error: not isinstance(error, TRANSIENT))
        ours = set(known) or next(iter(seen.values())).names
        for url, info in seen.items():
            if not info.names & ours:
                raise IdentityError(
                    f"the block node at {url} is another one than those read before, and follows none of them",
                    hint="put the right address into the source's `nodes`, or take another source for other nodes",
                )
            ours |= info.names
        return frozenset(ours)

    def learn(self) -> None:
        """Check, and remember the nodes that were found."""
        ours = self.check()
        if ours != self._plans.known_nodes(self._partitions):
            self._plans.remember_nodes(self._partitions, sorted(ours))
        self._ours = ours

    def require(self, node: str) -> None:
        """Raise unless the node belongs to the source; called with every listing: nodes may be replaced meanwhile."""
        if node in self._ours:
            return
        self.learn()
        if node not in self._ours:
            raise IdentityError(
                "a block node that was never seen answers at one of our addresses",
                hint="was its folder replaced? put the right address into the source's `nodes`",
            )
