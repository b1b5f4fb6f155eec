"""A gateway and its router in one process, as ``--mount-router`` makes them."""

import shlex

import httpx
import pytest

from services.gateway.mounted import app
from services.gateway.settings import GatewaySettings
from triptych.demo import MODEL_DIR
from triptych.rpc.stubs import RouterStub
from triptych.runtime.process import CannotStart


async def test_the_router_answers_through_the_gateway_and_on_its_own_port() -> None:
    command_line = f"--port 0 --model {shlex.quote(str(MODEL_DIR))}"
    async with app(GatewaySettings(port=0, mount_router=command_line)) as both:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{both.port}", trust_env=False) as client:
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


@pytest.mark.parametrize("command_line", ["--no-such-setting 1", "--port 70000", "--model 'unclosed"])
async def test_a_router_that_is_told_nonsense_keeps_the_gateway_from_starting(command_line: str) -> None:
    with pytest.raises((CannotStart, SystemExit)):
        async with app(GatewaySettings(port=0, mount_router=command_line)):
            pass
