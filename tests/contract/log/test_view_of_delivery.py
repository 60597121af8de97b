"""The files that delivery reads: the log of a source as it is now, which has to reach what State knows of it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from evermark.app.delivering import DeploymentLog
from evermark.delivery.model import SourcePartition
from evermark.errors import FormatError, NotFoundError
from evermark.log.append import DeltaLog
from evermark.log.head import Head
from evermark.log.table import commit_file
from tests.contract.log.log_scene import fill


def view_of(folder: Path, heads: dict[int, int]) -> DeploymentLog:
    """As State has them now: the last batch by partition."""
    stores: Any = SimpleNamespace(
        sources=["shop"],
        log_folder=lambda _: folder,
        heads=SimpleNamespace(load_all=lambda: {("shop", p): Head(batch, 1, "p", 1) for p, batch in heads.items()}),
    )
    return DeploymentLog(stores)


@pytest.mark.parametrize("is_open", [True, False], ids=["under a reader", "at a start"])
def test_a_log_that_does_not_reach_its_head_is_not_read(tmp_path: Path, *, is_open: bool) -> None:
    """GIVEN two partitions WHEN the newest commit of one is gone THEN no files are given, for a reader would pass over
    its batch; WHEN it is back they are, and what comes then is, too."""
    folder, heads = tmp_path / "shop", {0: 3, 1: 2}
    log = DeltaLog(folder)
    fill(log, 2, partition=1)
    fill(log, 3)
    view = view_of(folder, heads)
    view.heads()
    if is_open:
        assert len(view.files("shop")) == 5
    newest = commit_file(folder, 5)
    newest.rename(tmp_path / "aside")
    for _ in range(2):
        view.heads()
        with pytest.raises(FormatError, match="the log of shop/0 ends at batch 2, but batch 3 was taken"):
            view.files("shop")
    (tmp_path / "aside").rename(newest)
    assert len(view.files("shop")) == 5
    fill(log, 4, first=4)
    heads[0] = 4
    assert view.heads()[SourcePartition("shop", 0)][0] == 4
    assert len(view.files("shop")) == 6


def test_a_log_that_is_gone_is_told_from_one_that_never_was(tmp_path: Path) -> None:
    """GIVEN no log WHEN its files are asked for THEN there is none; WHEN State knows a batch of it THEN it is gone, and
    the folder is named."""
    heads: dict[int, int] = {}
    view = view_of(tmp_path / "shop", heads)
    view.heads()
    with pytest.raises(NotFoundError):
        view.files("shop")
    heads[0] = 7
    view.heads()
    with pytest.raises(FormatError, match="is gone: batch 7 was in it") as raised:
        view.files("shop")
    assert str(tmp_path / "shop") in raised.value.message
