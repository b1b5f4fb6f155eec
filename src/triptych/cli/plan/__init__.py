"""``triptych plan``: finds a cluster for a workload and a budget."""
