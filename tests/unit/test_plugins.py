"""Plug-ins: a transport, and those that cannot be used. The pages on adding families and policies have examples of these."""

from pathlib import Path

import pytest

from tests.plugins import offer
from triptych.families.model_files import BadModel, ModelFiles
from triptych.families.registry import written_family
from triptych.policy.placement.policy import LEAST_LOADED
from triptych.policy.policies import Policies, PolicyNames
from triptych.transport.arena import HostArena
from triptych.transport.options import TransferOptions
from triptych.transport.start import nobody_reads, start_transports
from triptych.transport.transport_set import TransportSet

GROUP = "triptych.policies.encoder_routing"
TRANSPORT = """
from triptych.transport.start import STARTERS

async def start(near):
    return await STARTERS["tcp"](near)
"""


def test_a_policy_of_this_package_cannot_be_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(tmp_path, monkeypatch, "replacing", "raise AssertionError", {GROUP: {"least-loaded": "replacing:POLICY"}})
    assert Policies.named(PolicyNames()).encoder_routing is LEAST_LOADED


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise RuntimeError('no licence')", r"'mine' of triptych.policies.encoder_routing .*broken.* no licence"),
        ("", r"'mine' .* cannot be loaded: .*POLICY"),
        ("POLICY = 3", r"encoder_routing 'mine' of a plug-in is no policy of this kind, but 3"),
    ],
    ids=["raises", "lacks it", "is no policy"],
)
def test_a_policy_that_cannot_be_used_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, message: str, request: pytest.FixtureRequest
) -> None:
    module = f"broken_{request.node.callspec.id.replace(' ', '_')}"
    offer(tmp_path, monkeypatch, module, code, {GROUP: {"mine": f"{module}:POLICY"}})
    with pytest.raises(ValueError, match=message):
        PolicyNames(encoder_routing="mine")


def test_a_name_that_nothing_offers_is_refused_with_those_of_plugins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(tmp_path, monkeypatch, "offering", "", {GROUP: {"mine": "offering:POLICY"}})
    with pytest.raises(ValueError, match=r"'theirs', which is none of least-loaded, .*mine, "):
        PolicyNames(encoder_routing="theirs")


def test_a_name_that_two_packages_offer_is_refused_with_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("first", "second"):
        offer(tmp_path / name, monkeypatch, name, "", {GROUP: {"mine": f"{name}:POLICY"}})
    with pytest.raises(ValueError, match=r"several packages: (first|second):POLICY .*, (first|second):POLICY"):
        PolicyNames(encoder_routing="mine")


def test_a_family_that_cannot_be_loaded_is_refused_as_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(tmp_path / "packages", monkeypatch, "no_family", "", {"triptych.families": {"newest": "no_family:Newest"}})
    (tmp_path / "config.json").write_text('{"model_type": "newest"}')
    with pytest.raises(BadModel, match=r"'newest' of triptych.families .* cannot be loaded"):
        written_family(ModelFiles.load(tmp_path))


@pytest.mark.parametrize("value", ["3", "0", "type('Newest', (), {})"])
def test_a_plugin_that_is_no_family_is_refused_as_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    module = f"no_family_{value[0]}"
    points = {"triptych.families": {"newest": f"{module}:Newest"}}
    offer(tmp_path / "packages", monkeypatch, module, f"Newest = {value}", points)
    (tmp_path / "config.json").write_text('{"model_type": "newest"}')
    with pytest.raises(BadModel, match="'newest' of a plug-in is no family, but"):
        written_family(ModelFiles.load(tmp_path))


async def test_a_transport_is_started_where_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(tmp_path, monkeypatch, "carrying", TRANSPORT, {"triptych.transports": {"pigeon": "carrying:start"}})
    transports = await started("pigeon")
    assert transports.backends == ("tcp",)
    await transports.close()
    with pytest.raises(ValueError, match=r"no transport 'raven' .* only shm, nixl, tcp, pigeon$"):
        await started("raven")


async def test_a_transport_within_a_process_cannot_be_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(tmp_path, monkeypatch, "taking", TRANSPORT, {"triptych.transports": {"memory": "taking:start"}})
    with pytest.raises(ValueError, match=r"no transport 'memory' .* only shm, nixl, tcp$"):
        await started("memory")


async def test_a_plugin_that_starts_no_transport_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(tmp_path, monkeypatch, "resting", "start = 3", {"triptych.transports": {"dodo": "resting:start"}})
    with pytest.raises(ValueError, match="'dodo' of a plug-in is no function that starts one, but 3"):
        await started("dodo")


async def started(name: str) -> TransportSet:
    return await start_transports(
        TransferOptions((name,)),
        HostArena(1 << 16, instance_id="holder", epoch=1),
        machine="here",
        host="127.0.0.1",
        check=nobody_reads,
        connect_timeout_s=5.0,
    )
