-- Holes in a source that are being mended, or were: one row each. At most one per place is open.
create table recoveries (
    id         bigint generated always as identity primary key,
    source     text collate "C" not null,
    partition  integer not null,
    choice     text not null check (choice in ('repair', 'skip')),
    asked_by   text not null check (asked_by in ('itself', 'person')),
    reason     text not null,
    left_at    text collate "C" not null default '',  -- the checkpoint's position when the hole was found
    step       text not null check (step in ('opened', 'closed', 'done', 'failed')),
    position   text collate "C",              -- where reading goes on once the hole is closed
    tries      integer not null default 0,
    taken      bigint not null default 0,     -- events found missing and taken
    error      text not null default '',
    opened_at  timestamptz not null default clock_timestamp(),
    changed_at timestamptz not null default clock_timestamp()
);
create unique index recoveries_open on recoveries (source, partition) where step in ('opened', 'closed');
create index recoveries_listed on recoveries (source, partition, id);
