-- Only inserts into the outbox are published; partitions as their root, so that a new day changes nothing. From version
-- 15 on only the columns an event is made of.
do $do$
declare
    columns text := '';
begin
    if exists (select from pg_catalog.pg_publication where pubname = @publication_literal@) then
        return;
    end if;
    if current_setting('server_version_num')::int >= 150000 then
        -- An outbox that was installed by an older version has fewer of them.
        select '(' || string_agg(attname, ', ' order by attnum) || ') @row_filter_text@' into columns
        from pg_catalog.pg_attribute where attrelid = '@schema@.events'::regclass and attname in (@published@);
    end if;
    execute 'create publication @publication@ for table @schema@.events ' || columns
        || ' with (publish = ''insert'', publish_via_partition_root = true)';
end $do$;
