-- Block streams: how far each stream was taken, and what the next batches hold.

-- How far a stream is taken, logged and checkpointed. The id is '<source>/<stream>' in UTF-8: neither half may hold a
-- slash, and two sources may each have a stream of the same name.
create table stream_sync_state (
    stream_id           bytea primary key,
    snapshot_miniblock  bigint not null,
    minipool_gen        bigint not null,
    prev_miniblock_hash bytea,
    updated_at          timestamptz not null default now()
);
create index stream_sync_state_updated on stream_sync_state (updated_at);

-- What else has to be known of such a stream. It lives and goes with its row above.
create table block_streams (
    source        text collate "C" not null,
    stream        text collate "C" not null,
    partition     integer not null,
    kind          text not null,
    incarnation   text not null,
    pool          bytea not null default '',   -- hashes, 32 bytes each: taken from the minipool of `minipool_gen`
    more          boolean not null default false, -- the node had more of it than one batch was to hold
    repeats_below bigint not null default 0,   -- events of blocks below may come again: they are compared with the log
    anew          boolean not null default false, -- the log may not have it: its hash is only something to compare with
    primary key (source, stream)
);
create index block_streams_more on block_streams (source, partition) where more;

create table block_sources (
    source     text collate "C" primary key,
    partitions integer not null,
    nodes      text[] not null                 -- the ids of nodes that were seen to be of one family
);

create table block_partitions (
    source      text collate "C" not null,
    partition   integer not null,
    confirmed   bigint not null default 0,     -- every tick up to this one is in the tables above
    last_tick   bigint not null default 0,     -- no tick above it was ever given out
    touched     bigint not null default 0,     -- how far the listing of the nodes was looked through
    wanted      text not null default '',      -- by which choice of streams
    cold_before bigint not null default 0,     -- streams last touched before this wait for their next event
    forgot_us   bigint not null default 0,     -- until then something was forgotten that the log may still hold
    primary key (source, partition)
);

-- The plan. A tick leads from one position to the next; two owners may make two that start at the same position, and
-- whichever is committed to the log is the one that is confirmed. One that ends where it starts is a root: what was
-- confirmed counts for nothing on the ways that begin there.
create table block_ticks (
    source    text collate "C" not null,
    partition integer not null,
    ends      bigint not null,
    starts    bigint not null,
    touched   bigint not null,
    wanted    text not null,
    void      boolean not null default false,  -- not to be begun any more
    primary key (source, partition, ends)
);
create table block_plan (
    source        text collate "C" not null,
    partition     integer not null,
    ends          bigint not null,
    item          integer not null,
    stream        text collate "C" not null,
    pins          text not null default '[]',  -- [[block, hash of the one before it], ...]: what is to be fetched
    leave_out     bytea not null default '',   -- hashes that were taken from the minipool before
    carried       text not null default '[]',  -- [[block, ordinal, event], ...]: what need not be fetched
    repeats       boolean not null default false,
    -- Where the stream stands then: on the last item of each.
    moves         boolean not null default false,
    kind          text,
    snapshot      bigint,
    gen           bigint,                      -- null, though it moves: the stream is gone
    hash          text,
    incarnation   text,
    pool          bytea,
    more          boolean,
    repeats_below bigint,
    primary key (source, partition, ends, item),
    foreign key (source, partition, ends) references block_ticks on delete cascade
);

-- Streams with a gap that cannot be filled just now.
create table block_stale (
    source    text collate "C" not null,
    stream    text collate "C" not null,
    partition integer not null,
    block     bigint not null,
    reason    text not null,
    tick      bigint not null default 0,       -- the last one given out by then: what later ones move is not stale
    attempts  integer not null default 1,
    since     timestamptz not null default clock_timestamp(),
    next_at   timestamptz not null,
    primary key (source, stream)
);
