-- What a publication publishes, as one hash. It holds the catalogs' own numbers: a publication or a membership that
-- was dropped and made again looks the same by name, and has lost rows in between.
select encode(sha256(convert_to(jsonb_build_array(
    to_jsonb(p) - 'pubowner',
    (select coalesce(jsonb_agg(to_jsonb(r) order by r.oid), '[]') from pg_catalog.pg_publication_rel r
     where r.prpubid = p.oid),
    @schemas@)::text, 'UTF8')), 'hex')
from pg_catalog.pg_publication p where p.pubname = @publication_literal@
