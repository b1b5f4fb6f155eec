"""Authorization of callers: each method with the certificates of each kind."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import pytest

from tests import identities
from tests.unit.rpc.test_multiplex import Script, request
from triptych.cli.authority import Authority
from triptych.domain.instance import InstanceLimits
from triptych.domain.pool import MemberReport, Watch
from triptych.domain.scaling import PoolName
from triptych.domain.stage import Role
from triptych.errors import PermissionDenied, TriptychError, Unavailable
from triptych.rpc.authorization import CALLERS
from triptych.rpc.encoder import EncoderServicer
from triptych.rpc.instance import InstanceServicer
from triptych.rpc.scaler import ScalerServicer
from triptych.rpc.server import RpcServer
from triptych.rpc.stubs import InstanceStub, PoolManagerStub, ScalerStub
from triptych.runtime import logs
from triptych.runtime.tls import TlsIdentity
from triptych.services.pool_manager.servicer import PoolManagerServicer
from triptych.services.text.servicer import TextServicer
from triptych.v1 import calls_pb2, encoder_pb2, instance_pb2, pool_manager_pb2, router_pb2, scaler_pb2, text_pb2

HOST = "127.0.0.1"
FILES = (calls_pb2, encoder_pb2, instance_pb2, pool_manager_pb2, router_pb2, scaler_pb2, text_pb2)
FOLDERS = ("gateway", "router", "pool-manager", "encoder", "text", "scaler", "operator", "user")


class Broken:
    """A service that fails in a way of its own: whoever sees it was let in."""

    def __getattr__(self, name: str) -> Any:
        raise Unavailable(name)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return identities.cluster(tmp_path_factory.mktemp("certs") / "ca")


async def reports() -> AsyncGenerator[MemberReport]:
    await asyncio.Event().wait()
    yield  # type: ignore[misc]  # never reached


async def first(stream: AsyncGenerator[Any]) -> None:
    async with aclosing(stream):
        await anext(stream)


CALLS: dict[str, tuple[type[Any], Callable[[Any], Awaitable[Any]]]] = {
    "Describe": (InstanceStub, lambda stub: stub.describe()),
    "WatchLoad": (InstanceStub, lambda stub: first(stub.watch_load())),
    "Release": (InstanceStub, lambda stub: stub.release(())),
    "Generate": (InstanceStub, lambda stub: first(stub.generate(request()))),
    "Attend": (PoolManagerStub, lambda stub: first(stub.attend(reports()))),
    "Watch": (PoolManagerStub, lambda stub: first(stub.watch(Watch()))),
    "Status": (PoolManagerStub, lambda stub: stub.status()),
    "Drain": (PoolManagerStub, lambda stub: stub.drain_instance("encoder-1", force=False)),
    "Roll": (PoolManagerStub, lambda stub: stub.roll(PoolName("m", Role.E), 2)),
    "SetDegree": (ScalerStub, lambda stub: stub.set_degree(PoolName("m", Role.E), 2, 1)),
    "SetLimits": (PoolManagerStub, lambda stub: stub.set_limits("text-1", InstanceLimits(max_sequences=1))),
    "Switch": (PoolManagerStub, lambda stub: stub.switch_instance("text-1", Role.D, force=False)),
    "Pools": (ScalerStub, lambda stub: stub.pools()),
}
MAY = {
    "Describe": {"router", "encoder", "text"},
    "WatchLoad": {"router"},
    "Release": {"router", "encoder", "text"},
    "Generate": {"router"},
    "Attend": {"router", "encoder", "text"},
    "Watch": {"router", "gateway"},
    "Status": set(FOLDERS),
    "Drain": {"router", "encoder", "text", "pool-manager", "operator"},
    "Roll": {"pool-manager", "operator"},
    "SetDegree": {"pool-manager"},
    "SetLimits": {"pool-manager", "operator"},
    "Switch": {"pool-manager", "operator"},
    "Pools": {"pool-manager"},
}


def test_every_method_says_who_may_call_it() -> None:
    methods = {
        f"/{service.full_name}/{method.name}"
        for file in FILES
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    assert set(CALLERS) == methods


async def refused(target: str, name: str, tls: TlsIdentity) -> bool:
    kind, call = CALLS[name]
    stub = kind(target, tls)
    try:
        async with asyncio.timeout(60):
            await call(stub)
    except PermissionDenied as error:
        return error.message.startswith(f"{name} needs a certificate for ")
    except (TriptychError, StopAsyncIteration):
        return False
    else:
        return False
    finally:
        await stub.close()


async def refusals(made: Authority, domain: str) -> dict[str, set[str]]:
    """By method, the folders that may not call it."""
    script: Any = Script()
    broken: Any = Broken()
    servers = {
        InstanceStub: (made.folder / "encoder", [InstanceServicer, EncoderServicer], TextServicer(script)),
        PoolManagerStub: (made.folder / "pool-manager", [PoolManagerServicer], None),
        ScalerStub: (made.folder / "scaler", [ScalerServicer], None),
    }
    found: dict[str, set[str]] = {}
    for kind, (folder, servicers, more) in servers.items():

        def register(server: Any, servicers: Any = servicers, more: Any = more) -> None:
            for servicer in (*(make(broken) for make in servicers), *((more,) if more is not None else ())):
                servicer.register(server)

        tls = identities.identity(folder, domain)
        async with RpcServer(host=HOST, port=0, service_names=(), register=register, tls=tls) as server:
            target = f"{HOST}:{server.port}"
            for name in (name for name, (stub, _) in CALLS.items() if stub is kind):
                outcome = await asyncio.gather(
                    *(refused(target, name, identities.identity(made.folder / folder)) for folder in FOLDERS)
                )
                found[name] = {folder for folder, is_refused in zip(FOLDERS, outcome, strict=True) if is_refused}
    return found


async def test_only_kinds_that_need_a_method_may_call_it(made: Authority) -> None:
    found = await refusals(made, identities.DOMAIN)
    assert {name: set(FOLDERS) - kinds for name, kinds in found.items()} == MAY


async def test_without_a_domain_every_certificate_may_call_everything(made: Authority) -> None:
    assert not any((await refusals(made, "")).values())


@pytest.mark.parametrize(
    ("names", "may"),
    [
        (("*.triptych.test",), True),
        (("router.triptych.test", "a.host"), True),
        (("ROUTER.triptych.test",), True),
        (("router.triptych.test.evil",), False),
        (("router.other.test",), False),
        (("*.test",), False),
        (("*.router.triptych.test",), False),
        (("triptych.test",), False),
        ((), False),
    ],
)
def test_a_kind_is_told_by_a_whole_name(made: Authority, names: tuple[str, ...], *, may: bool) -> None:
    assert identities.identity(made.folder / "encoder").admits(names, {"router"}) is may


async def test_a_folder_with_the_name_of_a_service_gives_no_rights(made: Authority) -> None:
    """``triptych certs --user`` puts it into the subject, which does not count."""
    posing = identities.issue(made, f"router.{identities.DOMAIN}", serves=False)
    script: Any = Script()
    tls = identities.identity(made.folder / "encoder")
    register = TextServicer(script).register
    async with RpcServer(host=HOST, port=0, service_names=(), register=register, tls=tls) as server:
        assert await refused(f"{HOST}:{server.port}", "Generate", identities.identity(posing))


async def test_refusals_are_logged_once_for_each_method_and_kind_of_caller(
    made: Authority, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "_WARN_EVERY_S", 3600.0)  # longer than this may take
    script: Any = Script()
    tls = identities.identity(made.folder / "encoder")
    register = TextServicer(script).register
    caplog.set_level(logging.WARNING, "triptych.rpc.authorization")
    async with RpcServer(host=HOST, port=0, service_names=(), register=register, tls=tls) as server:
        for folder in ("gateway", "gateway", "user", "gateway", "user"):
            assert await refused(f"{HOST}:{server.port}", "Generate", identities.identity(made.folder / folder))
    needed = f"it needs one for router.{identities.DOMAIN}"
    assert [record.getMessage() for record in caplog.records if record.name == "triptych.rpc.authorization"] == [
        f"/triptych.v1.Text/Generate refused a caller whose certificate is for {caller}: {needed}"
        for caller in ("gateway", "no kind of process")
    ]
