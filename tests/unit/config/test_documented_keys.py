"""What README, docs and the starter file say of evermark.yaml is what the program reads."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from evermark.cli.init import starter
from evermark.config import load
from evermark.config.subscription_requests import _FIELDS
from tests.unit.cli.test_init import switched_on
from tests.unit.config.config_file import WHSEC, every_model

ROOT = Path(__file__).resolve().parents[3]
# What a program or a person uses; not how it came to be (progress, findings, decisions) and not another program's.
PAGES = [ROOT / "README.md", ROOT / "receiver" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [page for page in PAGES if page.name not in ("progress.md", "findings.md", "simulator.md", "bench.md")]
KNOWN = {key for model in every_model() for key in model.keys()}  # noqa: SIM118 - keys() is ours, not a dict's
# Written like a key and a value, and something else: what a program says, JSON, headers.
NO_KEYS = {"failover", "duplicate", "webhook-delivery", "sealed", "hint", "error"}
# How keys are called inside: in no page but the one on formats.
INSIDE = {field for key, field in _FIELDS.items() if key != "from"} | {"max_attempts"}
_FENCE = re.compile(r"^ *```yaml\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
_INLINE = re.compile(r"`([a-z_-]+): [^`]+`")


def blocks() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        for number, found in enumerate(_FENCE.findall(page.read_text())):
            yield f"{page.name} {number}", textwrap.dedent(found)
    yield "the starter file", switched_on(starter("shop"))


@pytest.mark.parametrize(("where", "text"), [*blocks()], ids=lambda value: value if len(value) < 40 else "")
def test_every_example_of_the_file_can_be_loaded(where: str, text: str, tmp_path: Path) -> None:
    """GIVEN YAML that we show THEN it loads, with what is left out of it: no key in it is unknown."""
    shown = yaml.safe_load(text)
    values = {"version": 1, "name": "shop", **shown}
    path = tmp_path / "evermark.yaml"
    path.write_text(yaml.safe_dump(values))
    names = set(re.findall(r"\$\{(\w+)\}", text))
    values_of = {"DSN": "postgresql://db/shop", "URL": "mongodb://db:27017/", "SECRET": WHSEC, "KEY": "k" * 43}
    environ = {
        name: values_of.get(name.rpartition("_")[2], f"{name} is a long value".replace(" ", "-")) for name in names
    }
    assert set(load(path, environ).model_fields_set) >= set(shown), where


def test_every_key_that_a_page_names_is_one_that_the_program_knows() -> None:
    """GIVEN `key: value` in a sentence of a page THEN the key is one of the file's."""
    named = [(page.name, key) for page in PAGES for key in _INLINE.findall(page.read_text())]
    assert [found for found in named if found[1] not in KNOWN | NO_KEYS] == []
    assert len(named) > 20


def test_no_page_names_a_key_as_it_is_called_inside() -> None:
    """GIVEN the names of keys within the program (`parked_max` for `parked_limit`) THEN no page uses them."""
    pages = [page for page in PAGES if page.name != "formats.md" and page.parent.name != "receiver"]
    named = [(page.name, word) for page in pages for word in re.findall(r"`(\w+)`", page.read_text())]
    assert [found for found in named if found[1] in INSIDE] == []
