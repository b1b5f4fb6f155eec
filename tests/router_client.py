"""The part of ``rpc.routers.RouterClient`` that passes calls on to a router in this process."""

from collections.abc import AsyncGenerator

from triptych.domain.chat import ChatRequest, Tokenized
from triptych.domain.instance import ModelInfo
from triptych.domain.lora import LoadedLora, LoadLora
from triptych.domain.resolving import ResolvedItem, ResolveRequest
from triptych.domain.timeline import Readiness, Timeline
from triptych.services.router.service import RouterService


class LocalRouter:
    """What a test does not let fail. Its subclasses add chats and the state of the connection."""

    service: RouterService

    async def models(self) -> tuple[ModelInfo, ...]:
        return await self.service.models()

    async def tokenize(self, request: ChatRequest, *, return_token_strs: bool = False) -> Tokenized:
        return await self.service.tokenize(request, return_token_strs=return_token_strs)

    def resolve(self, request: ResolveRequest) -> AsyncGenerator[tuple[ResolvedItem, ...]]:
        return self.service.resolve(request)

    async def load_lora(self, order: LoadLora) -> LoadedLora:
        return await self.service.load_lora(order)

    async def unload_lora(self, name: str) -> None:
        await self.service.unload_lora(name)

    async def timeline(self, request_id: str) -> Timeline:
        return await self.service.timeline(request_id)

    async def readiness(self) -> Readiness:
        return await self.service.readiness()

    async def close(self) -> None:
        pass
