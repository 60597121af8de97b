-- From version 2 to 3, in place: what `create … if not exists` in 01_schema.sql leaves as it was. It runs in one
-- transaction with 01 to 03, at every install, and changes nothing the second time. Each step is a `do` block that
-- looks whether it is needed. A step that alters the publication notes the new fingerprint of every reader whose
-- fingerprint was right before, here, in the same transaction: a reader would take the change for somebody else's.

-- An event says which key a change took away from its record. Looked for first: adding a column locks out all writers.
do $do$
begin
    if not exists (select from pg_catalog.pg_attribute
                   where attrelid = '@schema@.events'::regclass and attname = 'previous_key') then
        alter table @schema@.events add column previous_key text;
    end if;
end $do$;

-- Publications from before an event had all its columns get the new ones, from version 15 on, and are known by their new
-- look in the same transaction: whoever reads one meanwhile sees either, and no change by a stranger. One that a stranger
-- changed stays as it is: rows may be missing, and that is mended, not painted over.
do $do$
declare
    reader record;
    columns text;
begin
    if current_setting('server_version_num')::int < 150000 or not exists (select from @schema@.readers) then
        return;
    end if;
    select string_agg(attname, ', ' order by attnum) into columns
    from pg_catalog.pg_attribute where attrelid = '@schema@.events'::regclass and attname in (@published@);
    for reader in
        select r.publication, r.fingerprint, coalesce('where (' || pg_get_expr(p.prqual, p.prrelid) || ')', '') as share
        from @schema@.readers r
        join pg_catalog.pg_publication b on b.pubname = r.publication
        join pg_catalog.pg_publication_rel p on p.prpubid = b.oid and p.prrelid = '@schema@.events'::regclass
        where r.fingerprint = @schema@.publication_fingerprint(r.publication)
          and exists (select from pg_catalog.pg_attribute a
                      where a.attrelid = p.prrelid and a.attname in (@published@) and a.attnum <> all (p.prattrs))
    loop
        begin
            execute format('alter publication %I set table @schema@.events (%s) %s',
                           reader.publication, columns, reader.share);
            update @schema@.readers set fingerprint = @schema@.publication_fingerprint(publication)
            where publication = reader.publication and fingerprint = reader.fingerprint;
        exception when insufficient_privilege then
            raise notice 'publication % belongs to somebody else, who has to run `evermark source install` again',
                reader.publication;
        end;
    end loop;
end $do$;
