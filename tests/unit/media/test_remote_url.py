import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.errors import InvalidMedia
from triptych.media.remote_url import HostRules, RemoteUrl, is_public, parse_remote_url


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        ("https://example.com/a.png?x=1#f", RemoteUrl("https", "example.com", 443, "/a.png?x=1")),
        ("HTTP://Example.COM.", RemoteUrl("http", "example.com", 80, "/")),
        ("https://example.com:8443/", RemoteUrl("https", "example.com", 8443, "/")),
        ("https://[2001:DB8::1]/x", RemoteUrl("https", "2001:db8::1", 443, "/x")),
        ("https://93.184.216.34/x", RemoteUrl("https", "93.184.216.34", 443, "/x")),
        ("https://xn--bcher-kva.example?q", RemoteUrl("https", "xn--bcher-kva.example", 443, "/?q")),
    ],
)
def test_a_url_is_parsed(url: str, parts: RemoteUrl) -> None:
    assert parse_remote_url(url) == parts


@pytest.mark.parametrize(
    "url",
    [
        "",
        "example.com",
        "//example.com/a",
        "ftp://example.com/a",
        "file:///etc/passwd",
        "gopher://127.0.0.1:25/",
        "https://user:secret@example.com/",
        "https://example.com@127.0.0.1/",
        "https://@127.0.0.1/",
        "https://example.com\\@127.0.0.1/",
        "https://exam ple.com/",
        "https://example.com/a\r\nHost: x",
        "https://example.com/\x00",
        "https://bücher.example/",
        "https://ⓔxample.com/",
        "https://example.com:0/",
        "https://example.com:99999/",
        "https://example.com:port/",
        "https:///a",
        "https://.example.com/",
        "https://exa..mple.com/",
        "https://[::1/",
        "https://[fe80::1%25eth0]/",
        "https://[v1.x]/",
        "http://2130706433/",
        "http://0x7f000001/",
        "http://0x7f.1/",
        "http://0177.0.0.1/",
        "http://127.1/",
        "http://127.0.0.1.1/",
        "http://1.2.3.4.:80/",
        "http://%31%32%37.0.0.1/",
        "https://example.com/" + "a" * 10_000,
    ],
    ids=lambda url: url[:40],
)
def test_ambiguous_urls_are_refused(url: str) -> None:
    with pytest.raises(InvalidMedia) as caught:
        parse_remote_url(url)
    assert "secret" not in caught.value.message


@given(st.text())
def test_any_text_is_parsed_or_refused(text: str) -> None:
    for url in (text, "https://" + text):
        try:
            parsed = parse_remote_url(url)
        except InvalidMedia:
            continue
        assert parse_remote_url(parsed.join("")) == parsed


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "127.8.8.8",
        "0.0.0.0",
        "0.1.2.3",
        "10.0.0.1",
        "172.16.0.1",
        "192.168.1.1",
        "169.254.169.254",
        "100.64.0.1",
        "100.100.100.200",
        "168.63.129.16",
        "192.0.0.192",
        "192.0.2.1",
        "198.18.0.1",
        "224.0.0.1",
        "240.0.0.1",
        "255.255.255.255",
        "::",
        "::1",
        "::ffff:127.0.0.1",
        "::ffff:a9fe:a9fe",
        "::127.0.0.1",
        "64:ff9b::7f00:1",
        "64:ff9b:1::a00:1",
        "2002:7f00:1::",
        "2002:a00:1::1",
        "fe80::1",
        "fe80::1%eth0",
        "2606:4700::1%eth0",
        "fec0::1",
        "fc00::1",
        "fd00:ec2::254",
        "ff02::1",
        "2001:db8::1",
        "example.com",
        "",
    ],
)
def test_non_public_addresses_are_refused(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["1.1.1.1", "93.184.216.34", "2606:4700:4700::1111", "::ffff:1.1.1.1"])
def test_public_addresses_are_allowed(address: str) -> None:
    assert is_public(address)


def test_allowed_hosts_and_ports_are_parsed() -> None:
    def taken(rules: HostRules, url: str) -> bool:
        try:
            rules.check(parse_remote_url(url))
        except InvalidMedia:
            return False
        return True

    assert taken(HostRules(), "https://anything.example/")
    assert not taken(HostRules(), "https://anything.example:22/")
    assert taken(HostRules(fetch_ports=(8443,)), "https://anything.example:8443/")
    only = HostRules(fetch_hosts=("a.example", ".b.example"), fetch_hosts_denied=("evil.b.example",))
    assert [taken(only, f"https://{host}/") for host in ("a.example", "x.a.example", "x.b.example", "b.example")] == [
        True,
        False,
        True,
        False,
    ]
    assert not taken(only, "https://EVIL.b.example./")
    assert not taken(only, "https://xb.example/")
