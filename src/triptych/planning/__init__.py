"""The planner of ``triptych plan``: placements for a workload and a budget, filtered in closed form and compared by simulation."""
