"""A replica's tables as a source: a peer that reads, and never writes.

`plan`      which events stand at which positions, decided from what the peer has      pure
`state`     that plan, kept in State
`rows`      events of replicas as events of the log                                    pure
`source`    asks the peer (`evermark.replicas.client`), and carries the plan out
`copying`   the rows that the peer has at first, as chunks of a snapshot
`repair`    a gap, closed with a snapshot of the peer's rows
"""
