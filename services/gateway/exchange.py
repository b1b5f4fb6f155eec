"""A request while it is answered."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from triptych.ports import Clock

from . import request_fields
from .admission import Hold
from .answers import Form
from .http import ARRIVED_S
from .keys import Caller
from .lifetime import RequestLifetime
from .service import Gateway


@dataclass(slots=True)
class Exchange:
    """Request while it is answered, and the place and bytes that it holds."""

    request_id: str
    caller: Caller
    lifetime: RequestLifetime
    scope: Scope
    receive: Receive
    send: Send
    hold: Hold
    streaming: Form | None = None
    """Form of a stream whose 200 has been sent: errors are reported in the stream from here on."""

    async def answer(self, body: object, ignored: Sequence[str] = ()) -> None:
        """Send a whole answer as JSON. Raises DeadlineExceeded instead after the deadline."""
        self.lifetime.check()
        headers = {request_fields.HEADER: request_fields.header_of(ignored)} if ignored else None
        await JSONResponse(body, headers=headers)(self.scope, self.receive, self.send)


@asynccontextmanager
async def admitted(
    gateway: Gateway, scope: Scope, receive: Receive, send: Send, clock: Clock
) -> AsyncGenerator[Exchange]:
    """A request within its limits and its timeout. Raises what ends it early, RateLimited or Overloaded."""
    state = scope["state"]
    caller: Caller = state["caller"]
    lifetime = RequestLifetime(gateway.timeout_s(state["headers"]), state[ARRIVED_S], clock)
    lifetime.check()
    with caller.request(), gateway.admission.request(state["request_id"], lifetime, caller.name) as hold:
        async with lifetime.running():
            yield Exchange(state["request_id"], caller, lifetime, scope, receive, send, hold)
