"""The simulator: ingest, log commit, lease, group, follower and queue decisions in one process, from a seed.

The product's own code runs over the shipped memory adapters. Every call on a port is a point where the seed may crash
the instance, pause it, stall one thread, or let the port fail before or after its effect. The same seed gives the same
run, so a failure found once can be looked at for as long as it takes. See docs/simulator.md.
"""
