"""Pulls between two arenas of this process."""

import pytest

from triptych.cli.profile.transfers import measure_transfers
from triptych.policy.transport import between_processes


@pytest.mark.slow
def test_each_backend_that_works_here_is_measured_at_each_size() -> None:
    rows = measure_transfers((4096, 65536))
    measured = {row.backend for row in rows}
    assert {"shm", "tcp"} <= measured <= {*between_processes()}
    assert sorted((row.backend, row.nbytes) for row in rows) == sorted(
        (backend, nbytes) for backend in measured for nbytes in (4096, 65536)
    )
    assert all(row.seconds > 0 for row in rows)
