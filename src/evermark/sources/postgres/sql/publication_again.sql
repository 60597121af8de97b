-- The publication as install makes it, whatever it has become. What it did not publish meanwhile is missing from every
-- slot: this stands only in front of a new one.
do $do$
declare
    columns text := '';
begin
    if current_setting('server_version_num')::int >= 150000 then
        -- An outbox that was installed by an older version has fewer of them.
        select '(' || string_agg(attname, ', ' order by attnum) || ') @row_filter_text@' into columns
        from pg_catalog.pg_attribute where attrelid = '@schema@.events'::regclass and attname in (@published@);
    end if;
    execute 'alter publication @publication@ set table @schema@.events ' || columns;
    execute 'alter publication @publication@ set (publish = ''insert'', publish_via_partition_root = true)';
end $do$;
