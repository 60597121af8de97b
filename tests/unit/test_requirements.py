"""docs/requirements.md is the key to requirement codes in tests: complete, and every test it names exists."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from tests.syntax import nodes_of, tree_of

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "requirements.md"
CONTRACTS = ROOT / "src" / "evermark" / "testing" / "contracts"
LAST = {"B": 16, "D": 16, "S": 13, "P": 13, "R": 14, "X": 7}
TESTS_MAX = 5
NOT_BUILT = "not built yet"

_LINE = re.compile(r"^- \*\*([A-Z]\d+)\*\* (.*)$")
_TEST = re.compile(r"^  - `(tests/[\w/.]+\.py)::([\w:]+)`$")
_IN_NAME = re.compile(r"_([bdsprx]\d{1,2})(?=_)")
_IN_DOCSTRING = re.compile(r"\b[BDSPRX]\d{1,2}\b")


@dataclass
class Requirement:
    text: str
    tests: list[tuple[str, str]] = field(default_factory=list)


@dataclass(frozen=True)
class Suite:
    """The classes of one file by name: what each inherits from, and the tests it has itself."""

    bases: dict[str, list[str]]
    tests: dict[str, set[str]]


def requirements(text: str) -> dict[str, Requirement]:
    found: dict[str, Requirement] = {}
    for line in text.splitlines():
        if begun := _LINE.match(line):
            code, said = begun.groups()
            assert code not in found, f"{code} stands there twice"
            found[code] = Requirement(said)
        elif named := _TEST.match(line):
            list(found.values())[-1].tests.append((named[1], named[2]))
        elif line.startswith("  ") and found:
            list(found.values())[-1].text += " " + line.strip()
    return found


def functions(body: list[ast.stmt]) -> set[str]:
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return {node.name for node in body if isinstance(node, kinds) and node.name.startswith("test_")}


def suite(path: Path) -> Suite:
    """The tests outside of classes are those of the class with no name."""
    tree = tree_of(path.read_text())
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    bases = {node.name: [ast.unparse(base).rpartition(".")[2] for base in node.bases] for node in classes}
    return Suite(bases, {"": functions(tree.body)} | {node.name: functions(node.body) for node in classes})


@cache
def contracts() -> Suite:
    found = [suite(path) for path in sorted(CONTRACTS.glob("*.py"))]
    return Suite(
        {name: bases for one in found for name, bases in one.bases.items()},
        {name: tests for one in found for name, tests in one.tests.items() if name},
    )


def has(path: Path, test: str) -> bool:
    """Whether the file has `test_name` or `TestClass::test_name`, its own or inherited from a contract suite."""
    if not path.exists():
        return False
    owner, _, name = test.rpartition("::")
    here = suite(path)
    wanted, seen = [owner], set[str]()
    while wanted:
        looked = wanted.pop()
        seen.add(looked)
        if name in here.tests.get(looked, set()) | contracts().tests.get(looked, set()):
            return True
        wanted += set(here.bases.get(looked, []) + contracts().bases.get(looked, [])) - seen
    return False


def codes_in_tests() -> Iterator[tuple[str, str]]:
    """Where a code is named, and the code."""
    files = [*sorted((ROOT / "tests").rglob("test_*.py")), *sorted(CONTRACTS.glob("*.py"))]
    for path in files:
        for node in nodes_of(path.read_text()):
            if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            name = getattr(node, "name", "")
            where = f"{path.relative_to(ROOT)}::{name}"
            if name.startswith("test_"):
                for code in _IN_NAME.findall(name):
                    yield where, code.upper()
            for code in _IN_DOCSTRING.findall(ast.get_docstring(node) or ""):
                yield where, code


def test_every_code_has_its_line() -> None:
    """GIVEN the page THEN its codes are complete, letter by letter, in order."""
    wanted = [f"{letter}{number}" for letter, last in LAST.items() for number in range(1, last + 1)]
    assert list(requirements(PAGE.read_text())) == wanted


def test_every_requirement_names_tests_that_exist_or_says_that_it_is_not_built() -> None:
    """GIVEN the page THEN each line has one to five tests that are there, or says `not built yet`."""
    wrong = []
    for code, requirement in requirements(PAGE.read_text()).items():
        if len(requirement.tests) > TESTS_MAX:
            wrong.append(f"{code} names {len(requirement.tests)} tests: name the {TESTS_MAX} strongest")
        if not requirement.tests and NOT_BUILT not in requirement.text.lower():
            wrong.append(f"{code} names no test and does not say `{NOT_BUILT}`")
        wrong += [
            f"{code}: there is no {path}::{test}" for path, test in requirement.tests if not has(ROOT / path, test)
        ]
    assert not wrong, "\n".join(wrong)


def test_every_code_that_a_test_names_has_a_line() -> None:
    """GIVEN codes in names and docstrings of tests THEN the page has each of them."""
    known = requirements(PAGE.read_text())
    named = list(codes_in_tests())
    assert len(named) > 100
    unknown = [f"{where}: {code}" for where, code in named if code not in known]
    assert not unknown, "\n".join(unknown)


def test_a_test_that_is_not_there_is_noticed() -> None:
    """GIVEN names that are almost right THEN none of them is found, and inherited ones are."""
    store = ROOT / "tests/contract/state/test_checkpoints.py"
    assert has(store, "TestPostgresCheckpoints::test_saves_go_forward")
    assert not has(store, "TestPostgresCheckpoints::test_saves_go_backward")
    assert not has(store, "test_saves_go_forward")
    assert not has(store.with_name("test_nothing.py"), "test_saves_go_forward")
