"""Which settings of a gateway go together."""

from collections.abc import Sequence

import pytest

from services.gateway.settings import GatewaySettings
from triptych.runtime.settings import SettingsError


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--router", "nowhere"], "nowhere.: it is not HOST:PORT"),
        (["--router", "a:1,a:1"], "from 1 to 64 routers, each once"),
        (["--router", ""], "from 1 to 64 routers"),
        (["--router", "a:1", "--pool-manager", "m:1"], "router and pool_manager both name routers"),
        (["--mount-router", "--model m", "--pool-manager", "m:1"], "mount_router and pool_manager both"),
    ],
)
def test_settings_name_routers_in_one_way(argv: Sequence[str], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        GatewaySettings.load(argv, {})
