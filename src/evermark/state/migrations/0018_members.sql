-- An instance announces itself here, and goes on saying that it lives; the others share the work out among those who do.
alter table instances
    add column leases   text[] not null default '{}',    -- the leases that it can take
    add column draining boolean not null default false;  -- a person asked it to hand over everything
