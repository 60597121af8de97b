"""What the contracts of delivery's stores begin with: an empty store, and somebody who owns it."""

from __future__ import annotations

from typing import Any

import pytest

from evermark.testing.contracts.scene import TakeOver


class OwnedStore:
    @pytest.fixture
    def store(self) -> Any:
        raise NotImplementedError("override this fixture with a store that is empty")

    @pytest.fixture
    def take_over(self) -> TakeOver:
        raise NotImplementedError("override this fixture: make somebody else the owner and return the new epoch")

    @pytest.fixture
    def epoch(self, take_over: TakeOver) -> int:
        return take_over()
