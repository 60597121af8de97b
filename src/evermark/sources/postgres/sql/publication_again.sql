-- The publication as install makes it, whatever it has become. What it did not publish meanwhile is missing from every
-- slot: this stands only in front of a new one.
do $do$
declare
    columns text := '';
begin
    if current_setting('server_version_num')::int >= 150000 then
        columns := '(id, created_at, stream_id, stream, op, key, payload, before, schema_version) @row_filter_text@';
    end if;
    execute 'alter publication @publication@ set table @schema@.events ' || columns;
    execute 'alter publication @publication@ set (publish = ''insert'', publish_via_partition_root = true)';
end $do$;
