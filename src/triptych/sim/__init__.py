"""The cluster without its machines: the real services, or their state machines alone, in virtual time."""
