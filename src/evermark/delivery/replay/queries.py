"""The SQL of the replay store.

Locks are taken in the order of `store.queries`: the lease, subscriptions, then replays, their targets, parked rows,
counters.
"""

from __future__ import annotations

REGISTER = """
insert into replays (id, asked_by, control_event_id, source, asked_partition, asked_batch, streams, since, until,
                     asked_since, asked_until, where_sql, subscription, rate_per_s, cleared)
values (%(id)s, %(asked_by)s, %(control_event_id)s, %(source)s, %(asked_partition)s, %(asked_batch)s, %(streams)s,
        %(since)s, %(until)s, %(asked_since)s, %(asked_until)s, %(where_sql)s, %(subscription)s, %(rate_per_s)s,
        %(cleared)s)
on conflict (control_event_id) do nothing
"""

# The request, the control event that asked, the replay itself.
_REPLAY = """r.id, r.nth, r.asked_by, r.source, r.since, r.until, r.streams, r.where_sql, r.subscription, r.rate_per_s,
       r.asked_since, r.asked_until, r.control_event_id, r.asked_partition, r.asked_batch,
       r.state, r.reason, r.heads, r.log_rows, r.created_at, r.changed_at"""
_TARGET = """t.replay, t.subscription, t.generation, t.state, t.at_time, t.at_id, t.reason, t.slice_rows, t.passed_rows,
       t.delivered, t.parked, t.failures, t.next_attempt_at, t.stuck_since"""

OPEN = f"select {_REPLAY} from replays r where r.state in ('waiting', 'running') order by r.nth"
NEWEST = f"select {_REPLAY} from replays r order by r.nth desc limit %s"
ONE = f"select {_REPLAY} from replays r where r.id = %s"
TARGETS = f"select {_TARGET} from replay_targets t where t.replay = any(%s) order by t.replay, t.subscription"
OPEN_SOURCES = "select distinct source from replays where state in ('waiting', 'running')"

STATE_LOCKED = "select state from replays where id = %s for update"
START = """
update replays
set state = 'running', reason = '', heads = %(heads)s, log_rows = %(log_rows)s, changed_at = clock_timestamp()
where id = %(id)s
"""
NOTE_WAITING = "update replays set reason = %s where id = %s and state = 'waiting'"
ADD_TARGET = """
insert into replay_targets (replay, subscription, generation, at_time, slice_rows)
values (%(replay)s, %(subscription)s, %(generation)s, %(at_time)s, %(slice_rows)s)
"""
END = "update replays set state = %s, reason = %s, changed_at = clock_timestamp() where id = %s"
END_TARGETS = """
update replay_targets set state = 'cancelled', reason = %s, next_attempt_at = null, changed_at = clock_timestamp()
where replay = %s and state = 'running' and (%s::text is null or subscription = %s)
"""
FINISH = """
update replays r set state = 'done', changed_at = clock_timestamp()
where r.id = %s and r.state = 'running'
  and not exists (select from replay_targets t where t.replay = r.id and t.state = 'running')
"""

TARGET_LOCKED = f"""
select {_TARGET} from replay_targets t join replays r on r.id = t.replay
where t.replay = %s and t.subscription = %s and r.state = 'running' for update of t
"""
SET_TARGET = """
update replay_targets
set state = %(state)s, reason = %(reason)s, at_time = %(at_time)s, at_id = %(at_id)s, slice_rows = %(slice_rows)s,
    passed_rows = %(passed_rows)s, delivered = %(delivered)s, parked = %(parked)s, failures = %(failures)s,
    next_attempt_at = %(next_attempt_at)s, stuck_since = %(stuck_since)s, changed_at = clock_timestamp()
where replay = %(replay)s and subscription = %(subscription)s
"""

STUCK = """
update replay_targets set stuck_since = %s, changed_at = clock_timestamp()
where replay = %s and subscription = %s and state = 'running' and stuck_since is null
"""

PARKED_OF_REPLAYS = "select count(*) from enqueued_messages where subscription = %s and replay_id <> ''"
DROP_PARKED = """
with gone as (delete from enqueued_messages where replay_id = %s returning subscription)
select subscription, count(*) from gone group by subscription
"""

# A later request for the same window keeps the source's record until it is over, too.
UNCLEARED = f"""
select {_REPLAY} from replays r
where not r.cleared and r.state not in ('waiting', 'running')
  and not exists (
      select from replays o
      where o.state in ('waiting', 'running') and o.source = r.source and o.streams = r.streams
        and o.asked_since is not distinct from r.asked_since and o.asked_until is not distinct from r.asked_until
  )
order by r.nth limit %s
"""
CLEARED = "update replays set cleared = true where id = %s"
