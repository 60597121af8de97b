"""A chat on two block nodes, one copying the other, and the deployment that reads it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from evermark.testing.blocknodes import Client, Node
from evermark.testing.listener import Failing
from evermark.testing.pipeline import Stage
from evermark.testing.until import until


class ChatScene(Stage):
    """Every event is a block, so that a few hundred messages make a gap of many pages. `with` starts the nodes."""

    source = "chat"

    def __init__(self, folder: Path, receivers: Mapping[str, Failing | None], *options: str, **more: str) -> None:
        super().__init__(folder, receivers, **more)
        given = ("--seal-events", "1", "--snapshot-every", "50", "--page-blocks", "40", *options)
        self.leader = Node(folder / "leader", *given).start()
        self.follower = Node(folder / "follower", *given, "--follow", self.leader.url).start()

    def settings(self) -> str:
        return f'{{type: blocks, nodes: ["{self.leader.url}", "{self.follower.url}"]}}'

    def say(self, stream: str, count: int) -> None:
        client = self.leader.client()
        client.create(stream)
        client.say(stream, count)
        client.close()

    def committed(self) -> list[str]:
        """Of all streams, as whichever node is alive has them."""
        client = self._alive()
        listed = client.good("GET", "/v1/streams", touched_after=0)["streams"]
        found = [name for row in listed if not row["deleted"] for name in client.hashes(row["stream"])]
        client.close()
        return found

    def level(self) -> None:
        """Wait until the second node has all the first one has."""
        wanted = sorted(self.committed())

        def there() -> bool:
            client = self.follower.client()
            rows = client.good("GET", "/v1/streams", touched_after=0)["streams"]
            found = sorted(name for row in rows for name in client.hashes(row["stream"]))
            client.close()
            return found == wanted

        until(there, "the second node is level")

    def _alive(self) -> Client:
        return (self.leader if self.leader.running else self.follower).client()

    def __exit__(self, *ended: object) -> None:
        super().__exit__(*ended)
        self.leader.kill()
        self.follower.kill()
