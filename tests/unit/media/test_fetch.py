"""Downloads by URL, with misbehaving servers on loopback and a scripted resolver."""

import asyncio
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import pytest
import trustme

from triptych import __version__
from triptych.errors import InvalidMedia, Overloaded
from triptych.media.fetch import Fetcher, FetchLimits
from triptych.media.remote_url import HostRules

LOOPBACK = "127.0.0.1"
Script = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]


class Server:
    """Answers each connection's first request by its script, and records the requests."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.port = 0
        self.requests: list[bytes] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            request = await reader.readuntil(b"\r\n\r\n")
            self.requests.append(request)
            await self.script(request, writer)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def serving(script: Script, tls: ssl.SSLContext | None = None) -> AsyncGenerator[Server]:
    server = Server(script)
    listener = await asyncio.start_server(server.serve, LOOPBACK, 0, ssl=tls)
    server.port = listener.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        listener.close()


def says(*head: str, body: bytes = b"") -> Script:
    async def script(_: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write("\r\n".join(("HTTP/1.1 " + head[0], *head[1:], "", "")).encode() + body)

    return script


def ok(body: bytes) -> Script:
    return says("200 OK", f"Content-Length: {len(body)}", body=body)


def resolves(**hosts: Sequence[str]) -> Callable[[str, int], Awaitable[Sequence[str]]]:
    """A resolver for these names (with ``_`` for the dot); addresses resolve to themselves."""

    async def resolve(host: str, port: int) -> Sequence[str]:
        return hosts.get(host.replace(".", "_"), [host])

    return resolve


def fetcher(*servers: Server, **limits: float) -> Fetcher:
    rules = HostRules(fetch_hosts_private=("img.example",), fetch_ports=(80, 443, *(server.port for server in servers)))
    chosen = FetchLimits(**{"fetch_timeout_s": 5.0, **limits})  # type: ignore[arg-type]
    return Fetcher(
        rules, chosen, max_bytes=1000, resolver=resolves(img_example=[LOOPBACK], rebound_example=["1.1.1.1", LOOPBACK])
    )


async def refused(fetcher: Fetcher, url: str, match: str) -> None:
    with pytest.raises(InvalidMedia, match=match) as caught:
        await fetcher.fetch(url)
    assert LOOPBACK not in caught.value.message or LOOPBACK in url


async def test_the_content_of_a_url_is_returned_and_its_progress_reported() -> None:
    told: list[int] = []
    async with serving(ok(b"pixels")) as server:
        data = await fetcher(server).fetch(f"http://img.example:{server.port}/a.png?b=1#c", told.append)
    assert (data, sum(told)) == (b"pixels", 6)
    (request,) = server.requests
    assert request.startswith(b"GET /a.png?b=1 HTTP/1.1\r\n")
    assert f"\r\nHost: img.example:{server.port}\r\n".encode() in request
    assert b"Accept-Encoding: identity" in request
    assert not any(name in request.lower() for name in (b"cookie", b"authorization"))


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "0.0.0.0",
        "[::1]",
        "[::ffff:127.0.0.1]",
        "localhost",
        "169.254.169.254",
        "10.0.0.1",
        "rebound.example",
    ],
)
async def test_private_addresses_are_refused_without_a_connection(host: str) -> None:
    async with serving(ok(b"secret")) as server:
        subject = Fetcher(
            HostRules(fetch_ports=(server.port,)),
            FetchLimits(),
            max_bytes=1000,
            resolver=resolves(localhost=[LOOPBACK], rebound_example=["1.1.1.1", LOOPBACK]),
        )
        await refused(subject, f"http://{host}:{server.port}/", "does not resolve to a public address")
        assert server.requests == []


@pytest.mark.parametrize("host", ["2130706433", "0x7f.1", "0177.0.0.1", "127.1"])
async def test_odd_spellings_of_addresses_are_refused(host: str) -> None:
    await refused(fetcher(), f"http://{host}/", "not an IPv4 address")


@pytest.mark.parametrize("target", ["http://127.0.0.1:{port}/", "http://[::1]:{port}/", "//169.254.169.254/latest"])
async def test_a_redirect_into_a_private_network_is_refused(target: str) -> None:
    async with serving(ok(b"secret")) as inner:
        location = target.format(port=inner.port)
        async with serving(says("302 Found", f"Location: {location}", "Content-Length: 0")) as outer:
            subject = fetcher(outer, inner)
            await refused(subject, f"http://img.example:{outer.port}/", "does not resolve to a public address")
        assert inner.requests == []


async def test_a_redirect_is_followed_and_validated_like_the_first_hop() -> None:
    async def script(request: bytes, writer: asyncio.StreamWriter) -> None:
        answer = ok(b"moved") if b"/there" in request else says("307 T", "Location: /there", "Content-Length: 0")
        await answer(request, writer)

    async with serving(script) as server:
        assert await fetcher(server).fetch(f"http://img.example:{server.port}/here") == b"moved"
    async with serving(says("301 M", "Location: ftp://img.example/", "Content-Length: 0")) as server:
        await refused(fetcher(server), f"http://img.example:{server.port}/", "only https:")
    async with serving(says("301 M", "Location: http://img.example:25/", "Content-Length: 0")) as server:
        await refused(fetcher(server), f"http://img.example:{server.port}/", "port 25")


async def test_redirects_are_bounded() -> None:
    async with serving(says("302 Found", "Location: /", "Content-Length: 0")) as server:
        await refused(fetcher(server, fetch_redirects=2), f"http://img.example:{server.port}/", "more than 2 times")
        assert len(server.requests) == 3


async def test_a_name_is_resolved_once_per_hop_and_that_address_is_used() -> None:
    """DNS rebinding: a second lookup would give loopback."""
    answers = [["203.0.113.9"], [LOOPBACK]]
    asked: list[str] = []

    async def rebinding(host: str, port: int) -> Sequence[str]:
        asked.append(host)
        return answers.pop(0)

    async with serving(ok(b"secret")) as server:
        subject = Fetcher(
            HostRules(fetch_ports=(server.port,)), FetchLimits(fetch_timeout_s=0.3), max_bytes=1000, resolver=rebinding
        )
        await refused(subject, f"http://rebind.example:{server.port}/", "public address")
        assert server.requests == []
    assert asked == ["rebind.example"]


@pytest.mark.parametrize(
    ("script", "match"),
    [
        (says("404 Not Found", "Content-Length: 0"), "status 404"),
        (says("500 Oops", "Content-Length: 0"), "status 500"),
        (says("204 No Content"), "status 204"),
        (says("200 OK", "Content-Length: 0"), "nothing at the URL"),
        (says("302 Found", "Content-Length: 0"), "more than 3 times"),
        (says("200 OK", "Content-Length: 5000"), "larger than 1000 bytes"),
        (says("200 OK", "Content-Length: " + "9" * 19), "larger than 1000 bytes|broke off"),
        (says("200 OK", body=b"x" * 5000), "larger than 1000 bytes"),
        (says("200 OK", "Content-Length: 10", body=b"short"), "broke off"),
        (says("200 OK", "Content-Encoding: GZIP", body=b"\x1f\x8b"), "content coding gzip, which"),
        (says("200 OK", "Content-Encoding: aws-chunked, br", body=b"\x1f\x8b"), "content coding br, which"),
        (
            says("200 OK", "Content-Encoding: identity", "Content-Encoding: br", body=b"\x1f"),
            "content coding br, which",
        ),
        (says("200 OK", "Content-Encoding: <b>gz</b>", body=b"\x1f\x8b"), "content coding of an odd name, which"),
        (says("200 OK", "Transfer-Encoding: chunked", body=b"zz\r\n"), "broke off"),
        (says("200 OK", "X: " + "y" * 200_000, body=b""), "broke off"),
        (says("SSH-2.0"), "broke off"),
        (says("200 OK", "Content-Length: 1", "Content-Length: 2", body=b"ab"), "broke off"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_invalid_responses_are_refused(script: Script, match: str) -> None:
    async with serving(script) as server:
        await refused(fetcher(server), f"http://img.example:{server.port}/", match)


@pytest.mark.parametrize(
    "coding", ["aws-chunked", "AWS-Chunked", "identity", "aws-chunked,identity", "aws-chunked, ", ""]
)
async def test_a_content_coding_that_changes_nothing_is_accepted(coding: str) -> None:
    script = says("200 OK", f"Content-Encoding: {coding}", "Content-Length: 6", body=b"pixels")
    async with serving(script) as server:
        assert await fetcher(server).fetch(f"http://img.example:{server.port}/") == b"pixels"


@pytest.mark.parametrize(
    ("settings", "sent"),
    [
        ({}, f"User-Agent: triptych/{__version__} (media fetcher)"),
        ({"fetch_user_agent": "ours/2 (ops@example.org)"}, "User-Agent: ours/2 (ops@example.org)"),
        ({"fetch_user_agent": ""}, ""),
    ],
)
async def test_the_fetcher_names_itself(settings: dict[str, str], sent: str) -> None:
    async def script(request: bytes, writer: asyncio.StreamWriter) -> None:
        await (ok(b"pixels") if b"user-agent:" in request.lower() or not sent else says("403 Forbidden"))(
            request, writer
        )

    async with serving(script) as server:
        rules = HostRules(fetch_hosts_private=(LOOPBACK,), fetch_ports=(server.port,))
        subject = Fetcher(rules, FetchLimits(**settings), max_bytes=1000)  # type: ignore[arg-type]
        assert await subject.fetch(f"http://{LOOPBACK}:{server.port}/") == b"pixels"
    lines = [line for line in server.requests[0].decode().split("\r\n") if line.lower().startswith("user-agent:")]
    assert lines == ([sent] if sent else [])


@pytest.mark.parametrize("wrong", ["a\r\nx: y", "ü", "x" * 257, " x"])
def test_a_user_agent_that_is_no_header_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match="fetch_user_agent"):
        FetchLimits(fetch_user_agent=wrong)


async def test_a_redirect_to_a_location_that_is_not_encoded_is_followed() -> None:
    async def script(request: bytes, writer: asyncio.StreamWriter) -> None:
        found = b"GET /K%C3%B6ln%20Dom.png?a=1%2B1 HTTP" in request
        location = "/Köln Dom.png?a=1%2B1"
        await (ok(b"pixels") if found else says("302 Found", f"Location: {location}", "Content-Length: 0"))(
            request, writer
        )

    async with serving(script) as server:
        assert await fetcher(server).fetch(f"http://img.example:{server.port}/") == b"pixels"


async def test_a_server_that_sends_slowly_times_out() -> None:
    async def drip(_: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.02)

    async with serving(drip) as server:
        await refused(fetcher(server, fetch_timeout_s=0.2), f"http://img.example:{server.port}/", "within 0.2 s")


async def test_a_server_that_sends_nothing_times_out() -> None:
    gate = asyncio.Event()

    async def silent(_: bytes, writer: asyncio.StreamWriter) -> None:
        await gate.wait()

    async with serving(silent) as server:
        await refused(fetcher(server, fetch_stall_s=0.1), f"http://img.example:{server.port}/", "silent for 0.1 s")
        gate.set()


async def test_a_refused_connection_is_invalid_media() -> None:
    async with serving(ok(b"x")) as server:
        pass
    await refused(fetcher(server), f"http://img.example:{server.port}/", "cannot be connected to")


async def test_a_failing_resolver_is_not_a_server_error() -> None:
    async def failing(host: str, port: int) -> Sequence[str]:
        raise OSError("resolver is down")

    subject = Fetcher(HostRules(), FetchLimits(), max_bytes=1000, resolver=failing)
    await refused(subject, "https://img.example/", "does not resolve")


async def test_concurrent_transfers_are_bounded() -> None:
    running = most = 0

    async def counted(request: bytes, writer: asyncio.StreamWriter) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        await ok(b"x")(request, writer)

    async with serving(counted) as server:
        subject = fetcher(server, fetch_concurrency=2)
        url = f"http://img.example:{server.port}/"
        assert await asyncio.gather(*(subject.fetch(url) for _ in range(6))) == [b"x"] * 6
    assert most == 2


async def test_the_progress_callback_can_abort_the_download() -> None:
    def full(nbytes: int) -> None:
        raise Overloaded("no room")

    async with serving(ok(b"x")) as server:
        with pytest.raises(Overloaded):
            await fetcher(server).fetch(f"http://img.example:{server.port}/", full)


async def test_proxy_variables_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(ok(b"direct")) as server, serving(ok(b"proxied")) as proxy:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, f"http://{LOOPBACK}:{proxy.port}")
        assert await fetcher(server).fetch(f"http://img.example:{server.port}/") == b"direct"


async def test_tls_verifies_the_host_name_although_it_connects_to_an_address() -> None:
    authority = trustme.CA()
    server_tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("img.example").configure_cert(server_tls)
    names: list[str | None] = []
    server_tls.sni_callback = lambda _, name, __: names.append(name)
    client_tls = ssl.create_default_context()
    authority.configure_trust(client_tls)
    async with serving(ok(b"sealed"), server_tls) as server:
        subject = Fetcher(
            HostRules(fetch_hosts_private=("img.example", "other.example"), fetch_ports=(server.port,)),
            FetchLimits(),
            max_bytes=1000,
            resolver=resolves(img_example=[LOOPBACK], other_example=[LOOPBACK]),
            ssl_context=client_tls,
        )
        assert await subject.fetch(f"https://img.example:{server.port}/") == b"sealed"
        assert names == ["img.example"]
        await refused(subject, f"https://other.example:{server.port}/", "cannot be connected to")
    async with serving(says("302 F", "Location: http://img.example/", "Content-Length: 0"), server_tls) as server:
        subject = Fetcher(
            HostRules(fetch_hosts_private=("img.example",), fetch_ports=(server.port, 80)),
            FetchLimits(),
            max_bytes=1000,
            resolver=resolves(img_example=[LOOPBACK]),
            ssl_context=client_tls,
        )
        await refused(subject, f"https://img.example:{server.port}/", "from https to http")
