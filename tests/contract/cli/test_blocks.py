"""The command line on a block source: what it says of nodes and streams, and a person's word on a fork."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from evermark.app.build import open_deployment
from evermark.cli.main import app
from evermark.config import load
from evermark.sources.blocks.source import BlockStreams
from evermark.testing.blocknodes import Node
from simulator.blocks.pipeline import Pipeline
from tests.contract.blocks.blocks_scene import ALL, EACH

TOKEN = "a token of some length, for tests"
FILE = """
version: 1
name: talk
data: {data}
state: {{dsn: "${{PG_DSN}}"}}
sources:
  chat: {{type: blocks, nodes: ["{url}"], token: "${{CHAT_TOKEN}}"}}
"""


def invoke(*args: object) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args])


def findings(file: Path, code: int) -> list[tuple[str, str, str, str]]:
    result = invoke("doctor", "--json", "-c", file)
    assert result.exit_code == code, result.output
    assert TOKEN not in result.output
    rows: list[dict[str, Any]] = json.loads(result.stdout)["findings"]
    return [(row["check"], row["grade"], row["found"], row["mend"] or "") for row in rows]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with Node(tmp_path / "node", *EACH, "--snapshot-every", "4", "--token", TOKEN) as made:
        yield made


@pytest.fixture
def file(tmp_path: Path, node: Node, pg_dsn: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A deployment that reads the node, with its state in the test's own database."""
    monkeypatch.setenv("PG_DSN", pg_dsn)
    monkeypatch.setenv("CHAT_TOKEN", TOKEN)
    path = tmp_path / "evermark.yaml"
    path.write_text(FILE.format(data=tmp_path / "data", url=node.url))
    return path


def test_a_block_source_needs_no_install_and_is_examined_before_anything_was_started(file: Path, node: Node) -> None:
    """GIVEN a file and a node WHEN examined THEN the node is named, nothing is made, and a dead one is wrong."""
    (listed,) = json.loads(invoke("source", "list", "--json", "-c", file).stdout)
    assert (listed["type"], listed["nodes"]) == ("blocks", [node.url])
    assert "needs nothing installed" in invoke("source", "install", "-c", file).stderr
    assert [row[:2] for row in findings(file, 0)] == [("state", "ok"), ("node", "ok")]
    assert not (file.parent / "data").exists()
    node.kill()
    (dead,) = [row for row in findings(file, 3) if row[0] == "node"]
    assert (dead[1], bool(dead[3])) == ("wrong", True)


def test_a_fork_is_shown_and_passed_when_a_person_accepts_it(file: Path, node: Node) -> None:
    """GIVEN a rewritten history WHEN looked at THEN doctor and recover name it; accepted, it is taken, and said."""
    client = node.client(TOKEN)
    client.create("room")
    client.say("room", 6)
    client.close()
    node.stop()
    backup = file.parent / "backup"
    shutil.copytree(node.data, backup)
    node.start()
    client = node.client(TOKEN)
    client.say("room", 6)
    old = client.hashes("room")
    client.close()

    deployment = open_deployment(load(file))
    try:
        packed = pickle.dumps(deployment.sources["chat"])
        assert TOKEN.encode() not in packed

        def another() -> BlockStreams:
            made: BlockStreams = pickle.loads(packed)
            return made

        pipe = Pipeline(another)
        pipe.start()
        pipe.drain(ALL)
        assert pipe.ids("room") == old
        assert "not stale" in invoke("source", "recover", "--accept-fork", "room", "--yes", "-c", file).stderr

        # WHEN the node comes back with another history that is longer
        node.kill()
        shutil.rmtree(node.data)
        shutil.copytree(backup, node.data)
        node.start()
        client = node.client(TOKEN)
        client.say("room", 9)
        new = client.hashes("room")
        client.close()
        pipe.start()
        pipe.drain(ALL)
        assert pipe.ids("room") == old
        (said,) = [row for row in findings(file, 3) if row[0] == "streams"]
        assert "fork" in said[2]
        assert said[3] == "evermark source recover chat --accept-fork room"
        shown = json.loads(invoke("source", "recover", "--json", "-c", file).stdout)
        assert list(shown["stale"]) == ["room"]

        # THEN it is passed when a person says so
        asked = invoke("source", "recover", "chat", "--accept-fork", "room", "--yes", "--json", "-c", file)
        assert asked.exit_code == 0, asked.output
        assert json.loads(asked.stdout)["accepted"] == "room"
        pipe.start()
        pipe.drain(ALL)
        assert sorted(pipe.ids("room")) == sorted({*old, *new})
        assert json.loads(pipe.notes("room")[0])["change"] == "fork accepted"
        assert ("streams", "ok") in [row[:2] for row in findings(file, 0)]
        pipe.source.close()
    finally:
        deployment.close()
