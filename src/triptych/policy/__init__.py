"""Decisions: pure functions over domain snapshots. Time comes in as ``now_s``, random numbers through a Protocol."""
