"""How long deliveries wait, where nobody says otherwise, and how much may be kept of what waits."""

from __future__ import annotations

from datetime import timedelta

# How long a refused event waits before each retry, where its subscription does not say otherwise.
RETRY_WAITS_S: tuple[float, ...] = (5, 300, 1_800, 7_200, 18_000, 36_000, 36_000)

CLAIM_MAX = 10_000  # rows that one call may return
REPLAY_RATE_MAX = 1_000_000.0  # requests a second
SECRETS_MAX = 8  # of one subscription, while they are rotated

SESSION_CHARS_MAX = 200
KEY_CHARS_MAX = 8192
KEYS_AT_ONCE_MAX = 100
KEYS_MAX = 100_000  # of one device
# Events of one stream of a bot that may wait for their session keys, and as many that were refused or stand behind
# refused ones; beyond it the oldest expire. Once the keys came, as many events of a stream may be on their way out
# without counting for `parked_max`.
WAITING_MAX = 100_000
RELEASED_MAX = 10_000  # events that one transaction makes due, or has wait again
# A bot is asked again for a session key that is missing: at first after this long, then more and more seldom.
KEY_ASKED_EVERY = timedelta(seconds=5)
KEY_ASKED_EVERY_MAX = timedelta(minutes=5)
