"""The SQL of the delivery store.

Locks are always taken in this order, so that no two calls wait for each other: the lease, rows of groups by shard,
subscriptions by name, cursors, sessions, parked rows by id, counters.
"""

from __future__ import annotations

from evermark.cluster.fence import FENCE

LOCK_GROUP = "select from delivery_group where shard = %s for update"
LOCK_GROUPS = "select shard from delivery_group order by shard for update"
SET_GROUP_VERSION = "update delivery_group set version = %s where shard = %s"
NEXT_GROUP_VERSION = "update delivery_group set version = version + 1 where shard = %s"
SHARDS = "select count(*) from delivery_group"
SHARD_OF = "select shard from subscriptions where name = %s"
OPEN_SHARD = "insert into delivery_group (shard, version) values (%s, %s)"
CLOSE_SHARDS = """
with gone as (delete from delivery_group where shard >= %(shards)s)
delete from cursors where reader = '' and shard >= %(shards)s
"""
SET_SHARDS = """
update subscriptions s set shard = given.shard
from unnest(%s::text[], %s::integer[]) as given (name, shard) where s.name = given.name
"""

_RECORD = """name, state, reason, failures, next_attempt_at, (spec ->> 'parked_max')::integer, joined_version,
       generation, spec -> 'bot' is not null"""

MEMBERS = f"select {_RECORD} from subscriptions where state = 'live' and shard = %s"
PLACED_LOCKED = f"select shard, {_RECORD} from subscriptions order by name for update"
RECORD_LOCKED = f"select {_RECORD} from subscriptions where name = %s for update"
_WHOLE = f"select spec::text, created_at, {_RECORD} from subscriptions"
SUBSCRIPTIONS = f"{_WHOLE} order by name"
# Differs when any row is another version than before, was added or was removed; costs a tenth of reading them all.
VERSIONS = "select count(*), sum(hashtextextended(ctid::text || ' ' || xmin::text, 0)) from subscriptions"
OUTSIDE = f"{_WHOLE} where state in ('behind', 'suspended') and shard = %s order by name"
SUBSCRIPTION = f"{_WHOLE} where name = %s"
SUBSCRIPTION_LOCKED = f"{SUBSCRIPTION} for update"
MADE_BY = "select made_by from subscriptions where name = %s"
SUBSCRIPTIONS_LOCKED = f"select shard, spec::text, {_RECORD} from subscriptions order by name for update"

# One statement, one snapshot: a group read in pieces could show members with cursors they never had.
GROUPS = """
select g.shard, g.version,
       array(select name from subscriptions where state = 'live' and shard = g.shard),
       array(select source from cursors where reader = '' and shard = g.shard order by source, partition),
       array(select partition from cursors where reader = '' and shard = g.shard order by source, partition),
       array(select batch from cursors where reader = '' and shard = g.shard order by source, partition)
from delivery_group g
"""
GROUP = f"{GROUPS} where g.shard = %s"

# What settles the usual piece of work: its group is as it was, and no member has anything on record to be cleaned.
MOVE_GROUP = f"""
with fence as ({FENCE}),
     same as (
         select from delivery_group, fence
         where shard = %(shard)s and version = %(version)s for update of delivery_group
     )
update cursors set batch = %(done)s from same
where reader = '' and shard = %(shard)s and source = %(source)s and partition = %(partition)s
  and batch = %(begun)s and through = ''
  and %(members)s = (select count(*) from subscriptions where state = 'live' and shard = %(shard)s)
  and not exists (
      select from subscriptions
      where state = 'live' and shard = %(shard)s and (reason <> '' or failures > 0 or next_attempt_at is not null)
  )
"""

# The same without its members.
GROUP_CURSORS = """
select g.version, c.source, c.partition, c.batch
from delivery_group g left join cursors c on c.reader = '' and c.shard = g.shard
where g.shard = %s
"""

CURSORS = "select source, partition, batch, through from cursors where reader = %s"
CURSORS_OUTSIDE = """
select s.name, c.source, c.partition, c.batch, c.through
from subscriptions s left join cursors c on c.reader = s.name
where s.state <> 'live'
order by s.name
"""
CURSOR_LOCKED = "select batch, through from cursors where reader = %s and source = %s and partition = %s for update"
SET_CURSORS = """
insert into cursors (reader, shard, source, partition, batch, through)
select * from unnest(%s::text[], %s::integer[], %s::text[], %s::integer[], %s::bigint[], %s::text[])
    as given (reader, shard, source, partition, batch, through)
order by reader, shard, source, partition
on conflict (reader, shard, source, partition) do update set batch = excluded.batch, through = excluded.through
"""
REMOVE_CURSORS = "delete from cursors where reader = any(%s)"
OPEN_PLACE = """
insert into cursors (reader, shard, source, partition, batch) values ('', %s, %s, %s, %s)
on conflict (reader, shard, source, partition) do nothing
"""
OPEN_PLACE_OUTSIDE = """
insert into cursors (reader, source, partition, batch)
select name, %s, %s, 0 from subscriptions where state <> 'live' and shard = %s order by name
on conflict (reader, shard, source, partition) do nothing
"""

SET_RECORDS = """
update subscriptions s
set state = g.state, reason = g.reason, failures = g.failures, next_attempt_at = g.next_attempt_at,
    joined_version = g.joined_version, updated_at = clock_timestamp()
from (
    select * from unnest(%s::text[], %s::text[], %s::text[], %s::integer[], %s::timestamptz[], %s::bigint[])
        as given (name, state, reason, failures, next_attempt_at, joined_version)
) g
where s.name = g.name
"""
SET_SPEC = "update subscriptions set spec = %s::jsonb where name = %s and spec <> %s::jsonb"
ADD_SUBSCRIPTION = """
insert into subscriptions (name, made_by, spec, state, joined_version, shard) values (%s, %s, %s, %s, %s, %s)
"""
REMOVE_SUBSCRIPTIONS = "delete from subscriptions where name = any(%s)"

# Rows of replays have a limit of their own, so that a replay never uses up the room of first deliveries. Rows that wait
# for a session key take no room either, nor do rows on their way out because their key came, up to the number of rows
# that may wait in one stream. What a bot refused counts for its stream alone (`bot_queries.STOPPED`).
PARKED_BY = """
select subscription, sum(counted)::bigint from (
    select subscription, count(*) filter (where session is null and not exists (
                             select from subscriptions s where s.name = subscription and s.spec -> 'bot' is not null))
                         + greatest(0, count(*) filter (where session is not null) - %s) as counted
    from enqueued_messages
    where subscription = any(%s) and replay_id = '' and not waits group by subscription, stream
) by_stream
group by subscription
"""
PARKED_MAX = "select name, (spec ->> 'parked_max')::integer from subscriptions where name = any(%s)"
RETRY_WAITS = "select name, spec -> 'retry_waits_s' from subscriptions where name = any(%s)"
# What the foreign key of a parked row locks anyway, at its place in the order: before the sessions.
LOCK_PARKED_FOR = "select from subscriptions where name = any(%s) order by name for key share"
PARK = """
insert into enqueued_messages (subscription, event_id, replay_id, source, partition, batch, position, stream, key,
                               previous_key, event, reason, last_status, attempts, next_attempt_at, session, waits,
                               created_at)
select g.subscription, g.event_id, g.replay_id, g.source, g.partition, g.batch, g.position, g.stream, g.key,
       g.previous_key, g.event, g.reason, g.last_status, g.attempts, g.next_attempt_at, g.session, g.waits, %s
from unnest(%s::text[], %s::text[], %s::text[], %s::text[], %s::integer[], %s::bigint[], %s::text[], %s::text[],
            %s::text[], %s::text[], %s::text[], %s::text[], %s::integer[], %s::integer[], %s::timestamptz[],
            %s::text[], %s::boolean[]) with ordinality
    as g (subscription, event_id, replay_id, source, partition, batch, position, stream, key, previous_key, event,
          reason, last_status, attempts, next_attempt_at, session, waits, nth)
order by g.nth
on conflict (subscription, event_id, replay_id) do nothing
"""

# The fields of a `ParkedEvent`, in their order, after the name and the attempts.
_PARKED = """m.subscription, m.attempts, m.event_id, m.source, m.partition, m.batch, m.position, m.stream, m.key,
          m.event, m.reason, m.last_status, null, m.replay_id, coalesce(m.session, ''), m.previous_key"""

# Which keys the parked events of some subscriptions need, and whether they are published; asked under their locks.
_OF_DEVICES = """
from unnest(%s::text[], %s::text[]) as given (name, session) join subscriptions s using (name)
where coalesce(s.spec -> 'bot' ->> 'device', '') <> ''"""
DEVICES = f"select s.spec -> 'bot' ->> 'device', given.session {_OF_DEVICES}"
LOCK_SESSIONS = """
select pg_advisory_xact_lock(hashtext(current_schema()), n) from (select unnest(%s::integer[]) as n order by 1) given
"""
KEYLESS = f"""
select given.name, given.session {_OF_DEVICES}
  and not exists (
      select from session_keys k where k.device = s.spec -> 'bot' ->> 'device' and k.session = given.session
  )
"""

# Looks without a lock, because taking one costs a flush of the WAL even when nothing is due.
IS_ANY_DUE = """
select exists (select from leases where name = %(lease)s and epoch = %(epoch)s and instance is not null),
       exists (
           select from enqueued_messages
           where next_attempt_at <= %(now)s and (rests_until is null or rests_until <= %(now)s)
             and (claimed_until is null or claimed_until <= %(now)s or claim_epoch < %(epoch)s)
       )
"""

_FREE = "(m.claimed_until is null or m.claimed_until <= %(now)s or m.claim_epoch < %(epoch)s)"
# A row put back untried rests, and keeps its time: the order of its session depends on it.
_RESTED = "(m.rests_until is null or m.rests_until <= %(now)s)"

# Rows parked earlier of the same stream, and so perhaps of the same key. A row has one key, or two; each is looked for
# by itself, so that an index finds it.
_IN_FRONT = """
    select from enqueued_messages e
    where e.subscription = m.subscription and e.source = m.source and e.partition = m.partition
      and e.stream = m.stream and e.replay_id = m.replay_id and e.id < m.id"""

# The subscriptions that have rows are found by leaps over an index, and each has the same share: the first rows of all
# come before the second rows of any; where not all can have a row, their order differs from claim to claim
# (`turns.drawn`). The rows of a subscription may be tried as `group.drains` says. `skip locked` keeps two claims apart
# while they run; claimed_until does so afterwards. Rows of a session are claimed from the first one on, without a gap:
# a row behind a row that is not due is not looked at, and a row behind an unclaimed row (locked, or beyond the limit)
# is left.
CLAIM = f"""
with recursive owners as (
    (select subscription from enqueued_messages order by subscription limit 1)
    union all
    select (
        select m.subscription from enqueued_messages m
        where m.subscription > o.subscription order by m.subscription limit 1
    )
    from owners o where o.subscription is not null
), ready as (
    select s.name, coalesce((s.spec ->> 'ordered')::boolean, false) as ordered,
           coalesce(s.spec -> 'bot' ->> 'device', '') as device
    from owners o join subscriptions s on s.name = o.subscription
    where s.name <> all(%(without)s) and case s.state
            when 'suspended' then s.next_attempt_at <= %(now)s or (s.failures = 0 and s.next_attempt_at is not null)
            when 'disabled' then false
            else s.next_attempt_at is null or s.next_attempt_at <= %(now)s
          end
), shared as (
    select first.id
    from ready r cross join lateral (
        select m.id, row_number() over (order by m.next_attempt_at, m.id) as nth
        from enqueued_messages m
        where m.subscription = r.name and (m.replay_id <> '')::integer = %(of_replays)s::integer
          and m.next_attempt_at <= %(now)s and {_FREE} and {_RESTED}
          and (m.session is null or r.device = ''
               or exists (select from session_keys k where k.device = r.device and k.session = m.session))
          and not (r.ordered and (exists ({_IN_FRONT} and e.key = m.key)
                                  or exists ({_IN_FRONT} and e.key = m.previous_key)
                                  or exists ({_IN_FRONT} and e.previous_key = m.key)
                                  or exists ({_IN_FRONT} and e.previous_key = m.previous_key)))
          and not (
                m.session is not null
                and exists (
                    select from enqueued_messages e
                    where e.subscription = m.subscription and e.replay_id = m.replay_id and e.session = m.session
                      and e.id < m.id
                      and (e.next_attempt_at is null or e.next_attempt_at > %(now)s or e.rests_until > %(now)s
                           or (e.claimed_until > %(now)s and e.claim_epoch >= %(epoch)s))
                )
              )
        order by m.next_attempt_at, m.id
        limit %(limit)s
    ) first
    order by first.nth, md5(%(draw)s || r.name) collate "C"
    limit %(limit)s
), due as (
    select m.id, s.generation, m.subscription, m.replay_id, m.session
    from enqueued_messages m join subscriptions s on s.name = m.subscription
    where m.id = any(array(select id from shared)) and m.next_attempt_at <= %(now)s and {_FREE} and {_RESTED}
    for update of m skip locked
), got as (
    select d.id, d.generation from due d
    where d.session is null or not exists (
        select from enqueued_messages e
        where e.subscription = d.subscription and e.replay_id = d.replay_id and e.session = d.session
          and e.id < d.id and e.id not in (select id from due)
    )
)
update enqueued_messages m
set claimed_until = %(claimed_until)s, claim_epoch = %(epoch)s
from got
where m.id = got.id
returning m.id, m.claimed_until, got.generation, {_PARKED}
"""
DELIVERED = "delete from enqueued_messages where id = any(%s)"
# Tried because a person asked: the row goes back to the attempts and the time it had.
RESCHEDULE = """
update enqueued_messages
set next_attempt_at = case when not %(tried)s then next_attempt_at when asked then scheduled_at else %(at)s end,
    attempts = case when asked then attempts else %(attempts)s end,
    rests_until = case when not %(tried)s then %(at)s end,
    asked = asked and not %(tried)s,
    scheduled_at = case when not %(tried)s then scheduled_at end,
    reason = %(reason)s, last_status = %(status)s, claimed_until = null, claim_epoch = null,
    session = case when not %(tried)s then session end
where id = %(id)s and claimed_until = %(claimed_until)s and claim_epoch = %(epoch)s
"""
PARKED_COUNTS = """
select subscription, count(*) filter (where waits or next_attempt_at is not null),
       count(*) filter (where not waits and next_attempt_at is null)
from enqueued_messages group by subscription
"""
PARKED_SINCE = """
select subscription, min(created_at) from enqueued_messages
where waits or next_attempt_at is not null group by subscription
"""
PARKED_ROWS = f"""
select m.id, case when m.next_attempt_at is not null then greatest(m.next_attempt_at, m.rests_until) end,
       m.created_at, m.waits, {_PARKED}
from enqueued_messages m
where (%(subscription)s::text is null or m.subscription = %(subscription)s) and m.id > %(after_id)s
  and (%(dead)s::boolean is null or (m.next_attempt_at is null and not m.waits) = %(dead)s)
order by m.id
limit %(limit)s
"""
# By (subscription, source, partition), which an index begins with: rows of other subscriptions are not looked at.
HELD_KEYS = """
select m.subscription, m.source, m.partition, m.stream, held.key, count(*)
from enqueued_messages m join subscriptions s on s.name = m.subscription
cross join lateral (values (m.key), (m.previous_key)) as held (key)
where m.subscription = any(%(names)s) and held.key is not null and m.replay_id = %(replay_id)s
  and coalesce((s.spec ->> 'ordered')::boolean, false)
  and (%(everywhere)s or (m.source, m.partition) in (select * from unnest(%(sources)s::text[], %(partitions)s::int[])))
group by m.subscription, m.source, m.partition, m.stream, held.key
"""
# A row that is due anyway, or was never tried because of its session, does not count as asked for: its rest ends.
RELEASE = """
update enqueued_messages m
set next_attempt_at = case when waits then null else least(next_attempt_at, %(now)s::timestamptz) end,
    rests_until = null,
    asked = m.asked or g.early,
    scheduled_at = case when g.early then m.next_attempt_at else m.scheduled_at end
from (
    select id, session is null and not waits and (next_attempt_at is null or next_attempt_at > %(now)s) as early
    from enqueued_messages where id = any(%(ids)s)
    order by id
    for update
) g
where m.id = g.id
"""
TRY_REPLAYS_NOW = """
update replay_targets set next_attempt_at = null, failures = 0, changed_at = clock_timestamp()
where subscription = %s and state = 'running' and next_attempt_at is not null
"""
END_RESTS = "update enqueued_messages set rests_until = null where subscription = %s and rests_until is not null"
DROP = """
with gone as (delete from enqueued_messages where id = any(%s) returning subscription)
select subscription, count(*) from gone group by subscription
"""
# An array, which is made once: of `in (… limit …)` some plans ask anew for each row, and delete more than the limit.
EXPIRE = """
delete from enqueued_messages
where id = any(array(
    select id from enqueued_messages
    where subscription = %(subscription)s and created_at < %(before)s
      and (claimed_until is null or claimed_until <= %(now)s or claim_epoch < %(epoch)s)
    order by id
    limit %(limit)s
    for update skip locked
))
"""
