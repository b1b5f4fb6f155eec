"""A gateway and its router in one process (``--mount-router``)."""

import shlex

import httpx
import pytest

from triptych.demo import MODEL_DIR, MODEL_ID
from triptych.rpc.stubs import RouterStub
from triptych.runtime.process import CannotStart
from triptych.services.gateway.mounted import app
from triptych.services.gateway.settings import GatewaySettings


async def test_the_router_answers_through_the_gateway_and_on_its_own_port() -> None:
    command_line = f"--port 0 --model {shlex.quote(str(MODEL_DIR))}"
    async with app(GatewaySettings(port=0, mount_router=command_line)) as both:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{both.port}", trust_env=False, timeout=60) as client:
            answer = await client.get("/ready")
            assert answer.status_code == 503
            missing = answer.json()["missing"]
            assert missing, "there are no instances"
            assert "router" not in missing
            metrics = (await client.get("/metrics")).text
            assert "triptych_http_requests_running" in metrics
            assert "triptych_requests_running" in metrics
        stub = RouterStub(f"127.0.0.1:{both.router_port}")
        assert (await stub.readiness()).missing == tuple(missing)
        await stub.close()
        await both.drain()


async def test_the_routers_settings_bound_the_token_ids_of_a_request() -> None:
    command_line = f"--port 0 --model {shlex.quote(str(MODEL_DIR))} --max-stop-token-ids 70 --max-logit-bias 1030"
    ask = {"model": MODEL_ID, "messages": [{"role": "user", "content": "Hi"}]}
    async with (
        app(GatewaySettings(port=0, mount_router=command_line)) as both,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{both.port}", trust_env=False, timeout=60) as client,
    ):
        for field, limit in (("stop_token_ids", 70), ("logit_bias", 1030)):

            async def refused(count: int, field: str = field) -> tuple[int, str | None, str]:
                tokens = list(range(count)) if field == "stop_token_ids" else {str(token): 1 for token in range(count)}
                answer = await client.post("/v1/chat/completions", json={**ask, field: tokens})
                error = answer.json()["error"]
                return answer.status_code, error["param"], error["message"]

            status, param, message = await refused(limit + 1)
            assert (status, param) == (400, field)
            assert f"at most {limit} are allowed" in message
            status, param, _ = await refused(limit)
            assert (status, param) == (503, None), "there are no instances"
        await both.drain()


@pytest.mark.parametrize("command_line", ["--no-such-setting 1", "--port 70000", "--model 'unclosed"])
async def test_invalid_router_options_stop_the_gateways_start(command_line: str) -> None:
    with pytest.raises((CannotStart, SystemExit)):
        async with app(GatewaySettings(port=0, mount_router=command_line)):
            pass
