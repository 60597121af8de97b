"""A replay as people and programs are shown it. Pure."""

from __future__ import annotations

from typing import Any

from evermark.delivery.replay.plan import Replay, Target, percent

_TOLD = ("subscription", "state", "delivered", "parked", "failures", "next_attempt_at")


def summary(replay: Replay) -> dict[str, Any]:
    """Its percentage is that of its slowest target."""
    request = replay.request
    over = replay.state in ("done", "cancelled", "failed")
    shares = [percent(replay, target) for target in replay.targets]
    return {
        "id": replay.id,
        "state": replay.state.value,
        "asked_by": request.asked_by.value,
        "source": request.source,
        "streams": list(request.streams) or None,
        "since": request.since,
        "until": request.until,
        "where": request.where,
        "subscription": request.subscription,
        "rate_per_s": request.rate_per_s or None,
        "percent": round(min(shares), 1) if shares else 100.0 if replay.state == "done" else 0.0,
        "delivered": sum(target.delivered for target in replay.targets),
        "parked": sum(target.parked for target in replay.targets),
        "asked_at": replay.created_at,
        "ended_at": replay.changed_at if over else None,
        "reason": replay.reason or None,
    }


def target_shown(replay: Replay, target: Target) -> dict[str, Any]:
    share, at = round(percent(replay, target), 1), min(target.mark.time, replay.request.until)
    told = {key: getattr(target, key) for key in _TOLD}
    return {**told, "percent": share, "at": at, "reason": target.reason or None}
