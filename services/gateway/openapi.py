"""The gateway's OpenAPI document, derived from the types of requests and answers."""

import json
from functools import cache
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import JsonSchemaMode

from triptych import __version__
from triptych.domain.timeline import Readiness, Timeline

from . import answer_types, messages_form, responses_form
from .messages_models import CountTokensRequest, MessagesRequest
from .openai_models import (
    ChatCompletionRequest,
    CompletionRequest,
    LoadLoraRequest,
    TokenizeRequest,
    UnloadLoraRequest,
)
from .request_fields import HEADER
from .responses_models import ResponsesRequest

READINESS = TypeAdapter(Readiness)
TIMELINE = TypeAdapter(Timeline)
_REQUESTS = (
    ChatCompletionRequest,
    CompletionRequest,
    ResponsesRequest,
    MessagesRequest,
    CountTokensRequest,
    TokenizeRequest,
    LoadLoraRequest,
    UnloadLoraRequest,
)
_ANSWERS: tuple[type, ...] = (
    answer_types.Error,
    answer_types.ChatCompletion,
    answer_types.ChatCompletionChunk,
    answer_types.Completion,
    responses_form.Response,
    responses_form.DeletedResponse,
    responses_form.InputItemList,
    messages_form.MessagesError,
    messages_form.AnswerMessage,
    messages_form.TokenCount,
    answer_types.Tokens,
    answer_types.Model,
    answer_types.Models,
    answer_types.Unloaded,
    answer_types.Health,
    answer_types.Version,
    answer_types.Load,
    Readiness,
    Timeline,
)


@cache
def document_json() -> bytes:
    """The document as JSON. Making it takes longer than the rest of a gateway, and it never differs."""
    return json.dumps(document()).encode()


def _ref(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}


_HEADERS = [
    {"name": "x-request-id", "in": "header", "schema": {"type": "string"}, "description": "The request's id."},
    {
        "name": "x-request-timeout",
        "in": "header",
        "schema": {"type": "string"},
        "description": "Seconds that the request may take.",
    },
]
_IGNORED = {
    HEADER: {"schema": {"type": "string"}, "description": "Fields of the request that had no effect, if there are any."}
}
_PAGE = [
    {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": 100, "default": 20}},
    {"name": "order", "in": "query", "schema": {"enum": ["asc", "desc"], "default": "desc"}},
    {"name": "after", "in": "query", "schema": {"type": "string"}, "description": "Id of the item before the first."},
]
_STORED = ("400", "401", "403", "404", "429", "500")
_CLOSED = {
    "400": "The request is invalid; param names the field.",
    "401": "A valid API key is needed.",
    "403": "The Host header is not allowed, or this needs an operator's key.",
    "404": "There is no such model or request.",
    "408": "The body did not arrive in time.",
    "413": "The body is too large.",
    "415": "The body is compressed.",
    "417": "The expectation is not supported.",
    "431": "Headers or trailers are too large.",
    "429": "A limit is reached; Retry-After says when to retry.",
    "499": "The client closed the connection.",
    "500": "A defect; the server's log has the details.",
    "503": "An instance is down, draining or not started yet.",
    "504": "The request's time limit has passed.",
}

_OF_PROBES = ("401", "403", "429", "500")


def document() -> dict[str, Any]:
    """OpenAPI 3.1, as a JSON object."""
    adapters: list[tuple[str, JsonSchemaMode, TypeAdapter[Any]]] = [
        *((model.__name__, "validation", TypeAdapter(model)) for model in _REQUESTS),
        *((answer.__name__, "serialization", TypeAdapter(answer)) for answer in _ANSWERS),
    ]
    _, definitions = TypeAdapter.json_schemas(adapters, ref_template="#/components/schemas/{model}")
    stream = "An answer; with stream: true its chunks as server-sent events, which end with data: [DONE]."
    model_id = [{"name": "model_id", "in": "path", "required": True, "schema": {"type": "string"}}]
    request_id = [{"name": "request_id", "in": "path", "required": True, "schema": {"type": "string"}}]
    response_id = [{"name": "response_id", "in": "path", "required": True, "schema": {"type": "string"}}]
    numbered = "A response; with stream: true its numbered events as server-sent events."
    blocks = "A message; with stream: true its events as server-sent events, which end with message_stop."
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Triptych",
            "version": __version__,
            "description": "OpenAI-compatible serving of multimodal language models.",
        },
        "paths": {
            "/v1/chat/completions": {
                "post": _post("chat", "ChatCompletionRequest", "ChatCompletion", stream, chunk="ChatCompletionChunk")
            },
            "/v1/completions": {
                "post": _post("complete", "CompletionRequest", "Completion", stream, chunk="Completion")
            },
            "/v1/responses": {
                "post": _post("respond", "ResponsesRequest", "Response", numbered, chunk="Event of a response")
            },
            "/v1/responses/{response_id}": {
                "get": _get("getResponse", "Response", "A stored response.", parameters=response_id, closed=_STORED),
                "delete": _get(
                    "deleteResponse", "DeletedResponse", "It is gone.", parameters=response_id, closed=_STORED
                ),
            },
            "/v1/responses/{response_id}/input_items": {
                "get": _get(
                    "listInputItems",
                    "InputItemList",
                    "Items of its request.",
                    parameters=response_id + _PAGE,
                    closed=(*_STORED, "503", "504"),
                )
            },
            "/v1/messages": {
                "post": _post(
                    "message",
                    "MessagesRequest",
                    "AnswerMessage",
                    blocks,
                    chunk="Event of a message",
                    error="MessagesError",
                )
            },
            "/v1/messages/count_tokens": {
                "post": _post(
                    "countTokens", "CountTokensRequest", "TokenCount", "The prompt's tokens.", error="MessagesError"
                )
            },
            "/tokenize": {"post": _post("tokenize", "TokenizeRequest", "Tokens", "The ids that the model would see.")},
            "/v1/load_lora_adapter": {
                "post": _order("loadLora", "LoadLoraRequest", "Model", "The model that the adapter is served as.")
            },
            "/v1/unload_lora_adapter": {
                "post": _order("unloadLora", "UnloadLoraRequest", "Unloaded", "It takes no more requests.")
            },
            "/v1/models": {"get": _get("listModels", "Models", "The models that are served.")},
            "/v1/models/{model_id}": {"get": _get("getModel", "Model", "One model.", parameters=model_id)},
            "/v1/requests/{request_id}/timeline": {
                "get": _get("getTimeline", "Timeline", "Where a request's time went.", parameters=request_id)
            },
            "/health": {
                "get": _get("health", "Health", "The process is alive.", closed=("403", "500")) | {"security": []}
            },
            "/ping": {
                method: _get(f"{method}Ping", "Health", "The process is alive.", closed=("403", "500"))
                | {"security": []}
                for method in ("get", "post")
            },
            "/version": {"get": _get("version", "Version", "The gateway's version.", closed=_OF_PROBES)},
            "/load": {"get": _get("load", "Load", "Requests that run in this process.", closed=_OF_PROBES)},
            "/ready": {"get": _ready()},
            "/metrics": {"get": _metrics()},
        },
        "components": {
            "schemas": definitions["$defs"],
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{"key": []}, {"x-api-key": []}, {}],
    }


def _json(description: str, schema: str) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": _ref(schema)}}}


def _errors(statuses: tuple[str, ...], error: str = "Error") -> dict[str, Any]:
    return {status: _json(_CLOSED[status], error) for status in statuses}


def _events(chunk: str) -> dict[str, Any]:
    about = f"One server-sent event. `data` is a {chunk} or an Error as JSON text, or [DONE] at the end."
    return {"type": "object", "description": about, "required": ["data"], "properties": {"data": {"type": "string"}}}


def _post(
    name: str, request: str, answer: str, description: str, *, chunk: str = "", error: str = "Error"
) -> dict[str, Any]:
    good = _json(description, answer)
    if chunk:
        good["content"]["text/event-stream"] = {"schema": _events(chunk)}
    return {
        "operationId": name,
        "parameters": _HEADERS,
        "requestBody": {"required": True, "content": {"application/json": {"schema": _ref(request)}}},
        "responses": {"200": good | ({"headers": _IGNORED} if chunk else {}), **_errors(tuple(_CLOSED), error)},
    }


def _order(name: str, request: str, answer: str, description: str) -> dict[str, Any]:
    """A change of what is served."""
    operation = _post(name, request, answer, description)
    operation["responses"]["409"] = _json("The instances load no adapters on order.", "Error")
    return operation


def _get(
    name: str,
    answer: str,
    description: str,
    *,
    parameters: list[dict[str, Any]] | None = None,
    closed: tuple[str, ...] = ("401", "403", "404", "429", "500", "503", "504"),
) -> dict[str, Any]:
    return {
        "operationId": name,
        "parameters": parameters or [],
        "responses": {"200": _json(description, answer), **_errors(closed)},
    }


def _metrics() -> dict[str, Any]:
    text = {"text/plain": {"schema": {"type": "string"}}}
    good = {"description": "The process's metrics in Prometheus' text format.", "content": text}
    return {
        "operationId": "metrics",
        "parameters": [],
        "responses": {"200": good, **_errors(_OF_PROBES)},
    }


def _ready() -> dict[str, Any]:
    operation = _get("ready", "Readiness", "Every stage of a model has an instance.", closed=_OF_PROBES)
    operation["responses"]["503"] = _json("A stage has no instance.", "Readiness")
    return operation
