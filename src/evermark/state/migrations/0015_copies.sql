-- Rows that were there before a stream began, copied beside it. `asked_by` is `start` (the file says so) or `person`.
create table copies (
    id         text primary key,
    source     text not null,
    stream     text not null,
    condition  text not null default '',
    asked_by   text not null,
    state      text not null default 'planned',
    chunks     integer not null default 0,
    rows       bigint not null default 0,
    tries      integer not null default 0,
    error      text not null default '',
    made_at    timestamptz not null default clock_timestamp(),
    changed_at timestamptz not null default clock_timestamp()
);
create index copies_source on copies (source, made_at);
-- The pieces of a copy that is under way: a range of keys each. `after` and `upto` are JSON lists of texts, or null. An
-- attempt is decided here, once: `writing` becomes `ready`, or `open` again. Then a later mark counts, and no earlier one.
create table copy_chunks (
    copy     text not null references copies (id) on delete cascade,
    number   integer not null,
    after    text,
    upto     text,
    state    text not null default 'open',
    attempt  integer not null default 0,
    position text collate "C" not null default '',
    file     text not null default '',
    rows     bigint not null default 0,
    ready_at timestamptz,
    primary key (copy, number)
);
create index copy_chunks_left on copy_chunks (copy, state) where state <> 'done';
