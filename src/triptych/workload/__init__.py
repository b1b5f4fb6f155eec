"""Workloads and what came of them: requests of a mix or a trace, and the metrics of a run, for `bench` and the simulator."""
