"""The command line: clear errors, exit codes, no secrets, and nothing heavy loaded before it is needed."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from evermark.cli import console, deployment
from evermark.cli.main import COMMANDS, app, loaded, run
from evermark.config.subscriptions import DELIVERED_OPS
from evermark.delivery.model import BotMode
from evermark.errors import ConfigError, EvermarkError, NotFoundError

PYTHON_TYPES = re.compile(r"<(str|int|float|bool|path)\b|list\[|\brange>|None\b")
PASSWORD = "pw-do-not-show"
DSN = f"postgresql://shop:{PASSWORD}@127.0.0.1:1/shop"
SOURCE = 'shop: {type: postgres, dsn: "${SHOP_DSN}", tables: [public.orders, {name: users, exclude: [password]}]}'
FILE = f"""
version: 1
name: shop
sources:
  {SOURCE}
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A good file, with the address of its source in a variable."""
    monkeypatch.setenv("SHOP_DSN", DSN)
    path = tmp_path / "evermark.yaml"
    path.write_text(FILE)
    return path


def invoke(*args: str | Path) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args])


def failed(result: Result) -> str:
    """What a failed command said: one error with a hint, exit code 1, no traceback, no secret."""
    assert result.exit_code == 1, result.output
    assert isinstance(result.exception, SystemExit)
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert PASSWORD not in result.stderr
    assert result.stderr.startswith("error: ") and "\nhint: " in result.stderr
    return result.stderr


def test_help_lists_the_nouns_and_no_more(file: Path) -> None:
    """GIVEN the commands there are WHEN asked for help THEN each is listed with what it is for, whole."""
    text = invoke("--help").stdout
    assert [line.split()[0] for line in text.split("Commands:\n")[1].splitlines()] == list(COMMANDS)
    for entry in COMMANDS.values():
        assert entry.text in text


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_can_be_loaded_and_says_how_it_is_used(name: str) -> None:
    """GIVEN a listed command WHEN asked for its help THEN it is there, under its own name."""
    assert loaded(name).name == name
    result = invoke(name, "--help")
    assert result.exit_code == 0 and f"Usage: evermark {name}" in result.stdout.replace("root", "evermark")


def helps() -> Iterator[tuple[str, str]]:
    """Every command and noun by its words, with what it says of itself on a terminal of 80 columns."""
    for name in COMMANDS:
        found = loaded(name)
        for words in [(name,), *((name, verb) for verb in getattr(found, "commands", {}))]:
            yield " ".join(words), CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "80"}).stdout


def test_help_speaks_of_values_and_not_of_types() -> None:
    """GIVEN every option THEN its value is named for people (TIME, URL, N): no type of Python's is shown."""
    leaks = [(words, line) for words, text in helps() for line in text.splitlines() if PYTHON_TYPES.search(line)]
    assert leaks == []


def test_no_summary_is_cut_short() -> None:
    """GIVEN the list of a noun's verbs THEN each summary stands there whole."""
    lists = [(words, text.partition("Commands:")[2]) for words, text in helps()]
    cut = [(words, line) for words, text in lists for line in text.splitlines() if "..." in line]
    assert cut == []


def test_help_says_plainly_what_a_command_does() -> None:
    """GIVEN a verb's help THEN it names its noun and its exit codes in plain words, not "one", "them" or "ill"."""
    idioms = re.compile(r"\b(ill|Make one|One of them|All of them|All there were|where each stands|where they are)\b")
    assert [(words, found[0]) for words, text in helps() if (found := idioms.search(text))] == []


def test_the_values_that_an_option_may_have_are_listed() -> None:
    """GIVEN an option with a fixed set of values THEN its help lists them all."""
    said = dict(helps())
    for words in ("subscription add", "subscription set"):
        assert all(form in said[words] for form in ("standard", "cloudevents", "raw"))
        assert all(op in " ".join(said[words].split()) for op in DELIVERED_OPS)
    assert all(mode in said["bot add"] for mode in BotMode)


def test_help_loads_nothing_heavy() -> None:
    """GIVEN a fresh process WHEN it shows the help THEN no driver, Spark or Arrow is loaded, and it is quick."""
    code = """
import sys, time
from evermark.cli.main import run
try:
    run(["--help"])
except SystemExit as end:
    assert end.code == 0
heavy = {"pyspark", "deltalake", "psycopg", "pyarrow", "aiohttp", "pydantic", "structlog", "numpy"} & set(sys.modules)
assert not heavy, heavy
assert time.process_time() < 2.0, time.process_time()
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr


def test_help_of_a_command_loads_what_it_shows() -> None:
    """GIVEN a fresh process WHEN it has all commands ready to show their help THEN no driver, server or Spark is loaded
    for that, and Arrow only for the commands whose options are keys of the file.
    """
    code = """
import sys
from evermark.cli.main import COMMANDS, loaded
never = {"pyspark", "deltalake", "psycopg", "pymongo", "aiohttp", "starlette", "structlog", "sqlglot"}
keys_as_options = {"subscription", "bot"}
for name in sorted(COMMANDS, key=lambda name: name in keys_as_options):
    loaded(name)
    heavy = (never if name in keys_as_options else never | {"pyarrow", "numpy"}) & set(sys.modules)
    assert not heavy, (name, heavy)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr


def test_version_is_told() -> None:
    """GIVEN the program WHEN asked for its version THEN it says it and ends well."""
    result = invoke("--version")
    assert result.exit_code == 0 and result.stdout.startswith("evermark 0.")


@pytest.mark.parametrize(
    "args", [("nonsense",), ("source", "nonsense"), ("status", "--nonsense"), ("delivery", "show")]
)
def test_wrong_usage_ends_with_2(args: tuple[str, ...]) -> None:
    """GIVEN a command nobody knows or one half said WHEN called THEN exit code 2, and where to find help."""
    result = invoke(*args)
    assert result.exit_code == 2 and "--help" in result.stderr


def test_a_mistyped_command_is_guessed() -> None:
    """GIVEN a typing mistake WHEN called THEN the right name is offered."""
    assert "Did you mean 'status'" in invoke("statsu").stderr


READING = [("status",), ("up",), ("source", "list"), ("log", "info"), ("migrate",), ("checkpoint", "list")]


@pytest.mark.parametrize("command", READING)
def test_a_missing_file_points_to_init(command: tuple[str, ...], tmp_path: Path) -> None:
    """GIVEN no file WHEN any command needs it THEN it says so and how to make one."""
    said = failed(invoke(*command, "-c", tmp_path / "nowhere.yaml"))
    assert "nowhere.yaml" in said and "evermark init" in said


@pytest.mark.parametrize("command", READING)
def test_a_malformed_file_names_the_line(command: tuple[str, ...], file: Path) -> None:
    """GIVEN a file that is no YAML WHEN read THEN the error names the line."""
    file.write_text("version: 1\nname: [shop\n")
    assert "evermark.yaml, line" in failed(invoke(*command, "-c", file))


@pytest.mark.parametrize("command", READING)
def test_a_missing_variable_is_named(command: tuple[str, ...], file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a variable that is not set WHEN read THEN the error names it and the key that wants it."""
    monkeypatch.delenv("SHOP_DSN")
    said = failed(invoke(*command, "-c", file))
    assert "SHOP_DSN" in said and "sources.shop.dsn" in said


def test_up_without_sources_says_what_is_missing(file: Path) -> None:
    """GIVEN a file without sources WHEN started THEN it says so before anything is made."""
    file.write_text("version: 1\nname: shop\n")
    assert "sources" in failed(invoke("up", "-c", file))
    assert list(file.parent.iterdir()) == [file]


def test_the_file_may_be_named_by_a_variable(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN EVERMARK_CONFIG WHEN no -c is given THEN that file is meant."""
    monkeypatch.setenv("EVERMARK_CONFIG", str(file))
    assert invoke("source", "list").exit_code == 0


def test_sources_are_listed_without_their_secrets(file: Path) -> None:
    """GIVEN a source with a password WHEN listed as table and JSON THEN all but the password is told."""
    result = invoke("source", "list", "-c", file)
    (row,) = json.loads(invoke("source", "list", "-c", file, "--json").stdout)
    assert (row["source"], row["slot"]) == ("shop", "evermark_shop_shop")
    assert row["tables"] == ["public.orders", "public.users"]
    assert "evermark_shop_shop" in result.stdout and PASSWORD not in result.stdout


def test_install_print_needs_no_connection_and_prints_sql_only(file: Path) -> None:
    """GIVEN a database that is not there WHEN the SQL is asked for THEN it is on stdout, whole, in order."""
    result = invoke("source", "install", "--print", "--table", "items", "-t", "public.orders", "-c", file)
    assert (result.exit_code, result.stderr) == (0, "")
    text = result.stdout
    assert text.startswith("-- ") and PASSWORD not in text and "@" not in text
    landmarks = (
        'create schema if not exists "pgstream"',
        'create publication "evermark_shop_shop"',
        "pg_create_logical_replication_slot('evermark_shop_shop'",
        "\"pgstream\".watch('public.orders'::regclass",
        "\"pgstream\".watch('public.users'::regclass, '{password}'::text[]",
        "\"pgstream\".watch('public.items'::regclass",
        'to "evermark"',
    )
    places = [text.lower().find(landmark) for landmark in landmarks]
    assert -1 not in places and places == sorted(places), dict(zip(landmarks, places, strict=True))
    assert text.count(".watch('public.orders'") == 1


def test_install_print_names_the_role_that_is_asked_for(file: Path) -> None:
    """GIVEN a role, or none WHEN the SQL is printed THEN the grants are for it, or left out."""
    assert 'to "reader"' in invoke("source", "install", "--print", "--role", "reader", "-c", file).stdout
    assert "grant usage on schema" not in invoke("source", "install", "--print", "--no-role", "-c", file).stdout


def test_install_refuses_what_is_no_table(file: Path) -> None:
    """GIVEN a name that no table has WHEN it is to be captured THEN usage is wrong."""
    result = invoke("source", "install", "--print", "--table", "a.b.c", "-c", file)
    assert result.exit_code == 2 and "public.orders" in result.stderr


def test_a_source_is_named_when_there_are_several(file: Path) -> None:
    """GIVEN two sources WHEN none or an unknown one is named THEN the error lists them."""
    file.write_text(FILE + "  " + SOURCE.replace("shop:", "crm:", 1) + "\n")
    assert "crm, shop" in failed(invoke("source", "install", "--print", "-c", file))
    assert "crm, shop" in failed(invoke("source", "install", "nope", "--print", "-c", file))
    assert 'publication "evermark_shop_crm"' in invoke("source", "install", "crm", "--print", "-c", file).stdout


def test_install_is_for_postgres_only(file: Path) -> None:
    """GIVEN a source of one's own WHEN it is to be installed THEN it says that there is nothing to do."""
    file.write_text('version: 1\nname: shop\nsources: {mine: {type: "my.module:Mine"}}\n')
    assert "needs nothing installed" in failed(invoke("source", "install", "-c", file))


def test_a_fresh_secret_is_of_the_form_the_file_wants() -> None:
    """GIVEN nothing WHEN a secret is made twice THEN both are good ones, and differ."""
    from evermark.config.subscriptions import signing_secret
    from evermark.secrets import Secret

    first, second = (invoke("subscription", "secret").stdout.strip() for _ in range(2))
    assert first != second
    signing_secret(Secret(first))


def test_the_log_of_a_new_deployment_is_empty_and_nothing_is_made(file: Path) -> None:
    """GIVEN a deployment that never ran WHEN its log is asked about THEN there is none, and no folder appears."""
    assert json.loads(invoke("log", "info", "-c", file, "--json").stdout) == []
    assert list(file.parent.iterdir()) == [file]


def test_an_error_of_the_system_is_said_without_a_traceback(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """GIVEN a folder that may not be written WHEN a command meets it THEN it names it and ends with 1."""
    with pytest.raises(typer.Exit) as end, console.said_clearly():
        raise PermissionError(13, "Permission denied", "evermark-data")
    assert end.value.exit_code == 1
    assert capsys.readouterr().err == (
        "error: permission denied (evermark-data)\n"
        "hint: run it as a user who may, or change the owner or mode of that path\n"
    )


def test_an_argument_that_is_not_utf_8_is_a_wrong_use(capsys: Any) -> None:
    """GIVEN bytes that are no text WHEN a command cannot use them THEN it ends with 2; a bug of ours stays one."""
    with pytest.raises(typer.Exit) as end, console.said_clearly():
        os.fsdecode(b"mail\xff\xfe").encode()
    assert end.value.exit_code == 2
    assert capsys.readouterr().err.startswith("error: an argument or a variable is not UTF-8 text\nhint: ")
    with pytest.raises(UnicodeEncodeError), console.said_clearly():
        "\ud800".encode()


def test_a_terminal_that_lacks_a_character_is_told_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN output that is not UTF-8 WHEN a help with an ellipsis is asked for THEN it is shown, that one escaped."""
    told = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr("sys.stdout", told)
    with pytest.raises(SystemExit) as end:
        run(["subscription", "add", "--help"])
    assert end.value.code == 0
    told.flush()
    assert rb"whsec_\u2026" in told.buffer.getvalue()  # type: ignore[attr-defined]


def test_no_secret_and_no_control_character_reaches_the_terminal(capsys: Any) -> None:
    """GIVEN an error with a password and an escape sequence in it WHEN shown THEN neither is seen as such."""
    console.show_error(EvermarkError(f"{DSN}: \x1b[2Jgone", hint="password=hunter2 is wrong"))
    said = capsys.readouterr().err
    assert PASSWORD not in said and "hunter2" not in said and "\x1b" not in said and "\\x1b[2Jgone" in said


def test_tables_keep_a_row_on_a_line_and_brackets_as_they_are(capsys: Any) -> None:
    """GIVEN long and odd values WHEN shown into a pipe THEN a row is a line, and nothing is taken for markup."""
    console.show([{"a": "x" * 500, "b": "[bold]\n"}, {"a": None, "b": ["p", "q"]}], ("a", "b"))
    header, first, second = capsys.readouterr().out.splitlines()
    assert header.split() == ["a", "b"]
    assert first.split() == ["x" * 500, "[bold]\\n"]
    assert second.split() == ["-", "p,", "q"]


def test_nothing_is_done_without_a_yes(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a question WHEN nobody answers THEN it ends with an error that names --yes."""
    with pytest.raises(EvermarkError, match="not confirmed"), CliRunner().isolation(input=""):
        console.confirm("Sure?", yes=False)
    console.confirm("Sure?", yes=True)


def test_the_only_source_need_not_be_named() -> None:
    """GIVEN one, none or several sources WHEN none is named THEN only the single one is meant."""
    assert deployment.known_source(["shop"], None) == "shop"
    for names in ([], ["a", "b"]):
        with pytest.raises(ConfigError):
            deployment.known_source(names, None)
    with pytest.raises(NotFoundError):
        deployment.known_source(["shop"], "other")


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    context = typer.Context(group)
    for name in group.list_commands(context) if hasattr(group, "list_commands") else ():
        yield from commands(group.get_command(context, name), (*path, name))


def test_every_command_that_a_message_or_a_page_names_is_there() -> None:
    """GIVEN `evermark x y` in code, SQL or a page THEN there is such a command: no hint leads nowhere."""
    root = Path(__file__).resolve().parents[3]
    known = set(commands(typer.main.get_command(app)))
    groups = {path for path in known if any(other[:-1] == path for other in known if other)}
    files = [*(root / "src").rglob("*.py"), *(root / "src").rglob("*.sql"), *(root / "docs").glob("*.md")]
    named = {
        (file.name, found[1], found[2] or "")
        for file in [*files, root / "README.md"]
        for found in re.finditer(r"`(?:evermark) ([a-z]+)(?: ([a-z]+))?", file.read_text())
    }
    assert len(named) > 50
    assert [each for each in named if (each[1],) not in known] == []
    assert [each for each in named if each[2] and (each[1],) in groups and each[1:] not in known] == []
