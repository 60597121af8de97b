-- Published tables, and partitions of them, whose UPDATE and DELETE the server refuses because of the publication: they
-- have no replica identity, or the publication leaves out a column of it, or filters rows by a column outside it.
with recursive published as (
    select r.prrelid as root, r.prrelid as oid,
           (select array_agg(x.number::int2) from jsonb_array_elements_text(
                case when jsonb_typeof(to_jsonb(r) -> 'prattrs') = 'array' then to_jsonb(r) -> 'prattrs' end) x(number)) as listed,
           array(select distinct (m.number)[1]::int2
                 from regexp_matches(to_jsonb(r) ->> 'prqual', ':varattno (\d+)', 'g') m(number)) as filtered
    from pg_catalog.pg_publication_rel r join pg_catalog.pg_publication p on p.oid = r.prpubid
    where p.pubname = @publication_literal@
    union all
    select t.root, i.inhrelid, t.listed, t.filtered
    from published t join pg_catalog.pg_inherits i on i.inhparent = t.oid join pg_catalog.pg_class c on c.oid = i.inhrelid
    where c.relispartition
), facts as (
    select t.root, c.oid, c.relkind, c.relreplident as identity, format('%I.%I', n.nspname, c.relname) as name,
           format('%I.%I', rn.nspname, rc.relname) as root_name,
           (select array_agg(a.attname order by a.attname) from pg_catalog.pg_index x
            join pg_catalog.pg_attribute a on a.attrelid = x.indrelid and a.attnum = any (x.indkey::int2[])
            where x.indrelid = c.oid and x.indimmediate and x.indislive
              and (x.indisvalid or c.relkind = 'p')
              and case c.relreplident when 'd' then x.indisprimary when 'i' then x.indisreplident else false end) as key,
           (select array_agg(a.attname order by a.attname) from pg_catalog.pg_attribute a
            where a.attrelid = t.root and a.attnum = any (t.listed)) as listed,
           (select array_agg(a.attname order by a.attname) from pg_catalog.pg_attribute a
            where a.attrelid = t.root and a.attnum = any (t.filtered)) as filtered,
           (select format('%I', ic.relname) from pg_catalog.pg_index x join pg_catalog.pg_class ic on ic.oid = x.indexrelid
            where x.indrelid = c.oid and x.indisunique and x.indimmediate and x.indisvalid
              and x.indpred is null and x.indexprs is null
              and not exists (select from pg_catalog.pg_attribute a where a.attrelid = x.indrelid
                              and a.attnum = any (x.indkey::int2[]) and not a.attnotnull)
            order by x.indisprimary desc, x.indnkeyatts, ic.relname limit 1) as candidate
    from published t join pg_catalog.pg_class c on c.oid = t.oid join pg_catalog.pg_namespace n on n.oid = c.relnamespace
    join pg_catalog.pg_class rc on rc.oid = t.root join pg_catalog.pg_namespace rn on rn.oid = rc.relnamespace
)
select j.name, j.trouble, j.mend from (
    select f.root, f.oid, f.name, case
        when f.identity <> 'f' and f.key is null then 'has no replica identity: its updates and deletes would fail'
        when f.identity = 'f' and f.listed is not null then
            'has replica identity full, and not all of its columns are published: its updates and deletes would fail'
        when f.listed is not null and not f.key <@ f.listed then
            format('has %s in its replica identity, which is not published: its updates and deletes would fail',
                   (select string_agg(format('column %s', k), ', ') from unnest(f.key) k where k <> all (f.listed)))
        when f.filtered is not null and f.identity <> 'f' and not f.filtered <@ f.key then
            format('is filtered by %s, which is not in its replica identity: its updates and deletes would fail',
                   (select string_agg(format('column %s', k), ', ') from unnest(f.filtered) k where k <> all (f.key)))
        when f.oid <> f.root and ((f.identity = 'f') <> (r.identity = 'f') or f.key is distinct from r.key) then
            format('has another replica identity than %s, of which it is a partition', f.root_name)
    end as trouble, case
        when f.listed is not null and (f.identity = 'f' or f.key is not null and not f.key <@ f.listed) then
            case when f.candidate is not null and f.identity = 'f'
                 then format('alter table %s replica identity using index %s; or publish all columns', f.name, f.candidate)
                 else format('publish all columns of the replica identity of %s (`columns`, `exclude`)', f.root_name) end
        when f.filtered is not null and f.key is not null and f.identity <> 'f' and not f.filtered <@ f.key then
            format('alter table %s replica identity full; or leave `where` out, and filter in the subscriptions', f.name)
        when f.candidate is not null then format('alter table %s replica identity using index %s;', f.name, f.candidate)
        else format('alter table %s add primary key (...); or, at the price of more WAL: alter table %s replica identity full;',
                    f.name, f.name)
    end as mend
    from facts f join facts r on r.oid = f.root and r.root = f.root
) j where j.trouble is not null order by j.root, j.oid
