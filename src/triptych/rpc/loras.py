"""The calls of routers and instances that load and unload LoRA adapters."""

from typing import Any

import grpc.aio

from triptych.ports import Loras
from triptych.v1 import common_pb2
from triptych.wire import common

Context = grpc.aio.ServicerContext[Any, Any]


class LoraCalls:
    """Part of a servicer, before the generated one among its bases. Serves any ``ports.Loras``."""

    _service: Loras

    async def LoadLora(self, request: common_pb2.LoadLoraRequest, context: Context) -> common_pb2.LoadLoraResponse:  # noqa: N802 - the name is the wire's
        del context
        lora = await self._service.load_lora(common.LOAD_LORA.from_wire(request))
        return common_pb2.LoadLoraResponse(lora=common.LORA.to_wire(lora))

    async def UnloadLora(  # noqa: N802
        self, request: common_pb2.UnloadLoraRequest, context: Context
    ) -> common_pb2.UnloadLoraResponse:
        del context
        await self._service.unload_lora(request.name)
        return common_pb2.UnloadLoraResponse()
