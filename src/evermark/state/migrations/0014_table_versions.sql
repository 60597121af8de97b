-- How the tables of a source looked, one row for each version that an event of op `schema` told. `shape` is a digest of the
-- table's description in the slot; `columns` and `hashed` are JSON lists of names.
create table table_versions (
    source   text not null,
    stream   text not null,
    version  integer not null,
    position text collate "C" not null,
    shape    text not null,
    columns  text not null,
    hashed   text not null,
    primary key (source, stream, version)
);
