-- Which State this is: what is kept outside it for it (leases and checkpoints in etcd) says so, and is no other's.
create table state_identity (
    id   boolean primary key default true check (id),
    uuid uuid not null
);
insert into state_identity (uuid) values (gen_random_uuid());
