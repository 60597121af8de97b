"""A kind of source is one folder and one line: the documented one, registered, is everywhere that it should be."""

from __future__ import annotations

import json
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from evermark.app.build import make_source
from evermark.cli.main import app
from evermark.config import CustomSource
from evermark.errors import ConfigError
from evermark.sources import kinds
from evermark.sources.base import Source
from evermark.sources.kinds import KINDS, Registered, kind_named, kind_of
from evermark.sources.settings import SourceConfig
from evermark.testing import SourceContract
from tests.unit.config.config_file import MINIMAL, read, refused

DOCS = Path(__file__).resolve().parents[3] / "docs" / "sources.md"
LINES_MAX = 60
FILE = MINIMAL + "sources: {{tickets: {{type: lines, path: {path}}}}}\n"


def documented(begins: str) -> str:
    """The block of code in docs/sources.md that begins so."""
    blocks = re.findall(r"^```python\n(.*?)^```$", DOCS.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    (found,) = [block for block in blocks if block.startswith(begins)]
    return str(found)


@pytest.fixture
def lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The documented kind as a module, its one line in the registry, and a file with events in it."""
    module = f"lines_kind_{tmp_path.name}"
    (tmp_path / f"{module}.py").write_text(documented("import itertools"), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(KINDS, "lines", Registered(f"{module}:KIND"))
    events = tmp_path / "tickets.txt"
    events.write_text("".join(f"{number}\n" for number in range(23)) + "not yet wh", encoding="utf-8")
    return events


def invoke(*args: str | Path) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args])


def shown(*args: str | Path) -> Any:
    result = invoke(*args, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


class TestDocumentedKindKeepsTheContract(SourceContract):
    @pytest.fixture(autouse=True)
    def _made(self, lines: Path) -> None:
        self.source = make_source(read(lines.parent, FILE.format(path=lines)), "tickets", None)


def test_the_documented_kind_is_short() -> None:
    """A kind is no great matter: the whole of it, settings and source, fits on a page; its line is as documented."""
    code = [line for line in documented("import itertools").splitlines() if line.strip()]
    assert len(code) <= LINES_MAX
    assert documented('    "lines"') == '    "lines": Registered("evermark.sources.lines.kind:KIND"),\n'


def test_one_line_makes_a_kind_known_to_the_file_and_the_pipeline(lines: Path) -> None:
    """GIVEN its line WHEN a file names the kind THEN it is read by the kind's own model, and built."""
    config = read(lines.parent, FILE.format(path=lines))
    assert config.sources["tickets"].model_dump() == {"type": "lines", "path": lines}
    source = make_source(config, "tickets", None)
    assert type(source).__name__ == "Lines"
    assert isinstance(pickle.loads(pickle.dumps(source)), Source)


def test_one_line_makes_a_kind_known_to_the_commands(lines: Path) -> None:
    """GIVEN its line WHEN sources are listed, the file checked and the source examined THEN the kind answers."""
    file = lines.parent / "evermark.yaml"
    file.write_text(FILE.format(path=lines) + f"data: {lines.parent / 'data'}\n", encoding="utf-8")
    (row,) = shown("source", "list", "-c", file)
    assert (row["source"], row["type"], row["path"], row["tables"]) == ("tickets", "lines", str(lines), [])
    assert "tickets (lines)" in str(shown("config", "check", "--connect", "-c", file))
    (said,) = [each for each in shown("doctor", "-c", file)["findings"] if each["source"] == "tickets"]
    assert (said["grade"], said["found"]) == ("ok", "it says that it can be read")

    lines.unlink()
    ill = invoke("doctor", "--json", "-c", file)
    assert ill.exit_code == 3
    assert f"there is no file {lines}" in ill.stdout and "create it, or correct `path`" in ill.stdout


def test_a_kind_without_an_installation_refuses_to_be_installed(lines: Path) -> None:
    """GIVEN a kind that needs nothing installed WHEN asked to install THEN it says so, and for which kinds that is."""
    file = lines.parent / "evermark.yaml"
    file.write_text(FILE.format(path=lines), encoding="utf-8")
    for command in (["install"], ["uninstall", "--yes"], ["maintain"]):
        said = invoke("source", *command, "-c", file)
        assert said.exit_code == 1
        assert "sources.tickets: lines needs nothing installed" in said.stderr
        assert "this is for sources of type postgres" in said.stderr


def test_a_kind_that_is_not_registered_is_refused_with_those_that_are(tmp_path: Path) -> None:
    """GIVEN no such line WHEN a file names the kind THEN the refusal lists the kinds there are."""
    assert "expected one of postgres, blocks, mongo, replica, or package.module:Class" in str(
        refused(tmp_path, FILE.format(path="x"))
    )


@pytest.mark.parametrize("name", sorted(KINDS))
def test_every_registered_kind_is_there(name: str) -> None:
    """Each line names a `SourceKind` whose settings have the name of the line as their type."""
    kind = kind_named(name)
    assert kind is not None
    assert kind.settings.model_fields["type"].default == name


def test_a_class_of_the_users_own_is_a_kind_too(tmp_path: Path) -> None:
    """GIVEN a class path WHEN it cannot be made into a source THEN the error says which source, and why."""
    for path, said in (("nowhere.at_all:Tickets", "cannot be made"), ("pathlib:Path", "is not an evermark.Source")):
        config = read(tmp_path, MINIMAL + f"sources: {{own: {{type: '{path}'}}}}\n")
        assert kind_of(config.sources["own"], "own").settings is CustomSource
        with pytest.raises(ConfigError, match=f"sources.own: {path} {said}"):
            make_source(config, "own", None)


def test_settings_that_belong_to_no_kind_are_refused() -> None:
    """GIVEN settings that only claim to be of a kind WHEN their kind is asked for THEN it is an error with the name."""
    with pytest.raises(ConfigError, match=r"sources\.shop: SourceConfig is not a source this program can build"):
        kind_of(SourceConfig(type="postgres"), "shop")


def test_reading_a_file_loads_one_kind_and_no_driver(tmp_path: Path) -> None:
    """GIVEN a file with one kind of source WHEN it is read THEN neither drivers nor other kinds are loaded."""
    read(tmp_path, MINIMAL + "sources: {shop: {type: postgres, dsn: 'postgresql://h/x'}}\n")
    code = (
        "import sys; from pathlib import Path; import evermark.config as c;"
        f"c.load(Path({str(tmp_path / 'evermark.yaml')!r}));"
        "print([n for n in ('psycopg', 'aiohttp', 'pyspark', 'evermark.sources.blocks') if n in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_what_workers_load_first_is_there() -> None:
    """Spark's daemon loads these modules before it forks: with a line that names a missing one it could not start."""
    assert kinds.task_modules() == ["evermark.sources.postgres.read.source"]
    for name in kinds.task_modules():
        assert subprocess.run([sys.executable, "-c", f"import {name}"], check=True).returncode == 0
