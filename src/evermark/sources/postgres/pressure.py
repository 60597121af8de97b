"""How much WAL the server keeps for us, and when that is too much. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from evermark.sources.base import Warned

SAFE_SHARE_MIN = 0.2
_GIB = 1024**3
_HINT = "docs/playbook.md, `The disk fills with WAL`; see `evermark doctor`"


def warned(gauges: Mapping[str, float]) -> dict[str, Warned]:
    """What is to be warned of, by the gauge that says so."""
    found: dict[str, str] = {}
    retained, limit = gauges.get("wal_retained_bytes"), gauges.get("wal_retained_limit_bytes")
    if retained is not None and limit is not None and retained > limit:
        found["wal_retained_bytes"] = (
            f"the server keeps {retained / _GIB:.1f} GiB of WAL for us, more than the {limit / _GIB:.1f} GiB of"
            " `wal_retained_warn`"
        )
    safe = gauges.get("wal_safe_bytes")
    allowed = None if safe is None else safe + (retained or 0.0)
    if safe is not None and allowed is not None and safe < SAFE_SHARE_MIN * allowed:
        found["wal_safe_bytes"] = (
            f"{max(0.0, safe) / _GIB:.2f} GiB of WAL more, and the server may throw our slot away"
            f" (max_slot_wal_keep_size allows {allowed / _GIB:.2f} GiB)"
        )
    return {name: Warned(said, _HINT) for name, said in found.items()}
