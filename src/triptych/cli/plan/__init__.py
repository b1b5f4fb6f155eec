"""``triptych plan``: finds a cluster for a workload and a budget, runs it (``apply``), and holds it against the plan (``verify``)."""
