"""An arena's memory: extents, slots, leases, and what of its contents others are told."""
