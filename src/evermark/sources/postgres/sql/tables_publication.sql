-- The publication of the tables that the file names, made or brought up to date. One statement is one transaction:
-- nothing is left of it if a table cannot be published without breaking its users' updates. Its comment keeps what it looked
-- like, so that a change by somebody else is noticed.
do $do$
declare
    tables jsonb := @tables@;
    version integer := current_setting('server_version_num')::int;
    fingerprint text := $q$@fingerprint@$q$;
    was text;
    kept text;
    each jsonb;
    relation regclass;
    listed text;
    members text[] := '{}';
    bad record;
begin
    if version < 150000 then
        fingerprint := $q$@fingerprint_14@$q$;
    end if;
    for each in select value from jsonb_array_elements(tables) loop
        relation := to_regclass(each ->> 'name');
        if relation is null then
            raise exception 'table % does not exist', each ->> 'name' using errcode = 'EV001',
                hint = 'create it first, or correct its name; written as SQL does: schema.table, with double quotes where'
                       ' it has capitals: public."Orders"';
        end if;
        listed := '';
        if jsonb_array_length(each -> 'columns') + jsonb_array_length(each -> 'exclude') > 0 then
            select format(' (%s)', string_agg(quote_ident(a.attname), ', ' order by a.attnum)) into listed
            from pg_catalog.pg_attribute a
            where a.attrelid = relation and a.attnum > 0 and not a.attisdropped
              and (a.attgenerated = '' or a.attgenerated = 's' and version >= 180000)
              and (jsonb_array_length(each -> 'columns') = 0 or each -> 'columns' ? a.attname::text)
              and not each -> 'exclude' ? a.attname::text;
        end if;
        -- As the catalog writes it: a schema's name may be a reserved word, which to_regclass takes and this would not.
        select members || format('only %I.%I%s%s', n.nspname, c.relname, listed, each ->> 'where') into members
        from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace where c.oid = relation;
    end loop;

    execute fingerprint into was;
    if was is null then
        execute format('create publication @publication@ for table %s', array_to_string(members, ', '));
    else
        select obj_description(p.oid, 'pg_publication') into kept
        from pg_catalog.pg_publication p where p.pubname = @publication_literal@;
        if kept is not null and kept <> '@mark@' || was then
            raise exception 'publication @publication_name@ was changed by somebody: rows may be missing'
                using errcode = 'EV001', hint = 'see `evermark doctor`; to begin anew: `evermark source uninstall`, then install';
        end if;
        execute format('alter publication @publication@ set table %s', array_to_string(members, ', '));
    end if;
    alter publication @publication@ set (publish = 'insert, update, delete, truncate', publish_via_partition_root = true);
    if version >= 180000 then
        execute 'alter publication @publication@ set (publish_generated_columns = stored)';
    end if;
    for bad in execute $q$@identity@$q$ loop
        raise exception '% %', bad.name, bad.trouble using errcode = 'EV001', hint = bad.mend;
    end loop;
    execute fingerprint into was;
    execute format('comment on publication @publication@ is %L', '@mark@' || was);
end $do$;
