-- Functions of the outbox. All of them pin search_path, and are executable only by whom they are granted to.

-- JSON numbers as JSON strings, in arrays too: receivers read numbers as doubles and would lose digits.
create or replace function @schema@.as_text(value jsonb) returns jsonb
language sql immutable parallel safe set search_path = pg_catalog, pg_temp as $fn$
    select case jsonb_typeof(value)
        when 'number' then to_jsonb(value #>> '{}')
        when 'array' then (
            select coalesce(jsonb_agg(case when jsonb_typeof(v) = 'number' then to_jsonb(v #>> '{}')
                                           when jsonb_typeof(v) = 'array' then @schema@.as_text(v)
                                           else v end order by o), '[]'::jsonb)
            from jsonb_array_elements(value) with ordinality as t(v, o))
        else value end
$fn$;

-- A row as jsonb, if need be column by column: json may hold what jsonb cannot (\u0000, half a surrogate pair, 1e400000).
-- Such a value comes as the text it is. What does not fit into jsonb, which ends at 256 MB, is left out: a user's
-- transaction does not fail for it.
create or replace function @schema@.row_image(changed anyelement, relation oid, excluded text[]) returns jsonb
language plpgsql set search_path = pg_catalog, pg_temp as $fn$
declare
    name text;
    value jsonb;
    found_so_far jsonb := '{}';
begin
    begin
        return to_jsonb(changed);
    exception when untranslatable_character or invalid_text_representation or numeric_value_out_of_range
                   or program_limit_exceeded then
        null;
    end;
    for name in select a.attname from pg_attribute a
                where a.attrelid = relation and a.attnum > 0 and not a.attisdropped and a.attname <> all (excluded)
                order by a.attnum
    loop
        begin
            begin
                execute format('select to_jsonb(($1).%I)', name) into value using changed;
            exception when untranslatable_character or invalid_text_representation or numeric_value_out_of_range then
                execute format('select to_jsonb(($1).%I::text)', name) into value using changed;
            end;
            found_so_far := found_so_far || jsonb_build_object(name, value);
        exception when program_limit_exceeded then
            null;
        end;
    end loop;
    return found_so_far;
end $fn$;

-- Whether the column of this number has another name by now. Not asked of pg_attribute: in repeatable read a query shows
-- the catalog as it was when the transaction began, while its rows have their new names already.
create or replace function @schema@.is_moved(captured oid, number integer, name text) returns boolean
language sql stable as $fn$
    select coalesce((pg_catalog.pg_identify_object_as_address(1259, captured, number)).object_names[3]
                    operator(pg_catalog.<>) name, true)
$fn$;

-- Columns that are what they were at install. A dump carries triggers to tables with other numbers: there it is names
-- that tell, and what is not known by name does not pass until `evermark source install` runs.
create or replace function @schema@.unmoved(captured oid, known text[], relation oid) returns text[]
language sql stable set search_path = pg_catalog, pg_temp as $fn$
    select coalesce(array_agg(k.name), '{}') from unnest(known) with ordinality k(name, number)
    where k.name is not null and (
        not @schema@.is_moved(captured, k.number::integer, k.name)
        or (captured <> relation and captured not in (select a from pg_partition_ancestors(relation) a)))
$fn$;

-- The image of a row as it may leave: chosen columns left out or hashed, numerics as text, whole numbers as text when
-- beyond what a double can hold. If a column to hide is not what it was at install any more (renamed, and its name
-- perhaps given to another), only columns that still are pass: a rename must not publish what was to be hidden.
-- `known`: columns by number, of the captured table; null from a trigger that version 3 made, which knows names alone.
create or replace function @schema@.image(
    image jsonb, stream_id bigint, numerics text[], bigints text[], excluded text[], hashed text[],
    captured oid, known text[], relation oid) returns jsonb
language plpgsql stable set search_path = pg_catalog, pg_temp as $fn$
declare
    name text;
    number integer;
    passing text[];
begin
    if known is null then
        if not image ?& (excluded || hashed) then
            select array_agg(c.value ->> 0) into passing
            from @schema@.streams s, jsonb_array_elements(s.columns) c where s.id = stream_id;
        end if;
    else
        foreach name in array excluded || hashed loop
            number := array_position(known, name);
            if number is not null and @schema@.is_moved(captured, number, name) then
                passing := @schema@.unmoved(captured, known, relation);
                exit;
            end if;
        end loop;
    end if;
    if passing is not null then
        select coalesce(jsonb_object_agg(i.key, i.value), '{}') into image
        from jsonb_each(image) i where i.key = any (passing);
    end if;
    image := image - excluded;
    foreach name in array hashed loop
        if jsonb_typeof(image -> name) <> 'null' then
            image := jsonb_set(image, array[name], to_jsonb(
                'sha256:' || encode(sha256(convert_to(image ->> name, 'UTF8')), 'hex')), false);
        end if;
    end loop;
    foreach name in array numerics loop
        if jsonb_typeof(image -> name) in ('number', 'array') then
            image := jsonb_set(image, array[name], @schema@.as_text(image -> name), false);
        end if;
    end loop;
    foreach name in array bigints loop
        if (jsonb_typeof(image -> name) = 'number' and abs((image ->> name)::numeric) > 9007199254740991)
           or jsonb_typeof(image -> name) = 'array' then
            image := jsonb_set(image, array[name], @schema@.as_text(image -> name), false);
        end if;
    end loop;
    return image;
end $fn$;

-- The columns that identify a row of this table, and those whose numbers need care. Read at install; the capture
-- function reads them again only when a key column was renamed since.
create or replace function @schema@.key_columns(target regclass) returns text[]
language sql stable set search_path = pg_catalog, pg_temp as $fn$
    select coalesce(array_agg(a.attname::text order by k.o), '{}')
    from pg_index i
    cross join lateral unnest(i.indkey::int2[]) with ordinality as k(attnum, o)
    join pg_attribute a on a.attrelid = i.indrelid and a.attnum = k.attnum
    where i.indrelid = target and k.o <= i.indnkeyatts
      and i.indexrelid = coalesce(
          (select indexrelid from pg_index where indrelid = target and indisprimary),
          (select indexrelid from pg_index where indrelid = target and indisreplident and indpred is null))
$fn$;

create or replace function @schema@.columns_of_type(target regclass, wanted regtype) returns text[]
language sql stable set search_path = pg_catalog, pg_temp as $fn$
    with recursive base as (
        select a.attname::text as name, a.attnum, a.atttypid as type
        from pg_attribute a where a.attrelid = target and a.attnum > 0 and not a.attisdropped
        union all
        select b.name, b.attnum, case when t.typtype = 'd' then t.typbasetype else t.typelem end
        from base b join pg_type t on t.oid = b.type
        where t.typtype = 'd' or (t.typelem <> 0 and t.typlen = -1 and t.typcategory = 'A')
    )
    select coalesce(array_agg(name order by attnum), '{}') from base where type = wanted
$fn$;

-- One row changed. Arguments: stream id, stream name, schema version, columns: key, numeric, bigint, excluded, hashed;
-- where one is hidden, also the captured table and all its columns, by number. It raises nothing of its own: what it cannot write, it must not let commit either, or the change would be lost in silence.
create or replace function @schema@.capture() returns trigger
language plpgsql security definer
set search_path = pg_catalog, pg_temp
set timezone = 'UTC' set datestyle = 'ISO, MDY' set intervalstyle = 'iso_8601'
set bytea_output = 'hex' set extra_float_digits = 1 as $fn$
declare
    keys text[] := tg_argv[3]::text[];
    numerics text[] := tg_argv[4]::text[];
    bigints text[] := tg_argv[5]::text[];
    excluded text[] := tg_argv[6]::text[];
    hashed text[] := tg_argv[7]::text[];
    plain boolean := tg_argv[4] = '{}' and tg_argv[5] = '{}' and tg_argv[6] = '{}' and tg_argv[7] = '{}';
    number bigint := tg_argv[0]::bigint;
    captured oid := tg_argv[8]::oid;
    known text[] := tg_argv[9]::text[];
    after_image jsonb;
    before_image jsonb;
    image jsonb;
    record_key text;
    earlier_key text;
begin
    begin
        if tg_op <> 'DELETE' then after_image := to_jsonb(new); end if;
        if tg_op <> 'INSERT' then before_image := to_jsonb(old); end if;
    exception when untranslatable_character or invalid_text_representation or numeric_value_out_of_range
                   or program_limit_exceeded then
        if tg_op <> 'DELETE' then after_image := @schema@.row_image(new, tg_relid, excluded); end if;
        if tg_op <> 'INSERT' then before_image := @schema@.row_image(old, tg_relid, excluded); end if;
    end;
    if not plain then
        if tg_op <> 'DELETE' then
            after_image := @schema@.image(
                after_image, number, numerics, bigints, excluded, hashed, captured, known, tg_relid);
        end if;
        if tg_op <> 'INSERT' then
            before_image := @schema@.image(
                before_image, number, numerics, bigints, excluded, hashed, captured, known, tg_relid);
        end if;
    end if;
    image := coalesce(after_image, before_image);
    if not image ?& keys then keys := @schema@.key_columns(tg_relid); end if;
    if cardinality(keys) = 1 then
        record_key := image ->> keys[1];
        earlier_key := before_image ->> keys[1];
    elsif cardinality(keys) > 1 then
        select jsonb_object_agg(name, image -> name)::text into record_key from unnest(keys) as name;
        if tg_op = 'UPDATE' then
            select jsonb_object_agg(name, before_image -> name)::text into earlier_key from unnest(keys) as name;
        end if;
    end if;
    -- Whoever keeps records by key must hear that one is free now. Only here it is known which columns make the key.
    earlier_key := case when tg_op = 'UPDATE' then nullif(earlier_key, record_key) end;
    insert into @schema@.events (stream_id, stream, op, key, payload, before, schema_version, previous_key)
    values (number, tg_argv[1], lower(tg_op), record_key, after_image, before_image,
            tg_argv[2]::integer, earlier_key);
    return null;
end $fn$;

-- The whole table was truncated.
create or replace function @schema@.capture_truncate() returns trigger
language plpgsql security definer set search_path = pg_catalog, pg_temp as $fn$
begin
    insert into @schema@.events (stream_id, stream, op, schema_version)
    values (tg_argv[0]::bigint, tg_argv[1], 'truncate', tg_argv[2]::integer);
    perform @schema@.mark_truncating(tg_relid, false);
    return null;
end $fn$;

-- Captured tables that are being truncated as a whole by the statement that runs. The mark lives in a setting of the
-- transaction: if the statement fails it is undone with it.
create or replace function @schema@.truncating() returns oid[]
language sql stable set search_path = pg_catalog, pg_temp as $fn$
    select coalesce(nullif(current_setting('@schema_name@.truncating', true), ''), '{}')::oid[]
$fn$;

create or replace function @schema@.mark_truncating(target oid, going_on boolean) returns void
language plpgsql set search_path = pg_catalog, pg_temp as $fn$
declare
    marked oid[] := @schema@.truncating();
begin
    if going_on <> (target = any (marked)) then
        marked := case when going_on then marked || target else array_remove(marked, target) end;
        perform set_config('@schema_name@.truncating', marked::text, true);
    end if;
end $fn$;

-- The captured table that a partition's rows belong to, with the arguments of its capture trigger. None when the table
-- is not captured, or is no partition of a captured one any more: Postgres takes the cloned trigger away at `detach`.
create or replace function @schema@.captured_root(target oid, out root oid, out args text[])
language plpgsql stable set search_path = pg_catalog, pg_temp as $fn$
declare
    rest bytea;
    zero integer;
begin
    with recursive upwards as (
        select t.tgparentid, t.tgrelid, t.tgargs from pg_trigger t
        where t.tgrelid = target and t.tgname in (@captures@) and t.tgenabled <> 'D'
        union all
        select t.tgparentid, t.tgrelid, t.tgargs from upwards u join pg_trigger t on t.oid = u.tgparentid
    )
    select u.tgrelid, u.tgargs into root, rest from upwards u where u.tgparentid = 0;
    zero := position('\x00'::bytea in rest);
    while zero > 0 loop
        args := args || convert_from(substring(rest from 1 for zero - 1), getdatabaseencoding());
        rest := substring(rest from zero + 1);
        zero := position('\x00'::bytea in rest);
    end loop;
end $fn$;

-- Before a captured partitioned table, or one of its partitions, is truncated. The whole table: its partitions' triggers
-- fire too, and are told to keep still; one event says it (capture_truncate). One partition: the other rows stay, so
-- each row that goes is a delete. It costs what deleting the rows would cost. Postgres truncates rows, too, that came
-- after the snapshot of a transaction in repeatable read; nothing in SQL can see those.
create or replace function @schema@.capture_partition_truncate() returns trigger
language plpgsql security definer
set search_path = pg_catalog, pg_temp set row_security = off
set timezone = 'UTC' set datestyle = 'ISO, MDY' set intervalstyle = 'iso_8601'
set bytea_output = 'hex' set extra_float_digits = 1 as $fn$
declare
    top record;
    keys text[];
    plain boolean;
begin
    select * into top from @schema@.captured_root(tg_relid);
    if top.root is null then
        return null;
    elsif top.root = tg_relid then
        if (select relkind = 'p' from pg_class where oid = tg_relid) then
            perform @schema@.mark_truncating(tg_relid, true);
        end if;
        return null;
    elsif top.root = any (@schema@.truncating()) then
        return null;
    end if;
    if current_setting('transaction_isolation') not in ('read committed', 'read uncommitted') then
        raise warning 'truncate of partition %: rows that came after the snapshot of this transaction are not captured',
            tg_relid::regclass using hint = 'truncate a captured partition in a transaction of isolation read committed';
    end if;
    plain := top.args[5:8] = '{"{}","{}","{}","{}"}'::text[];
    keys := top.args[4]::text[];
    execute format('insert into @schema@.events (stream_id, stream, op, key, before, schema_version)
        select $1, $2, ''delete'', @schema@.record_key(i.image, $4, $5), i.image, $3
        from (select case when $6 then @schema@.row_image(r.*, $5, $9)
                     else @schema@.image(@schema@.row_image(r.*, $5, $9), $1, $7, $8, $9, $10, $11, $12, $5) end as image
              from only %s r) i',
        tg_relid::regclass)  -- r.* is the row, whatever its columns are called: r alone would be a column r
    using top.args[1]::bigint, top.args[2], top.args[3]::integer, keys, tg_relid, plain,
          top.args[5]::text[], top.args[6]::text[], top.args[7]::text[], top.args[8]::text[],
          top.args[9]::oid, top.args[10]::text[];
    return null;
end $fn$;

-- The key of a row, by the columns that were its key at install, or that are now when one was renamed.
create or replace function @schema@.record_key(image jsonb, keys text[], target oid) returns text
language plpgsql stable set search_path = pg_catalog, pg_temp as $fn$
begin
    if not image ?& keys then keys := @schema@.key_columns(target); end if;
    if cardinality(keys) = 1 then return image ->> keys[1]; end if;
    return (select jsonb_object_agg(name, image -> name)::text from unnest(keys) as name);
end $fn$;

-- The plain outbox: `select emit('billing', 'invoice-7', '{"paid": true}')` inside the user's own transaction.
create or replace function @schema@.emit(stream text, key text, payload jsonb) returns uuid
language plpgsql security definer set search_path = pg_catalog, pg_temp as $fn$
#variable_conflict use_column
declare
    number bigint;
    made uuid;
begin
    if emit.stream is null or emit.stream = '' then
        raise exception 'emit: a stream needs a name' using errcode = 'invalid_parameter_value';
    end if;
    select s.id into number from @schema@.streams s where s.name = emit.stream;
    -- A new stream is registered by whoever comes first; nobody waits for that transaction to end. Until then its
    -- events carry the name alone.
    if number is null and pg_try_advisory_xact_lock(hashtextextended('@schema_name@.stream.' || emit.stream, 0)) then
        begin
            insert into @schema@.streams (name) values (emit.stream) on conflict (name) do nothing
            returning id into number;
        exception when serialization_failure then
            null;  -- somebody came first, whom our transaction, in repeatable read, cannot see
        end;
        if number is null then
            select s.id into number from @schema@.streams s where s.name = emit.stream;
        end if;
    end if;
    insert into @schema@.events (stream_id, stream, op, key, payload)
    values (number, emit.stream, 'message', emit.key, emit.payload)
    returning id into made;
    return made;
end $fn$;

-- A replay is asked for by naming its window, the same one again included; clearing it asks for nothing.
create or replace function @schema@.notify_replay_request() returns trigger
language plpgsql security definer set search_path = pg_catalog, pg_temp as $fn$
begin
    if new.replay_from_ts is not null then
        insert into @schema@.events (stream_id, stream, op, key, payload)
        values (new.id, new.name, 'control', new.name, jsonb_build_object(
            'type', 'control', 'action', 'replay', 'stream', new.name,
            'replay_from_ts', new.replay_from_ts, 'replay_to_ts', new.replay_to_ts));
    end if;
    return null;
end $fn$;

create or replace trigger on_replay_request
after update of replay_from_ts, replay_to_ts on @schema@.streams
for each row execute function @schema@.notify_replay_request();

-- A reader says how far it has everything. Never lower: the reader may have been started again from an older place.
create or replace function @schema@.note_floor(reader name, at xid8) returns void
language sql security definer set search_path = pg_catalog, pg_temp as $fn$
    update @schema@.readers r set floor = at, floor_system = s.system_identifier from pg_control_system() s
    where slot = reader and (floor is null or floor < at or floor_system is distinct from s.system_identifier)
$fn$;

-- A reader has closed the hole that a changed publication may have left: this is what it looks like from now on.
create or replace function @schema@.note_mended(reader name) returns void
language sql security definer set search_path = pg_catalog, pg_temp as $fn$
    update @schema@.readers set fingerprint = @schema@.publication_fingerprint(publication) where slot = reader
$fn$;

-- Partitions for the days ahead, and the end of those past retention. A partition goes in two steps: first it is
-- sealed (no writer is in it; everything in it commits before this LSN), later, when every reader has confirmed that
-- LSN and nothing came in since, it is dropped. Rows are never moved: that would publish them twice.
create or replace function @schema@.maintain(retention interval default '7 days', ahead integer default 7)
returns table (created integer, dropped integer, waiting integer)
language plpgsql security definer set search_path = pg_catalog, pg_temp set lock_timeout = '200ms'
set timezone = 'UTC' as $fn$
declare
    today date := current_date;
    day date;
    part text;
    confirmed pg_lsn;
    old record;
    late boolean;
begin
    created := 0; dropped := 0; waiting := 0;
    perform pg_advisory_xact_lock(hashtextextended('@schema_name@.maintain', 0));
    perform @schema@.watch_partitions();
    for day in select today + n from generate_series(-1, least(ahead, 366)) n loop
        part := 'events_p' || to_char(day, 'YYYYMMDD');
        continue when to_regclass(format('%I.%I', '@schema_name@', part)) is not null;
        perform 1 from @schema@.events_default where created_at >= day and created_at < day + 1 limit 1;
        if found then continue; end if;
        begin
            execute format('create table %I.%I (like %I.events including defaults including constraints)',
                           '@schema_name@', part, '@schema_name@');
            execute format('alter table %I.events attach partition %I.%I for values from (%L) to (%L)',
                           '@schema_name@', '@schema_name@', part, day, day + 1);
            created := created + 1;
        exception when lock_not_available or check_violation then
            waiting := waiting + 1;
        end;
    end loop;

    select min(coalesce(s.confirmed_flush_lsn, '0/0'::pg_lsn)) into confirmed
    from @schema@.readers r left join pg_replication_slots s on s.slot_name = r.slot;
    for old in
        select c.relname, e.lsn, e.snapshot
        from pg_inherits i join pg_class c on c.oid = i.inhrelid left join @schema@.seals e on e.partition = c.relname
        where i.inhparent = '@schema_name@.events'::regclass and c.relname ~ '^events_p[0-9]{8}$'
          and to_date(substr(c.relname, 9), 'YYYYMMDD') + 1 <= (now() - retention)
        order by c.relname
    loop
        begin
            if old.lsn is null then
                execute format('lock table %I.%I in share row exclusive mode', '@schema_name@', old.relname);
                insert into @schema@.seals (partition, lsn, snapshot)
                values (old.relname, pg_current_wal_insert_lsn(), pg_current_snapshot());
                waiting := waiting + 1;
            elsif confirmed is null or confirmed < old.lsn then
                waiting := waiting + 1;
            else
                execute format('lock table %I.%I in access exclusive mode', '@schema_name@', old.relname);
                execute format('select exists (select from %I.%I where not pg_visible_in_snapshot(tx, $1))',
                               '@schema_name@', old.relname) into late using old.snapshot;
                delete from @schema@.seals where partition = old.relname;
                if late then
                    waiting := waiting + 1;
                else
                    execute format('drop table %I.%I', '@schema_name@', old.relname);
                    dropped := dropped + 1;
                end if;
            end if;
        exception when lock_not_available then
            waiting := waiting + 1;
        end;
    end loop;
    return next;
end $fn$;
