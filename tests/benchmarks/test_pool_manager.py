from pathlib import Path

from tests.benchmarks.quick import figures_of


def test_the_manager_serves_500_members_and_50_watchers_which_all_come_back_at_once(tmp_path: Path) -> None:
    """The benchmark ends only when every member is registered and every watcher knows all of them, each time."""
    said = figures_of("pool_manager", tmp_path)
    assert (said["settings"]["members"], said["settings"]["watchers"]) == (500, 50)
    (row,) = said["rates"]
    assert row["handled_per_s"] > 0
    assert row["changes"] > 0
    assert row["changes_missed"] == 0
    assert [gathering["what"] for gathering in said["gatherings"]] == [
        "all connect to a new manager",
        "all members reconnect",
        "all reconnect to a restarted manager",
    ]
