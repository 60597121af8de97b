"""The SQL of memberships and session keys. Locks are taken in the order that `store/queries.py` says."""

from __future__ import annotations

LEARNED = "select partition, batch from bot_learned where source = %s and usr = %s"
STAYS = """
select stream, begin_batch, begin_position, end_batch, end_position, inbox from bot_stays
where source = %s and usr = %s order by stream, begin_batch, begin_position
"""
LEARNED_LOCKED = """
select usr, batch from bot_learned where source = %s and partition = %s and usr = any(%s) order by usr for update
"""
SET_LEARNED = """
insert into bot_learned (source, usr, partition, batch)
select %s, given.usr, %s, given.batch from unnest(%s::text[], %s::bigint[]) as given (usr, batch) order by given.usr
on conflict (source, usr, partition) do update set batch = excluded.batch
"""
SET_STAYS = """
insert into bot_stays (source, usr, stream, begin_batch, begin_position, end_batch, end_position, inbox)
select %s, given.*
from unnest(%s::text[], %s::text[], %s::bigint[], %s::text[], %s::bigint[], %s::text[], %s::boolean[])
    as given (usr, stream, begin_batch, begin_position, end_batch, end_position, inbox)
order by 2, 3, 4, 5
on conflict (source, usr, stream, begin_batch, begin_position)
do update set end_batch = excluded.end_batch, end_position = excluded.end_position
"""
_NOBODY = """
not exists (
    select from subscriptions s
    where s.spec -> 'bot' is not null and s.spec -> 'bot' ->> 'source' = t.source and s.spec -> 'bot' ->> 'user' = t.usr
)
"""
FORGET_STAYS = f"delete from bot_stays t where {_NOBODY}"
FORGET_LEARNED = f"""
with gone as (delete from bot_learned t where {_NOBODY} returning source, usr)
select count(distinct (source, usr)) from gone
"""
USERS = """
select distinct spec -> 'bot' ->> 'user', spec -> 'bot' ->> 'inbox' from subscriptions
where spec -> 'bot' is not null and spec -> 'bot' ->> 'source' = %s
"""
USERS_VERSION = (
    f"select coalesce(md5(string_agg(u || chr(10) || i, chr(10) order by u, i)), '') from ({USERS}) as t (u, i)"
)

KEY_COUNTS = "select count(*), count(*) filter (where session = any(%s)) from session_keys where device = %s"
PUT_KEYS = """
insert into session_keys (device, session, key, published_at)
select %s, given.session, given.key, %s from unnest(%s::text[], %s::text[]) as given (session, key)
order by given.session
on conflict (device, session) do update set key = excluded.key, published_at = excluded.published_at
"""
KEYS = "select session, key, published_at from session_keys where device = %s"
KEY = f"{KEYS} and session = %s"
KEY_PAGE = f"{KEYS} and session > %s order by session limit %s"
# The newest keys, up to the number a task is told: events of other sessions are parked for a moment. Sessions that have
# parked rows are found by leaps over an index: of one session very many may be parked. What waits though its key is
# there counts as queued, so that nothing overtakes it before it is released.
# One statement, one snapshot: a key that is withdrawn between two looks would be seen published, and no row parked.
CLEAR = """
with recursive queued as (
    select n.name as subscription, f.session from unnest(%(names)s::text[]) as n (name) cross join lateral (
        select m.session from enqueued_messages m
        where m.subscription = n.name and m.replay_id = %(replay_id)s and m.session is not null
        order by m.session limit 1
    ) f
    union all
    select q.subscription, n.session from queued q cross join lateral (
        select m.session from enqueued_messages m
        where m.subscription = q.subscription and m.replay_id = %(replay_id)s and m.session > q.session
        order by m.session limit 1
    ) n
)
select s.name, array_agg(k.session) filter (where (s.name, k.session) not in (select subscription, session from queued))
from subscriptions s
cross join lateral (
    select session from session_keys
    where device = s.spec -> 'bot' ->> 'device' order by published_at desc limit %(most)s
) k
where s.name = any(%(names)s) group by s.name
"""
# `not waits`, though a row without a session never waits: so an index finds them, however many wait.
STOPPED = """
select m.subscription, m.stream from enqueued_messages m join subscriptions s on s.name = m.subscription
where m.subscription = any(%s) and m.replay_id = '' and m.session is null and not m.waits
group by m.subscription, m.stream, s.spec having count(*) >= (s.spec ->> 'parked_max')::integer
"""
WITHDRAW_KEY = "delete from session_keys where device = %(device)s and session = %(session)s"
_FREE = "(m.claimed_until is null or m.claimed_until <= %(now)s or m.claim_epoch < %(epoch)s)"
_IS_KEYED = """(
    coalesce(s.spec -> 'bot' ->> 'device', '') = ''
    or exists (select from session_keys k where k.device = s.spec -> 'bot' ->> 'device' and k.session = m.session)
)"""


def _held(ids: str) -> str:
    """Rows that are not under way wait again. Locked by id, as all parked rows are."""
    return f"""
update enqueued_messages m set waits = true, next_attempt_at = null
from (select id from enqueued_messages where id = any(array({ids})) order by id for update) g
where m.id = g.id and not m.waits and {_FREE}
"""


def _released(ids: str) -> str:
    """Rows that wait are due. In order: claimed by id, and none before an earlier one of its session is released."""
    return f"""
update enqueued_messages m set waits = false, next_attempt_at = %(now)s
from (select id from enqueued_messages where id = any(array({ids})) order by id for update) g
where m.id = g.id and m.waits
"""


# Very many rows may have to be touched. With a limit, each statement takes as long as others can wait for its locks.
_UNTRIED = f"""
select m.id from enqueued_messages m join subscriptions s on s.name = m.subscription
where m.session is not null and not m.waits and {_FREE}"""
HOLD_SESSION = _held(f"{_UNTRIED} and m.session = %(session)s and s.spec -> 'bot' ->> 'device' = %(device)s")
HOLD_KEYLESS = _held(f"{_UNTRIED} and not {_IS_KEYED} limit %(limit)s")
HOLD_KEYLESS_OF = _held(f"{_UNTRIED} and not {_IS_KEYED} and m.subscription = any(%(names)s) limit %(limit)s")

# Sessions of which rows wait, found by leaps over an index.
_WAITING_SESSIONS = """
with recursive waiting as (
    (
        select subscription, session from enqueued_messages where waits
        order by subscription, session, id limit 1
    )
    union all
    select n.* from waiting w cross join lateral (
        select o.subscription, o.session from enqueued_messages o
        where o.waits and (o.subscription, o.session) > (w.subscription, w.session)
        order by o.subscription, o.session, o.id limit 1
    ) n
)"""
_FIRST_OF_SESSION = """
cross join lateral (
    select id from enqueued_messages e
    where e.waits and e.subscription = m.subscription and e.session = m.session order by e.id limit %(limit)s
) r"""
_KEYED = f"""{_WAITING_SESSIONS}
select r.id from waiting m join subscriptions s on s.name = m.subscription {_FIRST_OF_SESSION}
where {_IS_KEYED}"""
RELEASE_KEYED = _released(f"{_KEYED} limit %(limit)s")
RELEASE_KEYED_OF = _released(f"{_KEYED} and m.subscription = any(%(names)s) limit %(limit)s")
RELEASE_SESSIONS = _released(f"""
select r.id
from (
    select name as subscription, given.session
    from subscriptions cross join unnest(%(sessions)s::text[]) as given (session)
    where spec -> 'bot' ->> 'device' = %(device)s
) m join subscriptions s on s.name = m.subscription {_FIRST_OF_SESSION}
where {_IS_KEYED} limit %(limit)s
""")
IS_ANY_WAITING = "select exists (select from enqueued_messages where waits)"
IS_ANY_OF_SESSION = "select exists (select from enqueued_messages where session is not null)"

# Returns the last surplus row of each stream, not a count: if a row is released meanwhile, no newer row goes in its
# place.
SURPLUS = """
select t.subscription, t.stream, (
    select m.id from enqueued_messages m
    where m.waits = t.waits and (m.waits or m.session is null) and m.replay_id = ''
      and m.subscription = t.subscription and m.stream = t.stream
    order by m.id offset t.n - 1 limit 1
), t.waits
from (
    select m.subscription, m.stream, m.waits, count(*) - %(keep)s as n
    from enqueued_messages m join subscriptions s on s.name = m.subscription
    where (m.waits or m.session is null) and m.replay_id = '' and (m.waits or s.spec -> 'bot' is not null)
    group by m.subscription, m.stream, m.waits having count(*) > %(keep)s
) t
"""
# By id: the oldest rows. Rows that wait are never under way; a row being released, and a refused row that is being
# tried, is skipped.
EXPIRE_SURPLUS = """
delete from enqueued_messages where id = any(array(
    select id from enqueued_messages
    where waits = %(waits)s and (waits or session is null) and replay_id = ''
      and subscription = %(subscription)s and stream = %(stream)s and id <= %(through)s
      and (claimed_until is null or claimed_until <= %(now)s or claim_epoch < %(epoch)s)
    order by id limit %(limit)s
    for update skip locked
))
"""

# The first event of each session is found by leaps over an index: very many events of a session may wait.
# Only endpoints that work are asked; bots that are full too, for keys will make room.
WANTED = """
with recursive missing as (
    (
        select subscription, session, id as first, stream, created_at from enqueued_messages
        where waits order by subscription, session, id limit 1
    )
    union all
    select n.* from missing w cross join lateral (
        select m.subscription, m.session, m.id, m.stream, m.created_at from enqueued_messages m
        where m.waits and (m.subscription, m.session) > (w.subscription, w.session)
        order by m.subscription, m.session, m.id limit 1
    ) n
)
select w.subscription, s.spec -> 'bot' ->> 'device', w.session, w.stream, w.created_at, coalesce(a.asks, 0) + 1
from missing w
join subscriptions s on s.name = w.subscription
left join session_asks a on a.subscription = w.subscription and a.session = w.session
where (s.state in ('live', 'behind') or (s.state = 'suspended' and s.next_attempt_at is not null))
  and (s.failures = 0 or s.next_attempt_at is null or s.next_attempt_at <= %(now)s)
  and coalesce(s.spec -> 'bot' ->> 'device', '') <> ''
  and not exists (
      select from session_keys k where k.device = s.spec -> 'bot' ->> 'device' and k.session = w.session
  )
  and (a.asked_at is null
       or a.asked_at + least(%(most)s::interval, %(every)s::interval * power(2, least(a.asks, 20) - 1)) <= %(now)s)
order by row_number() over (partition by w.subscription, w.stream order by a.asked_at nulls first, w.first),
         a.asked_at nulls first, w.first
limit %(limit)s
"""
ASKED = """
insert into session_asks (subscription, session, asked_at, asks)
select given.subscription, given.session, %s, 1 from unnest(%s::text[], %s::text[]) as given (subscription, session)
order by 1, 2
on conflict (subscription, session) do update set asked_at = excluded.asked_at, asks = session_asks.asks + 1
"""
# Kept a while after the last waiting event is gone: its key must not be asked for again too soon.
FORGET_ASKS = """
delete from session_asks a
where a.asked_at < %s and not exists (
    select from enqueued_messages m where m.waits and m.subscription = a.subscription and m.session = a.session
)
"""
