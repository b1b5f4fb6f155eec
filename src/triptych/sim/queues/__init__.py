"""The queues fidelity: requests wait in queues of encoders and text instances, whose times come from the costs.

Placement, batching and turns are the product's policies. Machines and messages of the services are left out: what they decide about is
known at once everywhere. So it is approximate, and cheap enough to try many placements.
"""
