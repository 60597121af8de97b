-- Which events of a replica stand at which positions of its source (sources/replica/plan.py). `version` is for changing it by
-- compare-and-set.
create table replica_plans (
    source  text collate "C" primary key,
    version bigint not null,
    plan    text not null
);
