"""The style of this repository, as a test. Each finding names the file, the rule, and what to do instead."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.syntax import dotted, nodes_of, tree_of

ROOT = Path(__file__).resolve().parents[2]
CODE = ("src", "receiver", "bench", "tests", "scripts")
TEXT_SUFFIXES = {".py", ".sql", ".md", ".toml", ".yaml", ".yml", ".txt", ".sh", ".cfg", ".html"}
SKIPPED_FOLDERS = re.compile(
    r"(^|/)(\.venv[^/]*|\.git|[^/]*cache[^/]*|[^/]*\.egg-info|build|dist|artifacts|\.demo)(/|$)"
)

FUNCTION_LINES_MAX = 70
VAGUE_NAMES = {"utils", "util", "common", "helpers", "helper", "types", "misc", "stuff", "shared"}

# Ideas that have a word already: the word not to use in a name, the one to use, and where the former is at home.
WORDS = {
    "offset": ("position (or `at` for a place in bytes)", ("src/evermark/spark/", "src/pyspark_evermark/")),
    "topic": ("stream", ()),
    "consumer": ("receiver, subscription or follower", ()),
    "dlq": ("parked, or dead", ()),
    "deadletter": ("parked, or dead", ()),
    "watermark": ("checkpoint, cursor or head", ("src/evermark/spark/", "src/pyspark_evermark/")),
    "bookmark": ("checkpoint or cursor", ()),
}


@dataclass(frozen=True)
class File:
    """A file as the rules see it: its path within the repository, its text, and the nodes of its syntax, if Python."""

    path: str
    text: str

    @property
    def nodes(self) -> tuple[ast.AST, ...]:
        return nodes_of(self.text)

    @property
    def python(self) -> bool:
        return self.path.endswith(".py")

    @property
    def test(self) -> bool:
        return self.path.startswith("tests/") and Path(self.path).name.startswith("test_")

    def within(self, *folders: str) -> bool:
        return self.path.startswith(folders)


Finding = tuple[int, str]
Rule = Callable[[File], Iterator[Finding]]


def functions(file: File) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in file.nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def calls(file: File) -> Iterator[tuple[ast.Call, str]]:
    for node in file.nodes:
        if isinstance(node, ast.Call):
            yield node, dotted(node.func)


def function_length(file: File) -> Iterator[Finding]:
    for node in functions(file):
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if lines > FUNCTION_LINES_MAX:
            yield node.lineno, f"{node.name} has {lines} lines, at most {FUNCTION_LINES_MAX}: name its parts"


def vague_module_name(file: File) -> Iterator[Finding]:
    for part in Path(file.path).with_suffix("").parts:
        if part.lower().strip("_") in VAGUE_NAMES:
            yield 1, f"{part!r} says nothing: name the module after the noun it is about"


def print_outside_terminal_code(file: File) -> Iterator[Finding]:
    if file.within("src/evermark/cli/", "src/evermark/testing/", "bench/", "tests/", "scripts/"):
        return
    for node, name in calls(file):
        if name == "print":
            yield node.lineno, "print: log it with structlog, or write to a stream that was passed in"


def bare_except(file: File) -> Iterator[Finding]:
    for node in file.nodes:
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            yield node.lineno, "bare except: name the errors, or `except Exception` with a reason"


def sleep_in_test(file: File) -> Iterator[Finding]:
    if not file.within("tests/"):
        return
    for node, name in calls(file):
        if name in {"time.sleep", "sleep"}:
            yield node.lineno, "a sleep in a test: await the condition with evermark.testing.until"


def unfinished(file: File) -> Iterator[Finding]:
    marks = re.compile(r"\b(" + "|".join(["TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK"]) + r")\b")
    for number, line in enumerate(file.text.splitlines(), 1):
        if found := marks.search(line):
            yield number, f"{found.group()}: do it now, or write an issue"


def machine_or_registry(file: File) -> Iterator[Finding]:
    # Written in pieces, so that this file passes its own rule.
    places = [
        r"(?<![\w.])/" + r"(?:work|root|home/\w+|Users/\w+)/",
        r"(?<![\w.])/" + r"tmp/\w",
        r"pypi\." + r"org|python" + r"hosted\.org|--(?:extra-)?index" + r"-url|find" + r"-links",
    ]
    pattern = re.compile("|".join(places))
    for number, line in enumerate(file.text.splitlines(), 1):
        if found := pattern.search(line):
            yield number, f"{found.group()!r} is of one machine or registry: take it from an argument or a setting"


def pyspark_outside_spark(file: File) -> Iterator[Finding]:
    if file.within("src/evermark/spark/", "src/pyspark_evermark/", "bench/", "scripts/"):
        return
    if file.within("tests/") and not file.within("tests/unit/", "tests/simulation/"):
        return
    for node in _without_type_checking(tree_of(file.text)):
        match node:
            case ast.Import():
                names = [alias.name for alias in node.names]
            case ast.ImportFrom():
                names = [node.module or ""]
            case _:
                continue
        if any(name.split(".")[0] in {"pyspark", "py4j"} for name in names):
            yield node.lineno, "imports pyspark: only evermark.spark and pyspark_evermark do; pass plain values"


def _without_type_checking(tree: ast.Module) -> Iterator[ast.AST]:
    """What is imported for annotations alone is not imported."""
    for node in tree.body:
        if not (isinstance(node, ast.If) and dotted(node.test) == "TYPE_CHECKING"):
            yield from ast.walk(node)


def undocumented_test(file: File) -> Iterator[Finding]:
    if not file.test:
        return
    for node in functions(file):
        if node.name.startswith("test_") and not ast.get_docstring(node):
            yield node.lineno, f"{node.name} has no docstring: say in one line what it guarantees"


def skip_without_reason(file: File) -> Iterator[Finding]:
    if not file.within("tests/"):
        return
    for node in file.nodes:
        if isinstance(node, ast.Attribute) and dotted(node) in {"pytest.mark.skip", "pytest.mark.skipif"}:
            call = next((c for c, name in calls(file) if c.func is node), None)
            if call is None or not any(keyword.arg == "reason" for keyword in call.keywords):
                yield node.lineno, "a skip without a reason: say why, or delete the test"
        elif isinstance(node, ast.Call) and dotted(node.func) == "pytest.skip" and not (node.args or node.keywords):
            yield node.lineno, "a skip without a reason: say why, or delete the test"


def defined_names(file: File) -> Iterator[tuple[int, str]]:
    for node in file.nodes:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.lineno, node.name
            case ast.arg():
                yield node.lineno, node.arg
            case ast.Name(ctx=ast.Store()):
                yield node.lineno, node.id


def second_word(file: File) -> Iterator[Finding]:
    if not file.within("src/", "receiver/"):
        return
    for line, name in defined_names(file):
        parts = re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)
        words = {part.lower() for part in parts} | {name.lower().replace("_", "")}
        for word in sorted(words & WORDS.keys()):
            instead, home = WORDS[word]
            if not (home and file.within(*home)):
                yield line, f"{name}: our word for {word!r} is {instead}"


def kind_asked_for(file: File) -> Iterator[Finding]:
    """Which kind a source is of is the business of the kind's folder: elsewhere a question to `SourceKind` does it."""
    if not file.within("src/") or file.within("src/evermark/sources/", "src/evermark/testing/"):
        return
    for node in file.nodes:
        asked: list[ast.expr] = []
        if isinstance(node, ast.Call) and dotted(node.func) in {"isinstance", "issubclass"}:
            asked = node.args[1:]
        elif isinstance(node, ast.MatchClass):
            asked = [node.cls]
        elif isinstance(node, ast.Compare) and ast.unparse(node.left).startswith("type("):
            asked = node.comparators
        for name in (ast.unparse(each) for each in asked):
            if re.search(r"\w+Settings\b|\bCustomSource\b", name):
                yield node.lineno, f"{name}: give `SourceKind` or `SourceConfig` a method that answers it"


PYTHON_RULES: list[Rule] = [
    kind_asked_for,
    function_length,
    vague_module_name,
    print_outside_terminal_code,
    bare_except,
    sleep_in_test,
    pyspark_outside_spark,
    undocumented_test,
    skip_without_reason,
    second_word,
]
TEXT_RULES: list[Rule] = [unfinished, machine_or_registry]


@cache
def repository() -> list[File]:
    found: list[File] = []
    for path in sorted(ROOT.rglob("*")):
        name = path.relative_to(ROOT).as_posix()
        if SKIPPED_FOLDERS.search(name) or not path.is_file():
            continue
        if path.suffix in TEXT_SUFFIXES or path.name == "Makefile" or name.startswith(".ci/"):
            found.append(File(name, path.read_text(encoding="utf-8")))
    return found


def findings(rule: Rule, files: list[File]) -> list[str]:
    return [f"{file.path}:{line}: {said}" for file in files for line, said in rule(file)]


@pytest.mark.parametrize("rule", PYTHON_RULES, ids=lambda rule: rule.__name__)
def test_code_keeps_the_rule(rule: Rule) -> None:
    """Every Python file of the repository keeps the rule."""
    files = [file for file in repository() if file.python and file.within(*CODE)]
    found = findings(rule, files)
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize("rule", TEXT_RULES, ids=lambda rule: rule.__name__)
def test_text_keeps_the_rule(rule: Rule) -> None:
    """Every text file of the repository keeps the rule."""
    found = findings(rule, repository())
    assert not found, "\n" + "\n".join(found)


BAD: list[tuple[Rule, str, str]] = [
    (function_length, "src/evermark/a.py", "def f():\n" + "    x = 1\n" * 70),
    (vague_module_name, "src/evermark/log/utils.py", ""),
    (print_outside_terminal_code, "src/evermark/log/a.py", "print(1)"),
    (bare_except, "src/evermark/a.py", "try:\n    x = 1\nexcept:\n    raise"),
    (sleep_in_test, "tests/faults/test_a.py", "import time\ntime.sleep(1)"),
    (pyspark_outside_spark, "src/evermark/log/a.py", "def f():\n    from pyspark.sql import functions"),
    (pyspark_outside_spark, "tests/unit/test_a.py", "import pyspark"),
    (undocumented_test, "tests/unit/test_a.py", "def test_a():\n    assert 1"),
    (skip_without_reason, "tests/unit/test_a.py", "@pytest.mark.skip\ndef test_a(): ..."),
    (skip_without_reason, "tests/unit/test_a.py", "@pytest.mark.skipif(True)\ndef test_a(): ..."),
    (second_word, "src/evermark/log/a.py", "def f(start_offset): ..."),
    (second_word, "src/evermark/delivery/a.py", "class DeadLetter: ..."),
    (kind_asked_for, "src/evermark/app/a.py", "if isinstance(settings, PostgresSettings): ..."),
    (kind_asked_for, "src/evermark/cli/a.py", "isinstance(s, mongo.MongoSettings | CustomSource)"),
    (kind_asked_for, "src/evermark/config/a.py", "match s:\n    case BlocksSettings(): ..."),
    (kind_asked_for, "src/evermark/spark/a.py", "x = type(s) is BlocksSettings"),
    (unfinished, "docs/a.md", "TO" + "DO: write this"),
    (machine_or_registry, "Makefile", "pip install --index" + "-url x"),
    (machine_or_registry, "docs/a.md", "see /" + "root/x"),
]


@pytest.mark.parametrize(("rule", "path", "text"), BAD, ids=lambda value: getattr(value, "__name__", ""))
def test_rule_finds_what_breaks_it(rule: Rule, path: str, text: str) -> None:
    """A rule that finds nothing in a file made to break it guards nothing."""
    assert findings(rule, [File(path, text)])


GOOD: list[tuple[Rule, str, str]] = [
    (kind_asked_for, "src/evermark/sources/kinds.py", "isinstance(settings, BlocksSettings)"),
    (kind_asked_for, "src/evermark/app/a.py", "kind_of(settings, name).make(settings, context)"),
    (second_word, "src/evermark/spark/a.py", "def f(start_offset): ..."),
    (skip_without_reason, "tests/unit/test_a.py", "@pytest.mark.skipif(True, reason='no x')\ndef test_a(): ..."),
    (pyspark_outside_spark, "src/evermark/spark/a.py", "import pyspark"),
    (pyspark_outside_spark, "src/evermark/log/a.py", "if TYPE_CHECKING:\n    from pyspark.sql import SparkSession"),
    (print_outside_terminal_code, "src/evermark/cli/a.py", "print(1)"),
]


@pytest.mark.parametrize(("rule", "path", "text"), GOOD, ids=lambda value: getattr(value, "__name__", ""))
def test_rule_lets_pass_what_keeps_it(rule: Rule, path: str, text: str) -> None:
    """A rule that cries at good code teaches people to ignore it."""
    assert not findings(rule, [File(path, text)])


@pytest.mark.parametrize("module", ["evermark", "evermark.app.run"])
def test_importing_loads_no_spark(module: str) -> None:
    """`import evermark` is light; and `up` starts Spark's JVM the sooner the less it has loaded before."""
    heavy = ("pyspark", "py4j", "pandas")
    code = f"import {module}, sys; print([name for name in {heavy!r} if name in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
