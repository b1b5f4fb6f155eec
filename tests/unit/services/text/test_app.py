"""An instance of role EPD in one process, built from its settings: two services on one port."""

import asyncio
from contextlib import aclosing
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from triptych.demo import MODEL_DIR
from triptych.domain.stage import Role, Stage
from triptych.engine.compute import ComputeOptions
from triptych.engine.decoder.options import EngineOptions
from triptych.rpc.stubs import InstanceStub
from triptych.runtime.process import CannotStart
from triptych.services.text.app import app
from triptych.services.text.encoder_part import settings_of_encoder
from triptych.services.text.settings import TextSettings
from triptych.transport.options import TransferOptions

MIB = 1 << 20


def told(**changes: object) -> TextSettings:
    return TextSettings(model=MODEL_DIR, role=Role.EPD, port=0, **changes)  # type: ignore[arg-type]


def test_the_encoder_gets_its_own_settings_and_shares_those_of_the_instance() -> None:
    settings = told(
        compute=ComputeOptions(dtype="bfloat16"),
        transfers=TransferOptions(max_pull_s=3.0),
        mount_encoder="--arena-bytes 1048576 --max-batch-items=3",
    )
    encoder = settings_of_encoder(settings)
    assert (encoder.arena_bytes, encoder.batches.max_batch_items) == (MIB, 3)
    assert (encoder.model, encoder.compute.dtype, encoder.transfers.max_pull_s) == (MODEL_DIR, "bfloat16", 3.0)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("--arena-bytes 1", "arena_bytes"),
        ('--arena-bytes "1', "No closing quotation"),
        ("--port 1234", "port belongs to the whole instance"),
        ("--model /elsewhere", "model belongs to the whole instance"),
        ("--dtype bfloat16", "dtype belongs to the whole instance"),
        ("--engine vllm", "engine vllm is for encoders that are processes of their own"),
    ],
)
def test_encoder_settings_owned_by_the_instance_are_refused_at_start(command: str, message: str) -> None:
    with pytest.raises(CannotStart, match=f"--mount-encoder: (.|\n)*{message}"):
        settings_of_encoder(told(mount_encoder=command))


async def test_a_directory_without_a_model_is_one_line_at_start(tmp_path: Path) -> None:
    with pytest.raises(CannotStart, match=r"config\.json"):
        async with app(TextSettings(model=tmp_path, role=Role.EPD, port=0)):
            pass


@pytest.mark.slow
async def test_two_services_are_one_instance_on_one_port() -> None:
    small = {"image_cache_bytes": MIB, "transfers": TransferOptions(("shm",))}
    settings = told(
        **small,
        mount_encoder=f"--arena-bytes {MIB}",
        engine=EngineOptions(kv_cache_bytes=MIB, tpot_slo_s=0.05, max_sequences=4),
    )
    async with app(settings) as running, grpc.aio.insecure_channel(f"127.0.0.1:{running.port}") as channel:
        stub = InstanceStub(f"127.0.0.1:{running.port}")
        info = await stub.describe()
        assert info.role is Role.EPD
        assert info.max_items
        assert info.kv_tokens
        assert info.kv_block_tokens
        assert {offer.backend for offer in info.offers} == {"shm"}, "other processes cannot use the in-memory transport"
        async with aclosing(stub.watch_load()) as loads:
            assert set((await anext(loads)).stages) == set(Stage)
        health: Any = health_pb2_grpc.HealthStub(channel)
        for name in ("", "triptych.v1.Text", "triptych.v1.Encoder", "triptych.v1.Instance"):
            status = await health.Check(health_pb2.HealthCheckRequest(service=name), timeout=60)
            assert status.status == health_pb2.HealthCheckResponse.SERVING
        assert await running.missing() == ()
        async with asyncio.timeout(60):
            await running.drain()
        assert await running.missing() == ("it is draining",)
        status = await health.Check(health_pb2.HealthCheckRequest(service="triptych.v1.Encoder"), timeout=60)
        assert status.status == health_pb2.HealthCheckResponse.NOT_SERVING
        await stub.close()


@pytest.mark.slow
@pytest.mark.parametrize(("side", "task"), [("text", "sweep"), ("encoder", "sweep of embeddings")])
async def test_the_process_fails_when_either_service_fails(
    side: str, task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {
        "image_cache_bytes": MIB,
        "transfers": TransferOptions(("shm",)),
        "engine": EngineOptions(kv_cache_bytes=MIB),
    }

    def broken() -> None:
        raise RuntimeError("on purpose")

    async with app(told(**small, sweep_interval_s=0.01, mount_encoder=f"--arena-bytes {MIB}")) as running:
        if side == "encoder":
            assert running.instance.encoder is not None
            monkeypatch.setattr(running.instance.encoder.store, "sweep", broken)
        else:
            monkeypatch.setattr(type(running.instance.receiver), "tick", lambda _: broken())
        async with asyncio.timeout(60):
            assert await running.failed() == f"text/{task} (RuntimeError: on purpose)"
