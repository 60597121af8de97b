-- Everything a block node keeps. `place` is sid << 32 | number: one b-tree, a stream's rows side by side and in order.

create table meta (name text primary key, value text not null) without rowid;

-- A stream's row stays when it is deleted, so that followers learn of it; a recreated stream has another sid.
create table streams (
  sid             integer primary key autoincrement,
  stream          text    not null unique,
  kind            text    not null,
  creator         text    not null,
  incarnation     text    not null,
  asked           text    not null, -- what it was created with: asking for the same again is no conflict
  next_number     integer not null,
  last_hash       text    not null,
  last_at_us      integer not null,
  snapshot_number integer not null,
  snapshot_bytes  integer not null, -- of blocks since that snapshot
  pool_count      integer not null default 0,
  pool_bytes      integer not null default 0,
  pool_since_us   integer not null default 0,
  members         integer not null, -- how many
  touched         integer not null, -- grows with every change of any stream
  deleted         integer not null default 0
);
create index streams_by_touched on streams (touched);
create index streams_to_seal on streams (sid) where pool_count > 0; -- a start reads these rows, not all

create table blocks (
  place    integer primary key,
  hash     text    not null,
  snapshot integer not null, -- whether it carries one
  body     blob    not null  -- as it goes over the wire
);
create table pool (place integer primary key, hash text not null, body blob not null);
create table seen (sid integer not null, hash blob not null, primary key (sid, hash)) without rowid;
create table members (sid integer not null, member text not null, primary key (sid, member)) without rowid;
create table settings (
  sid integer not null, name text not null, value text not null, primary key (sid, name)
) without rowid;
create table dropped (sid integer primary key); -- of deleted streams, until their rows are gone
create table owed (stream text primary key, reason text not null) without rowid; -- what a follower could not copy
