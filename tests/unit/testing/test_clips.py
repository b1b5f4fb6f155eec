"""Generated videos and clips are the same in every process."""

import numpy as np
import pytest

from triptych.testing import clips


def leave_in_memory(value: int) -> None:
    """Fills the memory of the next allocations."""
    blocks = [np.full(size, value, np.uint8) for size in (1 << 10, 1 << 12, 1 << 14, 1 << 15, 1 << 16) * 8]
    del blocks


@pytest.mark.parametrize("form", ["mp4", "webm"])
@pytest.mark.parametrize(("width", "height"), [(48, 58), (64, 64), (90, 34)])
def test_the_same_video_has_the_same_bytes(form: str, width: int, height: int) -> None:
    made = set()
    for value in (0, 1, 85, 255):
        leave_in_memory(value)
        made.add(clips.video(width, height, frames=12, frames_per_s=5, form=form, seed=3))
    assert len(made) == 1
