-- State, version 1. Text that orders (positions, names) is compared byte by byte, whatever the database's locale.

-- Who may write to what, and since when. Rows are never deleted: an epoch must not be given out twice.
create table leases (
    name       text collate "C" primary key,
    instance   text,                        -- null: released, nobody holds it
    host       text not null default '',
    boot       text not null default '',
    pid        integer not null default 0,
    started    text not null default '',
    epoch      bigint not null,
    expires_at timestamptz not null
);

create table instances (
    instance   text collate "C" primary key,
    host       text not null,
    boot       text not null,
    pid        integer not null,
    started    text not null,
    version    text not null,
    seen_at    timestamptz not null default clock_timestamp()
);

create table checkpoints (
    source     text collate "C" not null,
    partition  integer not null,
    position   text collate "C" not null,
    batch      bigint not null,
    epoch      bigint not null,
    updated_at timestamptz not null default clock_timestamp(),
    primary key (source, partition)
);

-- How far the log is durable. Nobody delivers beyond it.
create table log_head (
    source        text collate "C" not null,
    partition     integer not null,
    batch         bigint not null,
    epoch         bigint not null,
    position      text collate "C" not null,
    delta_version bigint not null,
    updated_at    timestamptz not null default clock_timestamp(),
    primary key (source, partition)
);

-- A subscription is a member of the live group if and only if its state is 'live'.
create table subscriptions (
    name            text collate "C" primary key,
    made_by         text not null check (made_by in ('file', 'api')),
    spec            jsonb not null,
    state           text not null check (state in ('live', 'behind', 'suspended', 'disabled')),
    reason          text not null default '',
    failures        integer not null default 0,
    next_attempt_at timestamptz,
    joined_version  bigint not null default 0,  -- the group's version at which it last joined
    generation      bigint generated always as identity,  -- tells it from a later one of the same name
    created_at      timestamptz not null default clock_timestamp(),
    updated_at      timestamptz not null default clock_timestamp()
);

-- One row: its lock is the group's lock.
create table delivery_group (
    id      boolean primary key default true check (id),
    version bigint not null
);
insert into delivery_group (version) values (0);

-- The last batch a reader is done with. The live group's reader is '', a subscription's is its name.
create table cursors (
    reader    text collate "C" not null,
    source    text collate "C" not null,
    partition integer not null,
    batch     bigint not null,
    primary key (reader, source, partition)
);

-- Parked deliveries.
create table enqueued_messages (
    id              bigint generated always as identity primary key,
    subscription    text collate "C" not null references subscriptions (name) on delete cascade,
    event_id        text collate "C" not null,
    source          text collate "C" not null,
    partition       integer not null,
    batch           bigint not null,
    position        text collate "C" not null,
    key             text collate "C",
    event           text not null,
    reason          text not null,
    last_status     integer,
    attempts        integer not null default 0,
    next_attempt_at timestamptz,             -- null: dead, only a person moves it
    claimed_until   timestamptz,
    claim_epoch     bigint,
    created_at      timestamptz not null,
    unique (subscription, event_id)
);
create index enqueued_messages_due on enqueued_messages (next_attempt_at, id) where next_attempt_at is not null;
create index enqueued_messages_listed on enqueued_messages (subscription, id);
-- Finds what stands in front of a delivery whose subscription wants order per key.
create index enqueued_messages_held on enqueued_messages (subscription, source, partition, key, id)
    where key is not null;

-- What must be counted even when no metric was scraped: expired, dropped, duplicates.
create table counters (
    name  text collate "C" not null,
    label text collate "C" not null,
    value bigint not null default 0,
    primary key (name, label)
);
