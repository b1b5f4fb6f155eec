"""Odd but decodable files of every accepted format. All are generated, and equal on every run."""

from tests.unit.engine.media import odd_audio, odd_images, odd_videos
from tests.unit.engine.media.odd_images import Make

FILES: dict[str, Make] = {
    name: make for files in (odd_images.files, odd_videos.files, odd_audio.files) for name, make in files()
}
"""By name: what makes the file."""
