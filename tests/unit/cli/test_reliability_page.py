"""docs/reliability.md: a reader of the first design finds each of its sections, with a command that is there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer

from evermark.cli.main import app
from evermark.observe.metrics import Metrics

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "reliability.md").read_text()
SECTIONS = {
    2: "Guarantees",
    3: "Resume tokens, checkpoint storage, frequency",
    4: "Recovery, gap detection, gap recovery",
    5: "Deduplication",
    6: "Partition handoff",
    7: "Health, lag",
    8: "Circuit breaker",
    9: "Graceful shutdown",
    10: "Disaster recovery",
    11: "Metrics",
    12: "Configuration",
    13: "Testing",
}
COMMAND = re.compile(r"^(evermark [a-z][^#\n]*)", re.MULTILINE)
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
PROBES = {"/health", "/metrics", "/readyz", "/livez"}


def rows() -> dict[int, tuple[str, str, str]]:
    """Of the page's table: the section's name, where it stands, and what shows it."""
    found = re.findall(r"^\| (\d+) ([^|]*) \| \[\d+\]\(#([a-z0-9-]+)\) \| (.*) \|$", PAGE, re.MULTILINE)
    return {int(number): (name.strip(), anchor, shown) for number, name, anchor, shown in found}


def anchors() -> set[str]:
    headings = re.findall(r"^## (.*)$", PAGE, re.MULTILINE)
    return {re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def unknown_part(line: str) -> str | None:
    """The first word of a command line that is no command, or no option of it; None: all are there."""
    command: Any = typer.main.get_command(app)
    words = line.split()[1:]
    while words and hasattr(command, "get_command"):
        word = words.pop(0)
        if word not in command.list_commands(None):
            return word
        command = command.get_command(None, word)
    options = {name for param in command.params for name in (*param.opts, *param.secondary_opts)}
    return next((word for word in words if word.startswith("-") and word not in options), None)


def test_s13_each_section_of_the_design_is_there() -> None:
    """GIVEN the design's numbered sections WHEN the page is read THEN each has its row, which leads to a heading."""
    assert {number: name for number, (name, _, _) in rows().items()} == SECTIONS
    assert {anchor for _, anchor, _ in rows().values()} <= anchors()


@pytest.mark.parametrize("number", SECTIONS)
def test_s13_each_section_has_a_command_that_exists(number: int) -> None:
    """GIVEN a section WHEN its row says what shows it THEN that is a command, a target or an address that is there."""
    shown = re.findall(r"`([^`]+)`", rows()[number][2])
    said = [text for text in shown if text.startswith(("evermark ", "make ", "curl "))]
    assert said, f"section {number} names no command"
    for text in said:
        if text.startswith("make "):
            assert text.split()[1] in TARGETS
        elif text.startswith("curl "):
            assert "/" + text.rpartition("/")[2] in PROBES
        else:
            assert unknown_part(text) is None, text


def test_s13_every_command_and_metric_of_the_page_exists() -> None:
    """GIVEN all commands and metrics that the page names WHEN they are looked for THEN each is there."""
    inline = re.findall(r"`(evermark [a-z][^`…]*)`", PAGE)
    blocks = COMMAND.findall(PAGE)
    assert blocks
    assert {line: part for line in (*inline, *blocks) if (part := unknown_part(line.strip()))} == {}
    metrics = list(Metrics().registry.collect())
    known = {metric.name for metric in metrics} | {f"{metric.name}_total" for metric in metrics}
    named = set(re.findall(r"`(evermark_[a-z_]+)", PAGE))
    assert named - known == set()


def test_a_command_that_is_not_there_is_found_out() -> None:
    """GIVEN a made-up command, or option WHEN it is looked for THEN it is named."""
    assert unknown_part("evermark checkpoint forget shop") == "forget"
    assert unknown_part("evermark checkpoint reset shop --to now") == "--to"
