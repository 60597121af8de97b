-- Nobody reads any more: triggers first, then everything they wrote to.
do $do$
declare
    target regclass;
begin
    for target in select t.tgrelid::regclass from pg_catalog.pg_trigger t
                  where t.tgname in (@captures@) and t.tgparentid = 0
    loop
        perform @schema@.unwatch(target);
    end loop;
end $do$;
drop schema @schema@ cascade;
