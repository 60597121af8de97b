"""Contract suites: one per port, run over every backend. Subclass one, override its fixtures, and pytest does the rest.

class TestMyCheckpoints(CheckpointContract):
    @pytest.fixture
    def store(self): return MyCheckpoints(...)
"""

from __future__ import annotations

from evermark.testing.contracts.bots import BotContract
from evermark.testing.contracts.checkpoints import CheckpointContract
from evermark.testing.contracts.copies import CopyContract
from evermark.testing.contracts.delivery import DeliveryContract
from evermark.testing.contracts.heads import HeadContract
from evermark.testing.contracts.leases import LeaseContract
from evermark.testing.contracts.log import LogContract
from evermark.testing.contracts.parked import ParkedContract
from evermark.testing.contracts.progress import ProgressContract
from evermark.testing.contracts.recoveries import RecoveryContract
from evermark.testing.contracts.registration import RegistrationContract
from evermark.testing.contracts.replays import ReplayContract
from evermark.testing.contracts.runtime import RuntimeContract
from evermark.testing.contracts.sessions import SessionContract
from evermark.testing.contracts.shards import ShardContract
from evermark.testing.contracts.source import SourceContract
from evermark.testing.contracts.storage import StorageContract

__all__ = [
    "BotContract",
    "CheckpointContract",
    "CopyContract",
    "DeliveryContract",
    "HeadContract",
    "LeaseContract",
    "LogContract",
    "ParkedContract",
    "ProgressContract",
    "RecoveryContract",
    "RegistrationContract",
    "ReplayContract",
    "RuntimeContract",
    "SessionContract",
    "ShardContract",
    "SourceContract",
    "StorageContract",
]
