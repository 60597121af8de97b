"""Replicas: tables in several databases that stay equal, though their peers meet seldom and in any order.

    a row changes          capture, in the transaction of the change: triggers        `sqlite`, `postgres`
      └─ Event             (origin, seq), the row's image, its Version                `event`
           └─ Ranges       which numbers of each origin a node holds                  `ranges`
                ├─ pages   what a peer lacks, by (origin, seq)                        `paging`
                ├─ rows    which image wins, whatever the order of arrival            `event.winners`, `event.beats`
                ├─ floors  what every member has, and may be collected                `members`
                └─ digests what differs all the same, by ranges of keys               `digests`

`base.ReplicaStore` is the port of the databases (`sqlite`, `postgres`), `exchange.Peer` the port of another replica
(`client` over HTTP). `replica.Replica` is a node between the two: it syncs, pushes, bootstraps, collects and compares.
"""
