"""The endpoints of OpenAI's Responses API, and the stored responses behind them."""

import asyncio
import secrets

from pydantic_core import to_json
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from triptych.errors import InvalidRequest, RequestTooLarge
from triptych.ports import Clock

from . import edge
from .answers import Form
from .exchange import Exchange, admitted
from .openai_api import ParsedRequest
from .request_ids import RESPONSE_PREFIX
from .response_store import Stored, nbytes_of
from .responses_api import ParsedResponses, continued
from .responses_form import DeletedResponse, InputItemList, RequestItem, ResponsesForm, input_items
from .service import Gateway

_MAX_LISTED, _LISTED = 100, 20


class Responses:
    """Responses of a caller are known to that caller alone: its key is their owner."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._store = gateway.responses

    def open(self, exchange: Exchange, request: ParsedResponses) -> tuple[Form, ParsedRequest]:
        """The form that stores its response, and the request with the conversation before it.

        Raises InvalidRequest, RequestTooLarge, or Overloaded as for the bytes of a body.
        """
        owner, own = exchange.caller.name, request.messages
        before = self._store.conversation(owner, request.previous)
        if before:
            nbytes, most = nbytes_of((*before, *own)), self._gateway.settings.max_body_bytes
            if nbytes > most:
                message = f"previous_response_id: the conversation has about {nbytes} bytes, the limit is {most}"
                raise RequestTooLarge(message, param="previous_response_id")
            exchange.hold.grow(nbytes)
        response_id = RESPONSE_PREFIX + exchange.request_id
        if self._store.has(owner, response_id):  # the client has named two requests alike
            response_id = RESPONSE_PREFIX + secrets.token_hex(16)
        form = ResponsesForm(
            response_id,
            request,
            self._gateway.created(),
            lambda body, answer: self._store.put(owner, response_id, Stored(body, own, answer, request.previous)),
        )
        return form, continued(request, before)

    async def retrieve(self, request: Request) -> Response:
        """Raises NotFound, or InvalidRequest for a stream: what is stored has ended."""
        if request.query_params.get("stream", "false").lower() not in ("false", "0", ""):
            raise InvalidRequest("stream: stored responses are not streamed", param="stream")
        stored = self._store.get(*_named(request))
        return Response(stored.body, media_type="application/json")

    async def delete(self, request: Request) -> Response:
        """Raises NotFound."""
        owner, response_id = _named(request)
        self._store.delete(owner, response_id)
        return JSONResponse(DeletedResponse(id=response_id, object="response", deleted=True))


class InputItems:
    """The items of a stored response's request, as an ASGI application: they may be as large as a body."""

    def __init__(self, gateway: Gateway, clock: Clock) -> None:
        self._gateway = gateway
        self._clock = clock
        self._encoding = asyncio.Semaphore(1)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises NotFound or InvalidRequest, and what ``admitted`` raises."""
        request = Request(scope)
        async with (
            admitted(self._gateway, scope, receive, send, self._clock) as exchange,
            exchange.lifetime.ended_by(lambda: edge.disconnected(receive)),
        ):
            owner, response_id = _named(request)
            messages = self._gateway.responses.get(owner, response_id).messages
            async with self._encoding:
                body = await asyncio.to_thread(
                    lambda: to_json(_page(input_items(messages, response_id), request.query_params))
                )
            exchange.hold.grow(len(body))
            exchange.lifetime.check()
            await Response(body, media_type="application/json")(scope, receive, send)


def _named(request: Request) -> tuple[str, str]:
    """Owner and id."""
    return request.state.caller.name, request.path_params["response_id"]


def _page(items: list[RequestItem], asked: QueryParams) -> InputItemList:
    """The part of a list that a query asks for. Raises InvalidRequest."""
    limit, order, after = asked.get("limit", str(_LISTED)), asked.get("order", "desc"), asked.get("after")
    if not (limit.isascii() and limit.isdigit() and len(limit) <= 3 and 1 <= int(limit) <= _MAX_LISTED):
        raise InvalidRequest(f"limit: must be from 1 to {_MAX_LISTED}, got {limit[:40]!r}", param="limit")
    if order not in ("asc", "desc"):
        raise InvalidRequest(f"order: must be 'asc' or 'desc', got {order[:40]!r}", param="order")
    if order == "desc":
        items.reverse()
    if after:
        places = [place for place, item in enumerate(items) if item.item_id == after]
        if not places:
            raise InvalidRequest(f"after: there is no item {after[:100]!r}", param="after")
        items = items[places[0] + 1 :]
    shown = items[: int(limit)]
    return {
        "object": "list",
        "data": [item.body() for item in shown],
        "first_id": shown[0].item_id if shown else None,
        "last_id": shown[-1].item_id if shown else None,
        "has_more": len(items) > len(shown),
    }
