"""The store of the control plane (``ports.Store``): in memory, or in Redis; and leadership over it."""
