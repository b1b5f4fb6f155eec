"""The world: clock, settings, tasks, shutdown, process."""
