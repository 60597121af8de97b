"""Which nodes are ours. A node that was never seen, and follows none that was, is not read from."""

from __future__ import annotations

from collections.abc import Sequence

from evermark.errors import DeniedError, EvermarkError, FormatError, IdentityError
from evermark.sources.blocks.client import TRANSIENT, Family, Node
from evermark.sources.blocks.plans import Plans


class NodeIdentity:
    def __init__(self, nodes: Sequence[Node], plans: Plans, partitions: int) -> None:
        self._nodes, self._plans, self._partitions = nodes, plans, partitions
        self._ours: frozenset[str] = frozenset()

    def check(self) -> frozenset[str]:
        """Ask every node that answers who it is; those that are ours. At a first start the first one's word is taken.

        Nothing is written down: that is `learn`.
        """
        known = self._plans.family(self._partitions)
        seen: dict[str, Family] = {}
        errors: list[EvermarkError] = []
        for node in self._nodes:
            try:
                seen[node.url] = node.family()
            except (*TRANSIENT, FormatError, DeniedError) as error:
                errors.append(error)  # another one may be well
        if not seen:
            raise min(errors, key=lambda error: not isinstance(error, TRANSIENT))
        ours = set(known) or next(iter(seen.values())).names
        for url, family in seen.items():
            if not family.names & ours:
                raise IdentityError(
                    f"the block node at {url} is another one than was read before, and follows none of those",
                    hint="put the right address into the source's `nodes`, or take another source for other nodes",
                )
            ours |= family.names
        return frozenset(ours)

    def learn(self) -> None:
        """Check, and remember whom we found."""
        ours = self.check()
        if ours != self._plans.family(self._partitions):
            self._plans.learn(self._partitions, sorted(ours))
        self._ours = ours

    def require(self, node: str) -> None:
        """Raise unless this is one of ours; asked with every listing, since a node may be replaced while we read."""
        if node in self._ours:
            return
        self.learn()
        if node not in self._ours:
            raise IdentityError(
                "a block node that was never seen answers at one of our addresses",
                hint="was its folder replaced? put the right address into the source's `nodes`",
            )
