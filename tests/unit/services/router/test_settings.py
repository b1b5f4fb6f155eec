from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from triptych.runtime.settings import SettingsError
from triptych.services.router.prepare import AUTO
from triptych.services.router.settings import RouterSettings
from triptych.tokens.reasoning import SYNTAXES
from triptych.tokens.tool_calls import SYNTAXES as CALL_SYNTAXES


def test_instances_are_a_list_in_the_environment_and_on_the_command_line() -> None:
    assert RouterSettings.load(["--instances", "a:1,b:2"], {}).instances == ("a:1", "b:2")
    assert RouterSettings.load([], {"TRIPTYCH_ROUTER_INSTANCES": "c:3"}).instances == ("c:3",)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--arena-retry-s", "7"], "exceeds longest_pause_s"),
        (["--first-backoff-s", "70"], "exceeds longest_backoff_s"),
        (["--min-lease-s", "70"], "exceeds max_lease_s"),
        (["--slo", "ttft=5x,tbt=fast"], "slo 'tbt=fast' is not"),
        (["--report-window-s", "70"], "exceeds attainment_window_s"),
        (["--reconnect-min-s", "3"], "exceeds reconnect_max_s"),
        (["--instances", "a:1,b:2,a:1"], "instances names a:1 twice"),
        (["--instances", "[::1]:1,[0:0::1]:01"], r"instances names \[::1\]:1 twice"),
        (["--instances", "a:1,nowhere"], "nowhere.: it is not HOST:PORT"),
        (["--instances", "a:1", "--instances-file", "f"], "give only one"),
        (["--instances", "a:1", "--pool-manager", "m:1"], "instances and pool_manager all name the instances"),
        (["--pool-manager", "m:1,nowhere"], "nowhere.: it is not HOST:PORT"),
        (["--pool-manager", "m:1,m:1"], "pool_manager names m:1 twice"),
        (["--pool-manager", ",".join(f"m:{port}" for port in range(1, 10))], "names 9 pool managers, at most 8"),
        (["--pool-manager", "m:1", "--host", "0.0.0.0", "--allow-network"], "set advertise for pool_manager"),
        (["--advertise", "nowhere"], "advertise 'nowhere': it is not HOST:PORT"),
        (["--manager-retry-min-s", "6"], "exceeds manager_retry_max_s"),
        (["--instances-file", "f", "--instances-poll-s", "0"], "instances_poll_s"),
        (["--max-concurrent-requests", "0"], "max_concurrent_requests"),
        (
            ["--text-routing", "random"],
            "text_routing is 'random', which is none of least-loaded, least-requests, power-of-two, predicted, round-robin",
        ),
        (["--encoder-routing", "x"], "encoder_routing is 'x'"),
        (["--sharding", "always"], "sharding is 'always', which is none of earliest-end, never"),
        (["--ordering", "lifo"], "ordering is 'lifo', which is none of deadline, first-come, slo"),
        (["--admission", "all"], "admission is 'all', which is none of bounded"),
        (["--deadlines", "never"], "deadlines is 'never', which is none of admit, refuse"),
    ],
)
def test_contradictory_settings_are_refused(argv: list[str], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        RouterSettings.load(argv, {})


def test_policies_are_chosen_by_name() -> None:
    settings = RouterSettings.load(["--encoder-routing", "power-of-two", "--text-routing", "round-robin"], {})
    assert (settings.policies.encoder_routing, settings.policies.text_routing) == ("power-of-two", "round-robin")


def test_tls_needs_all_its_files_and_replaces_allow_network() -> None:
    files = ["--tls-cert", "c.pem", "--tls-key", "k.pem", "--tls-ca", "a.pem"]
    assert RouterSettings.load([*files, "--host", "0.0.0.0"], {}).tls.files == (
        Path("c.pem"),
        Path("k.pem"),
        Path("a.pem"),
    )
    assert RouterSettings.load([], {}).tls.files is None
    for some in (files[:2], files[:4], files[2:]):
        with pytest.raises(SettingsError, match="TLS needs tls_cert, tls_key and tls_ca"):
            RouterSettings.load(some, {})
    with pytest.raises(SettingsError, match="configure TLS"):
        RouterSettings.load(["--host", "0.0.0.0"], {})


def test_others_are_told_the_address_to_reach_it_at() -> None:
    assert RouterSettings.load([], {}).advertised(7) == "127.0.0.1:7"
    assert RouterSettings.load(["--host", "::1"], {}).advertised(7) == "[::1]:7"
    anywhere = ["--host", "0.0.0.0", "--allow-network", "--pool-manager", "m:1", "--advertise", "me:9"]
    assert RouterSettings.load(anywhere, {}).advertised(7) == "me:9"


def test_the_setting_for_reasoning_names_every_syntax() -> None:
    assert get_args(get_type_hints(RouterSettings)["reasoning"]) == (AUTO, "none", *SYNTAXES)


def test_the_setting_for_tools_names_every_syntax() -> None:
    assert get_args(get_type_hints(RouterSettings)["tool_syntax"]) == (AUTO, "none", *CALL_SYNTAXES)
