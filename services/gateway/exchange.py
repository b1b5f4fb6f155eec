"""A request while it is answered."""

from collections.abc import Sequence
from dataclasses import dataclass

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from . import request_fields
from .admission import Hold
from .answers import Form
from .keys import Caller
from .lifetime import RequestLifetime


@dataclass(slots=True)
class Exchange:
    """POST request while it is answered."""

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
