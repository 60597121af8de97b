"""Block streams in memory: nodes, a store of plans, owners that may be cut off between any two effects."""
