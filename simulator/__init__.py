"""The simulator: the loops of leases, ingest, delivery and replays, and all they call, in one process, from a seed.

The product's own code runs over the shipped memory adapters. Every call on a port is a point where the seed may crash
the instance, pause it, stall one thread, or let the port fail before or after its effect. The same seed gives the same
run, so a failure found once can be looked at for as long as it takes. See docs/simulator.md.

| module                                 | what is in it                                                               |
|----------------------------------------|-----------------------------------------------------------------------------|
| `baton`, `world`, `ports`              | threads that take turns; everything outside; faults at each effect          |
| `scenario`, `run`, `mutants`           | what a seed stands for; one seed; deliberate bugs                           |
| `source`, `receiver`, `posting`        | where events come from, where they go to, and how                           |
| `instance`, `delivering`, `people`     | what the loops of an instance work with, and the people at its desk         |
| `truth`                                | what must hold of log, head, checkpoint and source                          |
| `account` and its parts:               | what must hold of deliveries                                                |
| `promises`, `keys`, `standings`,       | what was asked for; which secret is good; what is on record and who may     |
| `queued`                               | change it; every parked delivery                                            |
| `replaying`, `replayed`                | what Spark does for replays; what must hold of them                         |
| `blocks/`, `repair/`                   | worlds of their own: block streams; slots that are lost                     |
"""
