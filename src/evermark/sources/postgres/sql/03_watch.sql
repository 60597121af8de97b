-- Capturing tables: `select watch('public.orders')`, by hand or by `evermark source install`.

-- Capture a table. Run again after a change of its columns: types are looked up, the schema version grows. Nothing is
-- dropped: a trigger is made, or replaced in place, and only when something about it changed. (One that has its name of
-- version 3 is made by the new name before it goes, in one transaction.)
-- Triggers of one row fire in the order of their names: ours is called so that it comes first. After a trigger that changes
-- the row again, the second change would be written before the first.
-- Triggers fire `always`: rows that come by logical replication, or with session_replication_role = replica, count.
create or replace function @schema@.watch(target regclass, excluded text[] default '{}', hashed text[] default '{}')
returns text
language plpgsql set search_path = pg_catalog, pg_temp as $fn$
declare
    stream_name text;
    stream @schema@.streams%rowtype;
    now_columns jsonb;
    wanted text[];
    stranger text;
    namesake regclass;
    renamed record;
    changed boolean;
    renew boolean;
begin
    select n.nspname || '.' || c.relname into stream_name
    from pg_class c join pg_namespace n on n.oid = c.relnamespace
    where c.oid = target and c.relkind in ('r', 'p') and n.nspname <> '@schema_name@';
    if stream_name is null then
        raise exception '% is not a table that can be captured', target using errcode = 'wrong_object_type';
    end if;
    select jsonb_agg(jsonb_build_array(a.attname, format_type(a.atttypid, a.atttypmod)) order by a.attnum)
    into now_columns from pg_attribute a where a.attrelid = target and a.attnum > 0 and not a.attisdropped;
    select name into stranger from unnest(excluded || hashed) name
    where name not in (select c ->> 0 from jsonb_array_elements(now_columns) c) limit 1;
    if stranger is not null then
        raise exception 'table % has no column "%" to exclude or hash', stream_name, stranger
            using errcode = 'undefined_column';
    end if;
    -- A column to hide was renamed, and another has its name now: what it holds is still what was to be hidden.
    select o.name as before, a.attname as now into renamed
    from @schema@.captured_root(target) r
    cross join unnest(r.args[10]::text[]) with ordinality o(name, number)
    join pg_attribute a on a.attrelid = target and a.attnum = o.number and not a.attisdropped
    where r.args[9]::oid = target and a.attname <> o.name and o.name = any (r.args[7]::text[] || r.args[8]::text[])
      and o.name = any (excluded || hashed) and a.attname <> all (excluded || hashed) limit 1;
    if renamed is not null then
        raise exception 'column "%" of table %, which was to be hidden, is called "%" now: exclude or hash that, too',
            renamed.before, stream_name, renamed.now using errcode = 'undefined_column';
    end if;

    insert into @schema@.streams (name, columns) values (stream_name, now_columns) on conflict (name) do nothing;
    select * into stream from @schema@.streams where name = stream_name for update;
    if stream.columns is distinct from now_columns then
        update @schema@.streams set columns = now_columns,
            schema_version = schema_version + (case when columns is null then 0 else 1 end)
        where id = stream.id returning * into stream;
    end if;

    -- One stream is one table: a."b.c" and "a.b".c come to the same name, and so do a table that was renamed after it was
    -- captured and the one that has its name now.
    select t.tgrelid into namesake from pg_trigger t
    where t.tgname in (@captures@) and t.tgparentid = 0 and t.tgrelid <> target
      and position(convert_to(stream.id::text, getdatabaseencoding()) || '\x00'::bytea in t.tgargs) = 1;
    if namesake is not null then
        raise exception 'stream % is that of table % already, and would be that of %, too', stream_name, namesake, target
            using errcode = 'duplicate_object', hint = format('select %I.unwatch(%L), or rename one of the two',
                                                              '@schema_name@', namesake);
    end if;

    -- What a virtual generated column holds is computed when it is read: to a trigger it is null, whatever it would be.
    excluded := excluded || array(
        select a.attname::text from pg_attribute a where a.attrelid = target and a.attgenerated = 'v'
        and not a.attisdropped and a.attname <> all (excluded) order by a.attnum);
    wanted := array[stream.id::text, stream_name, stream.schema_version::text,
        @schema@.key_columns(target)::text, @schema@.columns_of_type(target, 'numeric')::text,
        @schema@.columns_of_type(target, 'bigint')::text, excluded::text, hashed::text];
    if cardinality(excluded || hashed) > 0 then
        select wanted || target::oid::text || array_agg(
            case when not a.attisdropped and a.attgenerated <> 'v' then a.attname end order by a.attnum)::text into wanted
        from pg_attribute a where a.attrelid = target and a.attnum > 0;
    end if;
    changed := not @schema@.is_watched(target, wanted);
    renew := exists (select from pg_trigger t where t.tgrelid = target and t.tgname = '@schema_name@_capture');
    if renew then  -- by its name of before; with the lock that dropping it takes, before any that is less
        execute format('lock table %s in access exclusive mode', target);
    end if;
    if changed or renew then
        execute format('create or replace trigger %I after insert or update or delete on %s
                        for each row execute function %I.capture(%s)',
            '@capture@', target, '@schema_name@',
            (select string_agg(quote_literal(w), ', ' order by o) from unnest(wanted) with ordinality t(w, o)));
        execute format('create or replace trigger %I after truncate on %s
                        for each statement execute function %I.capture_truncate(%L, %L, %L)',
            '@schema_name@_truncate', target, '@schema_name@', wanted[1], wanted[2], wanted[3]);
        execute format('alter table %s enable always trigger %I', target, '@capture@');
        execute format('alter table %s enable always trigger %I', target, '@schema_name@_truncate');
    end if;
    if renew then
        execute format('drop trigger %I on %s', '@schema_name@_capture', target);
    end if;
    perform @schema@.allow_owner(target);
    perform @schema@.watch_partition(part) from @schema@.unwatched_partitions(target) part;
    return stream_name || case when changed then ' captured' else ' unchanged' end;
end $fn$;

-- A table that an earlier version captured, watched as this one does, with the columns hidden that were.
create or replace function @schema@.renew(target regclass) returns text
language sql set search_path = pg_catalog, pg_temp as $fn$
    select @schema@.watch(target, r.args[7]::text[], r.args[8]::text[]) from @schema@.captured_root(target) r
$fn$;

-- Whether a table's capture trigger is there, switched on, and made with these arguments.
create or replace function @schema@.is_watched(target regclass, wanted text[]) returns boolean
language sql stable set search_path = pg_catalog, pg_temp as $fn$
    select exists (
        select from pg_trigger t
        where t.tgrelid = target and t.tgname in (@captures@) and t.tgenabled = 'A'
          and t.tgfoid = '@schema_name@.capture()'::regprocedure
          and t.tgargs = (select string_agg(convert_to(w, getdatabaseencoding()) || '\x00'::bytea, '' order by o)
                          from unnest(wanted) with ordinality u(w, o)))
$fn$;

-- Tables that need a trigger for `truncate` on themselves, and lack it or have it switched off: Postgres clones row
-- triggers to partitions, statement triggers never. They are a captured partitioned table and all its leaves. Only
-- catalogs are read: asking for the partitions by pg_partition_tree() would wait for a lock on each.
create or replace function @schema@.unwatched_partitions(target regclass default null) returns setof regclass
language sql stable set search_path = pg_catalog, pg_temp as $fn$
    with recursive tree as (
        select c.oid, true as top from pg_trigger t join pg_class c on c.oid = t.tgrelid and c.relkind = 'p'
        where t.tgname in (@captures@) and t.tgparentid = 0 and t.tgrelid = coalesce(target, t.tgrelid)
        union all
        select i.inhrelid, false from tree join pg_inherits i on i.inhparent = tree.oid where not i.inhdetachpending
    )
    select c.oid::regclass from tree join pg_class c on c.oid = tree.oid
    where (c.relkind = 'r' or tree.top)
      and not exists (select from pg_trigger t where t.tgrelid = c.oid and t.tgenabled = 'A'
                      and t.tgname = '@schema_name@_partition')
$fn$;

create or replace function @schema@.watch_partition(part regclass) returns void
language plpgsql set search_path = pg_catalog, pg_temp as $fn$
begin
    perform set_config('@schema_name@.watching', 'on', true);  -- so that on_new_partition() need not look
    execute format('create or replace trigger %I before truncate on %s
                    for each statement execute function %I.capture_partition_truncate()',
        '@schema_name@_partition', part, '@schema_name@');
    execute format('alter table %s enable always trigger %I', part, '@schema_name@_partition');
    perform set_config('@schema_name@.watching', '', true);
end $fn$;

-- Whoever owns a captured table may go on making partitions of it: cloning a trigger asks for the right to its function.
create or replace function @schema@.allow_owner(target regclass) returns void
language plpgsql set search_path = pg_catalog, pg_temp as $fn$
declare
    owner name := (select pg_get_userbyid(c.relowner) from pg_class c where c.oid = target);
begin
    if not has_function_privilege(owner, '@schema_name@.capture()', 'EXECUTE') then
        execute format('grant execute on function %I.capture() to %I', '@schema_name@', owner);
    end if;
end $fn$;

-- Partitions that were made or attached since get their trigger, those that were detached lose it. A table that is busy,
-- or not ours to alter, is left for the next time.
create or replace function @schema@.watch_partitions() returns integer
language plpgsql set search_path = pg_catalog, pg_temp set lock_timeout = '200ms' as $fn$
declare
    part regclass;
    made integer := 0;
begin
    perform @schema@.allow_owner(t.tgrelid) from pg_trigger t
    where t.tgname in (@captures@) and t.tgparentid = 0;
    for part in select * from @schema@.unwatched_partitions() limit 1000 loop
        begin
            perform @schema@.watch_partition(part);
            made := made + 1;
        exception when lock_not_available or insufficient_privilege or undefined_table or deadlock_detected then
            null;
        end;
    end loop;
    for part in select t.tgrelid from pg_trigger t
                where t.tgname = '@schema_name@_partition' and not exists (
                    select from pg_trigger own where own.tgrelid = t.tgrelid and own.tgname in (@captures@))
    loop
        begin
            execute format('drop trigger if exists %I on %s', '@schema_name@_partition', part);
        exception when lock_not_available or insufficient_privilege or undefined_table or deadlock_detected then
            null;
        end;
    end loop;
    return made;
end $fn$;

-- The same at once, in the transaction that makes or attaches a partition, or gives the table another owner. It must
-- never be why that fails.
create or replace function @schema@.on_new_partition() returns event_trigger
language plpgsql security definer set search_path = pg_catalog, pg_temp set lock_timeout = '200ms' as $fn$
declare
    part regclass;
begin
    if current_setting('@schema_name@.watching', true) = 'on' then return; end if;
    perform @schema@.allow_owner(t.tgrelid) from pg_trigger t join pg_event_trigger_ddl_commands() d on d.objid = t.tgrelid
    where t.tgname in (@captures@) and t.tgparentid = 0 and d.classid = 'pg_class'::regclass;
    for part in select p from @schema@.unwatched_partitions() p
                where exists (select from pg_event_trigger_ddl_commands() d where d.classid = 'pg_class'::regclass
                              and d.objid in (select a from pg_partition_ancestors(p) a))
    loop
        perform @schema@.watch_partition(part);
    end loop;
exception when others then
    raise warning '@schema_name@: a partition has no trigger for truncate yet: %', sqlerrm;
end $fn$;

-- Only a superuser, or who a cloud provider lets, can have an event trigger. Without it `evermark up` sees to partitions.
do $do$
begin
    if not exists (select from pg_catalog.pg_event_trigger where evtname = '@schema_name@_partitions') then
        create event trigger "@schema_name@_partitions" on ddl_command_end when tag in ('CREATE TABLE', 'ALTER TABLE')
            execute function @schema@.on_new_partition();
        alter event trigger "@schema_name@_partitions" enable always;
    end if;
exception when insufficient_privilege then
    null;
end $do$;

-- Stop capturing a table. What it wrote stays.
create or replace function @schema@.unwatch(target regclass) returns void
language plpgsql set search_path = pg_catalog, pg_temp as $fn$
declare
    part regclass;
begin
    for part in
        with recursive tree as (select target::oid as oid union all
                                select i.inhrelid from tree join pg_inherits i on i.inhparent = tree.oid)
        select t.tgrelid from tree join pg_trigger t on t.tgrelid = tree.oid
        where t.tgname = '@schema_name@_partition'
    loop
        execute format('drop trigger if exists %I on %s', '@schema_name@_partition', part);
    end loop;
    execute format('drop trigger if exists %I on %s', '@capture@', target);
    execute format('drop trigger if exists %I on %s', '@schema_name@_capture', target);
    execute format('drop trigger if exists %I on %s', '@schema_name@_truncate', target);
end $fn$;

revoke all on all functions in schema @schema@ from public;
