"""Membership sources: settings, and a watched file."""

import asyncio
import logging
import os
from contextlib import aclosing
from pathlib import Path

import pytest

from triptych.demo import MODEL_DIR
from triptych.domain.membership import Member, MembershipSnapshot, MemberState
from triptych.domain.stage import Role
from triptych.runtime.process import CannotStart
from triptych.services.router import membership as module
from triptych.services.router.app import app
from triptych.services.router.membership import FileMembership, FixedMembership, read_members
from triptych.services.router.settings import RouterSettings
from triptych.virtual import virtual_time
from triptych.virtual.offload import InlineOffload

GOOD = """
[[instances]]
address = "10.0.0.1:50061"

[[instances]]
address = "[::1]:50071"
state = "leaving"
role = "PD"
model = "llava"
epoch = 18446744073709551615
"""


def write(path: Path, text: str) -> None:
    """Replace the file atomically, as recommended."""
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").rename(path)


def entry(address: str) -> str:
    return f'[[instances]]\naddress = "{address}"\n'


def test_a_file_has_addresses_with_optional_attributes(tmp_path: Path) -> None:
    write(path := tmp_path / "members.toml", GOOD)
    assert read_members(path) == (
        Member("10.0.0.1:50061"),
        Member("[::1]:50071", MemberState.LEAVING, Role.PD, "llava", 2**64 - 1),
    )
    write(path, "instances = []")
    assert read_members(path) == ()


def test_the_file_in_the_readme_is_valid(tmp_path: Path) -> None:
    readme = Path(module.__file__).with_name("README.md").read_text()
    write(path := tmp_path / "members.toml", readme.partition("```toml")[2].partition("```")[0])
    assert [member.state for member in read_members(path)] == [MemberState.ACTIVE, MemberState.LEAVING]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "instances: Field required"),
        ("[[instances]", "is not TOML"),
        ("\x00", "is not TOML"),
        ("instances = " + "[" * 5000, "is not TOML"),
        ("instances = " + "{a=" * 5000, "is not TOML"),
        ("[[instances]]\n", "instances.0.address: Field required"),
        (entry("nowhere"), "instances.0.address: .*'nowhere': it is not HOST:PORT"),
        (entry("unix:/run/x"), "it is not HOST:PORT"),
        (entry("a:1") + 'state = "gone"', "instances.0.state: "),
        (entry("a:1") + 'role = "X"', "instances.0.role: "),
        (entry("a:1") + "epoch = -1", "instances.0.epoch: "),
        (entry("a:1") + "weight = 3", "instances.0.weight: Extra inputs"),
        (entry("a:1") + entry("A:01"), "names an address twice"),
        ("#" * (1 + (1 << 20)), "more than 1048576 bytes"),
        ("".join(entry(f"a:{port}") for port in range(1, 4098)), "at most 4096 items"),
    ],
    ids=range(15),
)
def test_an_invalid_file_is_refused_in_one_line(text: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "members.toml"
    path.write_bytes(text.encode())
    with pytest.raises(ValueError, match=told) as caught:
        read_members(path)
    assert len(str(caught.value).splitlines()) == 1
    assert str(path) in str(caught.value)


def test_members_of_the_settings_never_change() -> None:
    async def main() -> None:
        async with aclosing(FixedMembership(["a:1", "b:2"]).snapshots()) as snapshots:
            assert [snapshot async for snapshot in snapshots] == [MembershipSnapshot(1, (Member("a:1"), Member("b:2")))]

    virtual_time.run(main())


def test_changes_of_the_file_are_applied_and_invalid_ones_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    path = tmp_path / "members.toml"
    write(path, entry("a:1"))

    async def main() -> None:
        source = FileMembership(path, poll_s=1.0, offload=InlineOffload())
        seen: list[MembershipSnapshot] = []

        async def follow() -> None:
            async with aclosing(source.snapshots()) as snapshots:
                async for snapshot in snapshots:
                    seen.append(snapshot)  # noqa: PERF401 - as they come

        async with asyncio.TaskGroup() as group:
            following = group.create_task(follow())
            await asyncio.sleep(3)
            write(path, entry("a:1") + "# a comment")
            await asyncio.sleep(2)
            for wrong in ("[[", None, entry("a:1") * 2):
                path.unlink(missing_ok=True)
                if wrong is not None:
                    write(path, wrong)
                await asyncio.sleep(3)
                assert source.fault
            assert seen == [MembershipSnapshot(1, (Member("a:1"),))], "unchanged or invalid contents make no snapshot"
            write(path, entry("a:1") + entry("b:2"))
            await asyncio.sleep(1.1)
            assert source.fault == ""
            assert seen[1:] == [MembershipSnapshot(2, (Member("a:1"), Member("b:2")))]
            following.cancel()

    virtual_time.run(main())
    told = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(told) == 3, "each fault is logged once"
    assert all("membership 1 stays" in record.message for record in told)
    assert "is valid again" in caplog.text


def test_a_file_that_is_rewritten_in_place_counts_once_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "members.toml"
    path.write_text(entry("a:1") + entry("b:2"))

    async def main() -> None:
        source = FileMembership(path, poll_s=1.0, offload=InlineOffload())
        seen: list[tuple[Member, ...]] = []

        async def follow() -> None:
            async with aclosing(source.snapshots()) as snapshots:
                async for snapshot in snapshots:
                    seen.append(snapshot.members)  # noqa: PERF401 - as they come

        async with asyncio.TaskGroup() as group:
            following = group.create_task(follow())
            await asyncio.sleep(3)
            with path.open("w") as file:
                for written in range(1, 40):
                    file.write(entry(f"c:{written}"))
                    file.flush()
                    await asyncio.sleep(0.1)
            await asyncio.sleep(3)
            following.cancel()
        assert [len(members) for members in seen] == [2, 39]

    virtual_time.run(main())


async def test_a_router_does_not_start_with_an_invalid_file(tmp_path: Path) -> None:
    path = tmp_path / "members.toml"
    for text in (None, "[["):
        if text is not None:
            write(path, text)
        settings = RouterSettings(model=MODEL_DIR, port=0, instances_file=path)
        with pytest.raises(CannotStart, match="--instances-file: "):
            async with app(settings):
                pass
    if os.geteuid():
        path.chmod(0)
        with pytest.raises(ValueError, match="cannot be read"):
            read_members(path)
