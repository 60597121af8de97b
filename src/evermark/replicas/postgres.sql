-- What replicas keep in the user's database, beside the tables they replicate.

create table replication_meta (key text collate "C" primary key, value text not null);
create table replication_tables (name text collate "C" primary key, form text not null);
create table replication_checkpoints (
  table_name text collate "C" not null,
  origin_node_id text collate "C" not null,
  origin_seq bigint not null default 0,   -- the highest number with none missing up to it
  seen_seq bigint not null default 0,     -- the highest number there is
  missing text not null default '[]',     -- ranges between the two that are still missing
  floor_seq bigint not null default 0,    -- up to here events were collected
  primary key (table_name, origin_node_id));
create table replication_members (
  name text collate "C" primary key, said text not null, settled text not null, heard_ms bigint not null);
create table replication_evicted (origin_node_id text collate "C" primary key);
create table replication_quarantine (
  table_name text collate "C", origin_node_id text collate "C", origin_seq bigint, reason text not null,
  primary key (table_name, origin_node_id, origin_seq));
create table replication_cut (origin_node_id text collate "C", first_seq bigint, last_seq bigint);

-- Changes of transactions that have not committed yet, in the order they were made.
create table replication_pending (
  ord bigint generated always as identity,
  xid xid8 not null default pg_current_xact_id(),
  table_name text collate "C" not null,
  service text not null,
  operation_type text not null,
  record_id text collate "C" not null,
  data text,
  primary key (xid, ord));

-- At a commit: the first call numbers all that its transaction has changed, and notes how far it came; the others have
-- nothing left to do, and do not even look: their rows are deleted, and looking would wade through all of them.
create function replication_number() returns trigger language plpgsql security definer
set search_path = {schema}, pg_temp as $number$
declare
  changed record;
  last bigint;
  reading bigint;
  now_ms bigint := (extract(epoch from clock_timestamp()) * 1000)::bigint;
  origin text;
begin
  if new.ord <= coalesce(nullif(current_setting('evermark.numbered', true), '')::bigint, 0) then
    return null;
  end if;
  perform set_config('evermark.numbered', max(ord)::text, true) from replication_pending
  where xid = pg_current_xact_id();
  for changed in
    select table_name, service, count(*) as changes from replication_pending
    where xid = pg_current_xact_id() group by table_name, service order by table_name, service
  loop
    select value::bigint into strict last from replication_meta
    where key = 'origin_seq::' || changed.service || '::' || changed.table_name for update;
    select greatest(value::bigint, now_ms << {bits}) into strict reading from replication_meta
    where key = 'hlc::' || changed.service || '::' || changed.table_name;
    select value into strict origin from replication_meta where key = 'origin';
    execute format(
      'with numbered as (
         select *, row_number() over (order by ord) as n from replication_pending
         where xid = pg_current_xact_id() and table_name = %L
       ), logged as (
         insert into %I (id, table_name, operation_type, record_id, data, timestamp, origin_node_id, origin_seq,
                         processed, hlc)
         -- In the order of time (version 7): random ones would each be a page of the index.
         select (lpad(to_hex(%s), 12, ''0'') || ''7''
                 || substr(translate(gen_random_uuid()::text, ''-'', ''''), 14))::uuid, table_name,
                operation_type, record_id, data, %s, %L, %s + n, true, %s + n
         from numbered
       )
       insert into %I (record_id, hlc, origin_node_id, origin_seq, is_deleted)
       select distinct on (record_id) record_id, %s + n, %L, %s + n, operation_type = ''delete''
       from numbered order by record_id, n desc
       on conflict (record_id) do update set hlc = excluded.hlc, origin_node_id = excluded.origin_node_id,
         origin_seq = excluded.origin_seq, is_deleted = excluded.is_deleted',
      changed.table_name, changed.table_name || '_Events', now_ms, now_ms, origin, last, reading,
      changed.table_name || '_Versions', reading, origin, last);
    update replication_meta set value = (last + changed.changes)::text
    where key = 'origin_seq::' || changed.service || '::' || changed.table_name;
    update replication_meta set value = (reading + changed.changes)::text
    where key = 'hlc::' || changed.service || '::' || changed.table_name;
    delete from replication_pending
    where xid = pg_current_xact_id() and table_name = changed.table_name and service = changed.service;
  end loop;
  return null;
end $number$;

create constraint trigger replication_number after insert on replication_pending
deferrable initially deferred for each row execute function replication_number();
