"""The store in Redis when Redis is away, slow, emptied, misconfigured or shared; and its access control."""

import asyncio
import hashlib
import logging
import random
import signal
import ssl
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trustme

from tests import identities
from tests.contract.store_kit import RedisServer
from triptych.domain.store import Changes, Fence
from triptych.errors import Deposed, StoreCorrupt, StoreUnavailable
from triptych.runtime.clock import monotonic
from triptych.runtime.tls import REDIS, TlsIdentity
from triptych.store.redis import RedisStore
from triptych.store.redis_settings import RedisSettings

LIMIT_S = 20.0
PASSWORD = "correct-horse-battery"  # noqa: S105 - of the test's own server


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path)
    server.start()
    yield server
    server.kill()


@asynccontextmanager
async def opened(settings: RedisSettings, tls: ssl.SSLContext | None = None) -> AsyncIterator[RedisStore]:
    store = RedisStore(settings, tls=tls)
    try:
        async with asyncio.timeout(LIMIT_S):
            yield store
    finally:
        await store.close()


async def execute(admin: Any, *command: str) -> Any:
    return await admin.execute_command(*command)


async def put_when_it_answers(store: RedisStore) -> None:
    while True:
        try:
            await store.put("members", "healed", b"")
        except StoreUnavailable:
            await asyncio.sleep(0.02)
        else:
            return


# --- away, and back ---


async def test_calls_fail_while_redis_is_gone_and_heal_when_it_is_back(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(server.settings) as store:
        await store.put("members", "a", b"")
        server.kill()
        for _ in range(3):
            with pytest.raises(StoreUnavailable):
                await store.get("members", "a")
            assert "reached" in store.fault
        server.start()
        await put_when_it_answers(store)
        assert store.fault == ""
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert 1 <= len(warnings) <= 3  # not one per call
    assert f"the store at 127.0.0.1:{server.port} fails" in caplog.text


async def test_a_redis_that_was_never_there_is_found_when_it_comes(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    server.start()
    server.kill()
    async with opened(server.settings) as store:
        with pytest.raises(StoreUnavailable, match="cannot be reached"):
            await store.acquire("leader", "a", 1)
        server.start()
        try:
            await put_when_it_answers(store)
        finally:
            server.kill()


async def test_idle_connections_that_a_restart_closed_fail_no_call(server: RedisServer) -> None:
    async with opened(server.settings) as store:
        await asyncio.gather(*(store.get("members", str(number)) for number in range(8)))
        server.kill()
        server.start()
        await asyncio.sleep(0.1)  # until their end is noticed
        await asyncio.gather(*(store.get("members", str(number)) for number in range(8)))


async def test_a_stopped_redis_costs_a_call_its_deadline_and_no_more(server: RedisServer) -> None:
    async with opened(replace(server.settings, redis_timeout_s=0.3)) as store:
        await store.put("members", "a", b"")
        server.signal(signal.SIGSTOP)
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        calls = [store.get("members", "a") for _ in range(40)]  # more than there are connections
        answers = await asyncio.gather(*calls, return_exceptions=True)
        took_s = loop.time() - begun_s
        server.signal(signal.SIGCONT)
        assert {type(answer) for answer in answers} == {StoreUnavailable}
        assert took_s < 6, "one after the other they take 12 s"
        await put_when_it_answers(store)


async def test_a_pause_of_clients_fails_calls_and_heals(server: RedisServer) -> None:
    hasty = replace(server.settings, redis_timeout_s=0.3)
    async with opened(server.settings) as store, opened(hasty) as paused, server.admin() as admin:
        await store.put("members", "a", b"1")
        await put_when_it_answers(paused)
        await execute(admin, "CLIENT", "PAUSE", "3000", "ALL")  # a busy machine may need a second to call
        with pytest.raises(StoreUnavailable, match="did not answer"):
            await paused.get("members", "a")
        await put_when_it_answers(paused)
        entry = await store.get("members", "a")
        assert entry is not None
        assert entry.value == b"1"


async def test_a_watcher_survives_a_restart_and_learns_what_is_gone(server: RedisServer) -> None:
    async with opened(server.settings) as store, aclosing(store.watch("members")) as changes:
        await store.put("members", "a", b"")
        assert [entry.key for entry in (await anext(changes)).written] == ["a"]
        server.kill()
        waiting = asyncio.ensure_future(anext(changes))  # noqa: TID251 - awaited below
        await asyncio.sleep(0.1)
        assert not waiting.done()
        server.start()  # without its data
        assert await waiting == Changes((), ("a",))
        await store.put("members", "b", b"")
        assert [entry.key for entry in (await anext(changes)).written] == ["b"]


async def test_after_flushall_versions_and_tokens_still_grow_and_the_old_leader_is_refused(
    server: RedisServer,
) -> None:
    async with opened(server.settings) as store, server.admin() as admin:
        version = await store.put("members", "a", b"1")
        old = await store.acquire("leader", "old", 60)
        assert old is not None
        async with aclosing(store.watch("members")) as changes:
            await anext(changes)
            await admin.flushall()
            assert await anext(changes) == Changes((), ("a",))
        with pytest.raises(Deposed):
            await store.put("members", "a", b"2", fence=old)
        assert not await store.renew(old, 60)
        new = await store.acquire("leader", "new", 60)
        assert new is not None
        assert new.token > old.token
        assert await store.put("members", "a", b"1", fence=new) > version


async def test_a_leader_that_is_stopped_past_its_lease_does_not_act_when_it_continues(server: RedisServer) -> None:
    command = (sys.executable, "-m", "tests.integration.store.leader", server.settings.redis)
    process = await asyncio.create_subprocess_exec(*command, "stopped", stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        async with opened(server.settings) as store:
            token = 0
            while token == 0:
                token = int((await process.stdout.readline()).split()[1])
            process.send_signal(signal.SIGSTOP)
            fence, taken_s = None, 0.0
            while fence is None:
                await asyncio.sleep(0.05)
                taken_s = monotonic()
                fence = await store.acquire("leader", "other", 60)
            process.send_signal(signal.SIGCONT)
            seen_s = 0.0
            while seen_s < taken_s + 1:
                time_, could_act = (await process.stdout.readline()).split()
                seen_s = float(time_)
                assert seen_s < taken_s or int(could_act) == 0
            with pytest.raises(Deposed):
                await store.append("decisions", b"late", keep=1, fence=Fence("leader", token))
            await store.append("decisions", b"in time", keep=1, fence=fence)
    finally:
        process.kill()
        await process.wait()


# --- clients and connections ---


async def test_connections_are_bounded(server: RedisServer) -> None:
    async with (
        opened(replace(server.settings, redis_connections=3, redis_timeout_s=30)) as store,
        server.admin() as admin,
    ):
        await asyncio.gather(*(store.get("members", str(number)) for number in range(100)))
        assert len(await admin.client_list()) <= 3 + 1


async def test_answers_are_never_mixed_up_by_cancelled_calls(server: RedisServer) -> None:
    rng = random.Random(1)
    async with opened(server.settings) as store:
        for number in range(20):
            await store.put("members", str(number), str(number).encode())

        async def cancelled(key: str) -> None:
            try:
                async with asyncio.timeout(rng.random() * 0.004):
                    await store.get("members", key)
            except TimeoutError:
                pass

        for _ in range(6):
            await asyncio.gather(*(cancelled(str(number)) for number in range(20)))
            found = await asyncio.gather(*(store.get("members", str(number)) for number in range(20)))
            assert [entry and entry.value for entry in found] == [str(number).encode() for number in range(20)]


async def test_clusters_with_different_prefixes_share_a_redis(server: RedisServer) -> None:
    one = replace(server.settings, redis_prefix="one")
    other = replace(server.settings, redis_prefix="other")
    async with opened(one) as first, opened(other) as second, server.admin() as admin:
        await first.put("members", "a", b"1")
        await first.append("decisions", b"", keep=1)
        await first.acquire("leader", "a", 60)
        assert await second.entries("members") == ()
        assert await second.holder("leader") is None
        assert all(str(key).startswith("b'one:1:") for key in await admin.keys())


# --- what others wrote ---

CORRUPTIONS: dict[str, tuple[tuple[str, ...], Callable[[RedisStore], object]]] = {
    "a table of another type": (("SET", "triptych:1:table:members", "x"), lambda store: store.put("members", "a", b"")),
    "a list of another type": (("SET", "triptych:1:log:decisions", "x"), lambda store: store.tail("decisions", 1)),
    "an entry without a version": (
        ("HSET", "triptych:1:table:members", "a", "x"),
        lambda store: store.get("members", "a"),
    ),
    "an entry without a version, in a list": (
        ("HSET", "triptych:1:table:members", "a", ""),
        lambda store: store.entries("members"),
    ),
    "an entry without a version, to be overwritten": (
        ("HSET", "triptych:1:table:members", "a", "x"),
        lambda store: store.put("members", "a", b""),
    ),
    "an entry above the limit": (
        ("HSET", "triptych:1:table:members", "a", "1 " + "x" * 300_000),
        lambda store: store.get("members", "a"),
    ),
    "a key that is not UTF-8": (
        ("HSET", "triptych:1:table:members", "\udcff", "1 x"),
        lambda store: store.entries("members"),
    ),
    "a record without a number": (("RPUSH", "triptych:1:log:decisions", "x"), lambda store: store.tail("decisions", 1)),
    "a revision that is no number": (
        ("SET", "triptych:1:revision", "x"),
        lambda store: store.put("members", "a", b""),
    ),
    "a lease of another kind": (("SET", "triptych:1:lease:leader", "x"), lambda store: store.acquire("leader", "a", 1)),
    "a lease of another kind, when writing": (
        ("SET", "triptych:1:lease:leader", "x"),
        lambda store: store.put("members", "a", b"", fence=Fence("leader", 1)),
    ),
}


@pytest.mark.parametrize("case", CORRUPTIONS)
async def test_foreign_data_is_a_clear_error_and_not_overwritten(server: RedisServer, case: str) -> None:
    command, call = CORRUPTIONS[case]
    async with opened(server.settings) as store, server.admin(encoding_errors="surrogateescape") as admin:
        await execute(admin, *command)
        before = await execute(admin, "DUMP", command[1])
        with pytest.raises(StoreCorrupt, match="did not write"):
            await call(store)  # type: ignore[misc]
        assert "did not write" in store.fault
        assert await execute(admin, "DUMP", command[1]) == before
        await store.put("profiles", "a", b"") if "revision" not in case else await store.get("profiles", "a")
        assert store.fault == ""


# --- its clock ---


async def test_a_lease_that_a_step_of_the_clock_made_longer_ends_in_time(server: RedisServer) -> None:
    """Redis keeps the end of a key by its wall clock; set back by an hour, the lease of a dead owner would stay for an hour."""
    async with opened(server.settings) as store, server.admin() as admin:
        assert await store.acquire("leader", "dead", 0.2) is not None
        await execute(admin, "PEXPIRE", "triptych:1:lease:leader", "3600000")
        while (fence := await store.acquire("leader", "other", 10)) is None:  # noqa: ASYNC110 - as a leadership does
            await asyncio.sleep(0.05)
        assert await store.renew(fence, 20)
        for ttl_s in (0.1, 60):
            assert await store.acquire("leader", "third", ttl_s) is None
            left_ms = await execute(admin, "PTTL", "triptych:1:lease:leader")
            assert 15_000 < left_ms <= 20_000, "another neither shortens nor extends it"


# --- refusals ---


async def test_a_redis_without_memory_or_that_is_a_replica_is_not_available(server: RedisServer) -> None:
    async with opened(server.settings) as store, server.admin() as admin:
        await store.put("members", "a", b"")
        await admin.config_set("maxmemory", "1")
        with pytest.raises(StoreUnavailable, match="OutOfMemoryError"):
            await store.put("members", "a", b"")
        await admin.config_set("maxmemory", "0")
        await execute(admin, "REPLICAOF", "127.0.0.1", "1")
        with pytest.raises(StoreUnavailable, match=r"ReadOnlyError|cannot be reached"):
            await store.put("members", "a", b"")
        await execute(admin, "REPLICAOF", "NO", "ONE")
        await put_when_it_answers(store)


async def test_the_password_comes_from_a_file_can_change_and_is_never_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    server = RedisServer(tmp_path, (f"requirepass {PASSWORD}",))
    server.start()
    file = tmp_path / "password"
    file.write_text("wrong-password\n")
    try:
        async with opened(replace(server.settings, redis_password_file=file)) as store:
            with pytest.raises(StoreUnavailable, match="credentials") as refused:
                await store.get("members", "a")
            assert f"the store at {server.settings.redis} fails: Redis refused the credentials" in caplog.text
            file.unlink()
            with pytest.raises(StoreUnavailable, match="the password file does not exist"):
                await store.get("members", "a")
            with pytest.raises(ValueError, match=f"redis_password_file: {file} is not a file"):
                RedisStore(replace(server.settings, redis_password_file=file))
            file.write_text(PASSWORD + "\n")
            await store.put("members", "a", b"")
            assert PASSWORD not in repr(store) + str(vars(store))
        async with opened(server.settings) as store:
            with pytest.raises(StoreUnavailable, match="credentials"):
                await store.get("members", "a")
    finally:
        server.kill()
    for secret in (PASSWORD, "wrong-password"):
        assert secret not in caplog.text + str(refused.value) + str(refused.value.__context__)


async def test_a_user_with_the_rights_to_its_own_keys_alone_is_enough(tmp_path: Path) -> None:
    digest = hashlib.sha256(PASSWORD.encode()).hexdigest()
    rules = f"user manager on #{digest} resetchannels ~triptych:* -@all +eval +evalsha +@read +@write +script|load +select +time"
    server = RedisServer(tmp_path, (rules,))
    server.start()
    file = tmp_path / "password"
    file.write_text(PASSWORD)
    settings = replace(server.settings, redis_username="manager", redis_password_file=file)
    try:
        async with opened(settings) as store:
            fence = await store.acquire("leader", "a", 60)
            await store.put("members", "a", b"", fence=fence)
            await store.append("decisions", b"", keep=1)
            assert len(await store.entries("members")) == 1
        async with opened(replace(settings, redis_prefix="foreign")) as store:
            with pytest.raises(StoreUnavailable, match="NoPermissionError"):
                await store.put("members", "a", b"")
    finally:
        server.kill()


# --- TLS ---


@pytest.fixture
def tls_files(tmp_path: Path) -> dict[str, Path]:
    authority, stranger = trustme.CA(), trustme.CA()
    files = {name: tmp_path / f"{name}.pem" for name in ("ca", "stranger", "cert", "key", "other_cert", "other_key")}
    authority.cert_pem.write_to_path(files["ca"])
    stranger.cert_pem.write_to_path(files["stranger"])
    for prefix, names in (("", ["127.0.0.1", "localhost"]), ("other_", ["other.example"])):
        issued = authority.issue_cert(*names)
        issued.private_key_pem.write_to_path(files[f"{prefix}key"])
        issued.cert_chain_pems[0].write_to_path(files[f"{prefix}cert"])
    return files


def tls_server(folder: Path, files: dict[str, Path], prefix: str = "", clients: str = "no") -> RedisServer:
    return RedisServer(
        folder,
        (
            f"tls-cert-file {files[prefix + 'cert']}",
            f"tls-key-file {files[prefix + 'key']}",
            f"tls-ca-cert-file {files['ca']}",
            f"tls-auth-clients {clients}",
        ),
        tls=True,
    )


async def test_redis_over_tls(tmp_path: Path, tls_files: dict[str, Path]) -> None:
    server = tls_server(tmp_path, tls_files)
    server.start()
    try:
        async with opened(replace(server.settings, redis_tls_ca=tls_files["ca"])) as store:
            await store.put("members", "a", b"")
        async with opened(replace(server.settings, redis_tls_ca=tls_files["stranger"])) as store:
            with pytest.raises(StoreUnavailable, match="cannot be reached"):
                await store.get("members", "a")
        async with opened(server.settings) as store:  # without TLS
            with pytest.raises(StoreUnavailable):
                await store.get("members", "a")
    finally:
        server.kill()


async def test_a_certificate_of_another_host_is_refused(tmp_path: Path, tls_files: dict[str, Path]) -> None:
    server = tls_server(tmp_path, tls_files, prefix="other_")
    server.start()
    try:
        async with opened(replace(server.settings, redis_tls_ca=tls_files["ca"])) as store:
            with pytest.raises(StoreUnavailable, match="cannot be reached"):
                await store.get("members", "a")
    finally:
        server.kill()


async def test_redis_that_asks_for_a_certificate(tmp_path: Path, tls_files: dict[str, Path]) -> None:
    server = tls_server(tmp_path, tls_files, clients="yes")
    server.start()
    settings = replace(server.settings, redis_tls_ca=tls_files["ca"])
    try:
        async with opened(settings) as store:
            with pytest.raises(StoreUnavailable):
                await store.get("members", "a")
        whole = replace(settings, redis_tls_cert=tls_files["cert"], redis_tls_key=tls_files["key"])
        async with opened(whole) as store:
            await store.put("members", "a", b"")
    finally:
        server.kill()


async def test_redis_by_the_identity_of_the_cluster_and_its_new_certificates(tmp_path: Path) -> None:
    made = identities.cluster(tmp_path / "ca")
    now_s = 0.0
    own = made.folder / "pool-manager"
    tls = TlsIdentity.load(*identities.files(own), name=identities.DOMAIN, clock=lambda: now_s).calling(REDIS)
    server = server_of(tmp_path, made.folder / "redis")
    posing = server_of(tmp_path, made.folder / "router")
    server.start()
    try:
        settings = replace(server.settings, redis_tls=True)
        with pytest.raises(ValueError, match="redis_tls needs"):
            RedisStore(settings)
        async with opened(settings, tls) as store:
            await store.put("members", "a", b"")
            server.kill()
            posing.port = server.port
            posing.start()
            with pytest.raises(StoreUnavailable, match="cannot be reached"):
                await store.get("members", "a")
            posing.kill()
            identities.cluster(made.folder)  # another authority
            server.start()
            with pytest.raises(StoreUnavailable, match="cannot be reached"):
                await store.get("members", "a")
            now_s = 1.1
            await store.put("members", "a", b"")
    finally:
        server.kill()
        posing.kill()


def server_of(folder: Path, own: Path) -> RedisServer:
    certificate, key, trusted = identities.files(own)
    files = (f"tls-cert-file {certificate}", f"tls-key-file {key}", f"tls-ca-cert-file {trusted}")
    return RedisServer(folder, (*files, "tls-auth-clients yes"), tls=True)


# --- settings ---


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"redis": "somewhere"}, "HOST:PORT"),
        ({"redis": "host:0"}, "HOST:PORT"),
        ({"redis": ":6379"}, "HOST:PORT"),
        ({"redis_prefix": "a:b"}, "redis_prefix"),
        ({"redis_prefix": ""}, "redis_prefix"),
        ({"redis_database": -1}, "redis_database"),
        ({"redis_tls_cert": Path("a")}, "need each other"),
        ({"redis_tls_cert": Path("a"), "redis_tls_key": Path("b")}, "redis_tls_ca"),
        ({"redis_timeout_s": 0.0}, "redis_timeout_s"),
        ({"redis_timeout_s": float("nan")}, "redis_timeout_s"),
        ({"redis_connections": 0}, "redis_connections"),
        ({"redis_poll_s": 0.0}, "redis_poll_s"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RedisSettings(**changes)  # type: ignore[arg-type]


def test_a_missing_tls_file_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"TLS file .*absent\.pem does not exist"):
        RedisStore(RedisSettings(redis="localhost:6379", redis_tls_ca=tmp_path / "absent.pem"))
