"""The gateway's paths for LoRA adapters, and who may use them."""

from pathlib import Path

import pytest

from tests.unit.services.gateway.conftest import Rest
from tests.unit.services.gateway.fakes import MODEL, FakeRouter
from triptych.domain.lora import LoadedLora, LoadLora
from triptych.errors import InvalidRequest
from triptych.services.gateway.keys import new_key

LORA = LoadedLora("digits", "ab" * 32, 8, 100)
ORDER = {"lora_name": "digits", "lora_path": "adapters/digits", "parent": "demo"}
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


class LoadingRouter(FakeRouter):
    def __init__(self) -> None:
        super().__init__()
        self.orders: list[LoadLora | str] = []
        self.error: Exception | None = None

    async def load_lora(self, order: LoadLora) -> LoadedLora:
        if self.error is not None:
            raise self.error
        self.orders.append(order)
        self.models_answer = lambda: (MODEL, MODEL.with_lora(LORA))
        return LORA

    async def unload_lora(self, name: str) -> None:
        self.orders.append(name)


async def test_an_adapter_is_loaded_listed_with_its_parent_and_unloaded(rest: Rest) -> None:
    router = LoadingRouter()
    async with rest(router) as client:
        loaded = await client.post(LOAD, json=ORDER)
        assert (loaded.status_code, loaded.json()["id"], loaded.json()["parent"]) == (200, "digits", "demo")
        listed = (await client.get("/v1/models")).json()["data"]
        assert [(model["id"], model["parent"]) for model in listed] == [("demo", None), ("digits", "demo")]
        assert (await client.get("/v1/models/digits")).json() == listed[1]
        unloaded = await client.post(UNLOAD, json={"lora_name": "digits"})
        assert unloaded.json() == {"id": "digits", "object": "model", "deleted": True}
    assert router.orders == [LoadLora("digits", "adapters/digits", "demo"), "digits"]


async def test_errors_name_the_fields_of_the_body(rest: Rest) -> None:
    router = LoadingRouter()
    router.error = InvalidRequest("r is 512", param="directory")
    async with rest(router) as client:
        refused = await client.post(LOAD, json=ORDER)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "lora_path")
        for body, param in (
            ({}, "lora_name"),
            ({"lora_name": "a"}, "lora_path"),
            (ORDER | {"lora_name": 1}, "lora_name"),
        ):
            refused = await client.post(LOAD, json=body)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
        assert (await client.post(LOAD, content=b"x" * (1 << 17))).status_code == 413
        assert (await client.get(LOAD)).status_code == 405


async def test_only_operators_keys_may_give_orders(rest: Rest, tmp_path: Path) -> None:
    router, keys = LoadingRouter(), tmp_path / "keys.toml"
    user, lines = new_key("user")
    operator, more = new_key("operator")
    keys.write_text(f"{lines}{more}operator = true\n")
    async with rest(router, keys=keys) as client:
        for path, body in ((LOAD, ORDER), (UNLOAD, {"lora_name": "digits"})):
            assert (await client.post(path, json=body)).status_code == 401
            refused = await client.post(path, json=body, headers={"authorization": f"Bearer {user}"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "permission_denied")
            assert not router.orders
        for path, body in ((LOAD, ORDER), (UNLOAD, {"lora_name": "digits"})):
            done = await client.post(path, json=body, headers={"authorization": f"Bearer {operator}"})
            assert done.status_code == 200
    assert len(router.orders) == 2


@pytest.mark.parametrize(
    "settings", [{"allow_anyone": True}, {"host": "0.0.0.0", "allow_anyone": True, "allow_network": True}]
)
async def test_where_anyone_may_ask_nobody_may_give_orders(rest: Rest, settings: dict[str, object]) -> None:
    router = LoadingRouter()
    async with rest(router, **settings) as client:
        assert (await client.post(LOAD, json=ORDER)).status_code == 403
    assert not router.orders
