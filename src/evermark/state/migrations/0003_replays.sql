-- Replays: events of a window of time, delivered once more under ids of their own.
create table replays (
    id               text collate "C" primary key,
    nth              bigint generated always as identity,  -- the order of the requests
    asked_by         text not null check (asked_by in ('sql', 'cli', 'api')),
    control_event_id text collate "C" unique,              -- the event that asked, when SQL did
    source           text collate "C" not null,
    asked_partition  integer,                              -- where that event stands: the log must be durable up to it
    asked_batch      bigint,
    streams          text[] not null default '{}',         -- empty: all streams
    since            timestamptz not null,                 -- both ends included
    until            timestamptz not null,
    asked_since      text,                                 -- as the request wrote them, to clear exactly that request
    asked_until      text,
    where_sql        text,
    subscription     text collate "C",                     -- null: all there are when it starts
    rate_per_s       double precision not null default 0,  -- 0: no limit of its own
    state            text not null default 'waiting'
                     check (state in ('waiting', 'running', 'done', 'cancelled', 'failed')),
    reason           text not null default '',
    heads            jsonb,                                -- partition → last batch of the log when it started
    log_rows         bigint not null default 0,            -- estimate: rows of the log in the window, all streams
    cleared          boolean not null default true,        -- false: the source still shows the request
    created_at       timestamptz not null default clock_timestamp(),
    changed_at       timestamptz not null default clock_timestamp()
);
create index replays_open on replays (nth) where state in ('waiting', 'running');
create index replays_uncleared on replays (nth) where not cleared;

-- How far a replay is with one subscription: everything before (at_time, at_id) is done.
create table replay_targets (
    replay          text collate "C" not null references replays (id) on delete cascade,
    subscription    text collate "C" not null,
    generation      bigint not null,              -- of the subscription it was begun for
    state           text not null default 'running' check (state in ('running', 'done', 'cancelled')),
    reason          text not null default '',
    at_time         timestamptz not null,
    at_id           text collate "C",             -- null: nothing of at_time is done
    slice_rows      integer not null,             -- how much of the log the next step takes
    passed_rows     bigint not null default 0,    -- estimate, in rows of the log
    delivered       bigint not null default 0,
    parked          bigint not null default 0,
    failures        integer not null default 0,   -- of the endpoint, in a row
    next_attempt_at timestamptz,
    changed_at      timestamptz not null default clock_timestamp(),
    primary key (replay, subscription)
);

-- A delivery of a replay is another delivery than the first one of its event.
alter table enqueued_messages add column replay_id text collate "C" not null default '';
alter table enqueued_messages drop constraint enqueued_messages_subscription_event_id_key;
alter table enqueued_messages add unique (subscription, event_id, replay_id);
