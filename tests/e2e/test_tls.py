"""A cluster under mutual TLS: calls and embeddings between services with trusted certificates only."""

import asyncio
import ssl
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import trustme

from tests.e2e.client import post, rest, stream, text_of, timeline_of
from tests.e2e.reference import DIGITS, Question, answer
from triptych import AsyncClient
from triptych.cli.cluster import LocalCluster
from triptych.errors import Unavailable
from triptych.rpc.stubs import InstanceStub, RouterStub
from triptych.runtime.tls import TlsIdentity

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

TWO = Question("What digits are shown?", ("3_a", "1_a"))
FILES = {"cert": "own.pem", "key": "own.key", "ca": "ca.pem"}


def write_identity(folder: Path, authority: trustme.CA) -> None:
    folder.mkdir()
    own = authority.issue_cert("127.0.0.1")
    (folder / FILES["cert"]).write_bytes(b"".join(blob.bytes() for blob in own.cert_chain_pems))
    own.private_key_pem.write_to_path(folder / FILES["key"])
    authority.cert_pem.write_to_path(folder / FILES["ca"])


def flags(folder: Path) -> tuple[str, ...]:
    return tuple(part for name, file in FILES.items() for part in (f"--tls-{name}", str(folder / file)))


def identity(folder: Path) -> TlsIdentity:
    return TlsIdentity.load(*(folder / file for file in FILES.values()))


def options(folders: Mapping[str, Path]) -> dict[str, tuple[str, ...]]:
    """Arenas as on a device: embeddings use the same path as with memory that the CPU cannot read."""
    pulling = ("--transports", "nixl,tcp", "--prefer-transport", "tcp", "--arena", "device")
    return {
        "gateway": flags(folders["gateway"]),
        "router": flags(folders["router"]),
        "pool_manager": flags(folders["pool_manager"]),
        "encoder": (*flags(folders["encoder"]), "--transports", "nixl,tcp", "--arena", "device"),
        "text": (*flags(folders["text"]), *pulling),
    }


async def test_a_cluster_under_mutual_tls_serves_only_trusted_certificates(tmp_path: Path) -> None:
    authority, stranger = trustme.CA(), trustme.CA()
    folders = {name: tmp_path / name for name in ("gateway", "router", "pool_manager", "encoder", "text", "user")}
    for folder in folders.values():
        write_identity(folder, authority)
    write_identity(tmp_path / "stranger", stranger)
    async with LocalCluster(encoders=2, options=options(folders)) as cluster, rest(cluster.url) as client:
        response = await post(client, TWO.body())
        assert text_of(response) == answer(TWO).text
        timeline = await timeline_of(client, response)
        assert {item["pull_backend"] for item in timeline["items"]} == {"tcp"}

        user = RouterStub(cluster.router_target, identity(folders["user"]))
        assert (await stream(user, "by-grpc", TWO)).token_ids == answer(TWO).token_ids
        await user.close()
        async with AsyncClient(cluster.router_target, tls=identity(folders["user"])) as sdk:
            images = [DIGITS / f"{name}.png" for name in TWO.images]
            assert (await sdk.chat(TWO.text, images, temperature=0)).text == answer(TWO).text

        command = (sys.executable, "-m", "triptych.cli.main", "status", "--url", cluster.url)
        for own in (flags(folders["user"]), ()):
            process = await asyncio.create_subprocess_exec(
                *command, "--pool-manager", cluster.manager_target, *own, stdout=asyncio.subprocess.PIPE
            )
            shown = (await process.communicate())[0].decode()
            assert ("leads" in shown, "does not answer" in shown) == (bool(own), not own)

        for outsider in (None, identity(tmp_path / "stranger")):
            for stub in (
                RouterStub(cluster.router_target, outsider),
                InstanceStub(cluster.targets["encoder-1"], outsider),
            ):
                with pytest.raises(Unavailable):
                    await (stub.models() if isinstance(stub, RouterStub) else stub.describe())
                await stub.close()


def test_mismatched_certificate_files_are_refused(tmp_path: Path) -> None:
    authority = trustme.CA()
    for name in ("one", "other"):
        write_identity(tmp_path / name, authority)
    one, other = tmp_path / "one", tmp_path / "other"
    with pytest.raises(ValueError, match="cannot be used"):
        TlsIdentity.load(one / FILES["cert"], other / FILES["key"], one / FILES["ca"])
    with pytest.raises(ValueError, match="cannot be read"):
        TlsIdentity.load(tmp_path / "missing.pem", one / FILES["key"], one / FILES["ca"])
    assert identity(one).current.listener.verify_mode is ssl.CERT_REQUIRED
