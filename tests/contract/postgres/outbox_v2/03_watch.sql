-- Capturing tables: `select watch('public.orders')`, by hand or by `evermark source install`.

-- Capture a table. Run again after a change of its columns: types are looked up, the schema version grows. Nothing is
-- dropped: a trigger is made, or replaced in place, and only when something about it changed.
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
    changed boolean := false;
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

    insert into @schema@.streams (name, columns) values (stream_name, now_columns) on conflict (name) do nothing;
    select * into stream from @schema@.streams where name = stream_name for update;
    if stream.columns is distinct from now_columns then
        update @schema@.streams set columns = now_columns,
            schema_version = schema_version + (case when columns is null then 0 else 1 end)
        where id = stream.id returning * into stream;
    end if;

    wanted := array[stream.id::text, stream_name, stream.schema_version::text,
        @schema@.key_columns(target)::text, @schema@.columns_of_type(target, 'numeric')::text,
        @schema@.columns_of_type(target, 'bigint')::text, excluded::text, hashed::text];
    if not @schema@.is_watched(target, wanted) then
        execute format('create or replace trigger %I after insert or update or delete on %s
                        for each row execute function %I.capture(%s)',
            '@schema_name@_capture', target, '@schema_name@',
            (select string_agg(quote_literal(w), ', ' order by o) from unnest(wanted) with ordinality t(w, o)));
        execute format('create or replace trigger %I after truncate on %s
                        for each statement execute function %I.capture_truncate(%L, %L, %L)',
            '@schema_name@_truncate', target, '@schema_name@', wanted[1], wanted[2], wanted[3]);
        execute format('alter table %s enable always trigger %I', target, '@schema_name@_capture');
        execute format('alter table %s enable always trigger %I', target, '@schema_name@_truncate');
        changed := true;
    end if;
    return stream_name || case when changed then ' captured' else ' unchanged' end;
end $fn$;

-- Whether a table's capture trigger is there, switched on, and made with these arguments.
create or replace function @schema@.is_watched(target regclass, wanted text[]) returns boolean
language sql stable set search_path = pg_catalog, pg_temp as $fn$
    select exists (
        select from pg_trigger t
        where t.tgrelid = target and t.tgname = '@schema_name@_capture' and t.tgenabled = 'A'
          and t.tgfoid = '@schema_name@.capture()'::regprocedure
          and t.tgargs = (select string_agg(convert_to(w, getdatabaseencoding()) || '\x00'::bytea, '' order by o)
                          from unnest(wanted) with ordinality u(w, o)))
$fn$;

-- Stop capturing a table. What it wrote stays.
create or replace function @schema@.unwatch(target regclass) returns void
language plpgsql set search_path = pg_catalog, pg_temp as $fn$
begin
    execute format('drop trigger if exists %I on %s', '@schema_name@_capture', target);
    execute format('drop trigger if exists %I on %s', '@schema_name@_truncate', target);
end $fn$;

revoke all on all functions in schema @schema@ from public;
