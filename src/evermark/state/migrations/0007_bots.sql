-- Bots: what was learned of their users' memberships, session keys, and what waits for one.

create index subscriptions_bots on subscriptions ((spec -> 'bot' ->> 'source'), (spec -> 'bot' ->> 'device'))
    where spec -> 'bot' is not null;

-- How far the log was looked through for a user's joins and leaves.
create table bot_learned (
    source    text collate "C" not null,
    usr       text collate "C" not null,
    partition integer not null,
    batch     bigint not null,
    primary key (source, usr, partition)
);

-- Times of membership: after the first position, up to and with the second; without one it lasts.
create table bot_stays (
    source         text collate "C" not null,
    usr            text collate "C" not null,
    stream         text collate "C" not null,
    begin_batch    bigint not null,
    begin_position text collate "C" not null,
    end_batch      bigint,
    end_position   text collate "C",
    inbox          boolean not null default false,
    primary key (source, usr, stream, begin_batch, begin_position)
);

create table session_keys (
    device       text collate "C" not null,
    session      text collate "C" not null,
    key          text not null,              -- sealed
    published_at timestamptz not null,
    primary key (device, session)
);

-- When a key was asked for last, and how often.
create table session_asks (
    subscription text collate "C" not null references subscriptions (name) on delete cascade,
    session      text collate "C" not null,
    asked_at     timestamptz not null,
    asks         integer not null,
    primary key (subscription, session)
);

-- A delivery that was not tried yet, because of its session: it waits for the key, or behind one that did. Without a
-- next attempt a row is dead, unless it waits.
alter table enqueued_messages add column session text collate "C", add column waits boolean not null default false;
create index enqueued_messages_sessions on enqueued_messages (subscription, replay_id, session, id)
    where session is not null;
create index enqueued_messages_waiting on enqueued_messages (session) where waits;
