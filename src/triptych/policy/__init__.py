"""Decisions: pure functions over domain snapshots. Time comes in as ``now_s``, chance as a Protocol."""
