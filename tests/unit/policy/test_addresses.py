import pytest

from triptych.policy.addresses import canonical, seen_from, why_not_called


@pytest.mark.parametrize("address", ["127.0.0.1:50061", "127.9.9.9:1", "[::1]:65535", "localhost:50061", "LocalHost:1"])
def test_loopback_addresses_are_always_allowed(address: str) -> None:
    assert why_not_called(address, beyond_loopback=False) is None


@pytest.mark.parametrize("address", ["10.0.0.7:50061", "[fe80::1]:1", "encoder-1.pool.svc:50061", "169.254.169.254:80"])
def test_other_addresses_are_allowed_only_by_setting(address: str) -> None:
    assert why_not_called(address, beyond_loopback=True) is None
    assert why_not_called(address, beyond_loopback=False) == "it is not a loopback address"


@pytest.mark.parametrize(
    "address",
    [
        "",
        "127.0.0.1",
        ":50061",
        "127.0.0.1:",
        "127.0.0.1:0",
        "127.0.0.1:65536",
        "127.0.0.1:999999",
        "unix:/run/encoder",
        "unix:///run/encoder:1",
        "dns:///127.0.0.1:1",
        "http://127.0.0.1:1",
        "user@127.0.0.1:1",
        "127.0.0.1:1/path",
        "127.0.0.1:1\n",
        " 127.0.0.1:1",
        "a b:1",
        "[127.0.0.1:1",
        "[nonsense]:1",
        "[::1]",
        "::1:50061",
        "ä.example:1",
        "-x:1",
        f"{'a' * 254}:1",
        "127.0.0.1:\u0661",
    ],
)
def test_malformed_addresses_are_never_allowed(address: str) -> None:
    assert why_not_called(address, beyond_loopback=True) == "it is not HOST:PORT"


@pytest.mark.parametrize(
    ("written", "form"),
    [
        ("localhost:7001", "localhost:7001"),
        ("LocalHost:07001", "localhost:7001"),
        ("127.0.0.1:7001", "127.0.0.1:7001"),
        ("[127.0.0.1]:7001", "127.0.0.1:7001"),
        ("[0:0:0:0:0:0:0:1]:00001", "[::1]:1"),
        ("[FE80::0001]:50061", "[fe80::1]:50061"),
        ("Encoder-1.pool.svc:50061", "encoder-1.pool.svc:50061"),
    ],
)
def test_an_address_has_one_form(written: str, form: str) -> None:
    assert why_not_called(written, beyond_loopback=True) is None
    assert canonical(written) == form
    assert canonical(form) == form


@pytest.mark.parametrize(
    ("address", "caller", "seen"),
    [
        ("127.0.0.1:9100", "127.0.0.1", "127.0.0.1:9100"),
        ("127.0.0.1:9100", "10.0.0.7", ""),
        ("127.0.0.1:9100", "", "127.0.0.1:9100"),
        ("0.0.0.0:9100", "10.0.0.7", "10.0.0.7:9100"),
        ("[::]:9100", "fe80::7", "[fe80::7]:9100"),
        ("0.0.0.0:9100", "", ""),
        ("10.1.0.7:9100", "10.0.0.7", "10.1.0.7:9100"),
        ("", "10.0.0.7", ""),
        ("0.0.0.0:port", "10.0.0.7", ""),
        ("encoder:9100", "10.0.0.7", ""),
    ],
)
def test_an_address_is_completed_by_the_callers_host_or_is_of_no_use_elsewhere(
    address: str, caller: str, seen: str
) -> None:
    assert seen_from(address, caller) == seen
