"""The OpenAPI document of the gateway: requests from the classes that read them, answers as they are written."""

from typing import Any

from pydantic.json_schema import models_json_schema

from triptych import __version__

from .openai_models import ChatCompletionRequest, CompletionRequest, TokenizeRequest

_NULLABLE_TEXT = {"type": ["string", "null"]}
_NULLABLE_TEXTS = {"type": ["array", "null"], "items": {"type": "string"}}
_COUNT = {"type": "integer", "minimum": 0}
_ID = {"type": "string"}


def _object(properties: dict[str, Any], *, optional: tuple[str, ...] = ()) -> dict[str, Any]:
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required}


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


def _ref(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}


_ALTERNATIVE = {"token": {"type": "string"}, "logprob": {"type": "number"}, "bytes": _list(_COUNT)}
_ANSWERS: dict[str, Any] = {
    "Error": _object(
        {
            "error": _object(
                {
                    "message": {"type": "string"},
                    "type": {
                        "enum": [
                            "invalid_request_error",
                            "authentication_error",
                            "permission_error",
                            "rate_limit_error",
                            "server_error",
                        ]
                    },
                    "param": _NULLABLE_TEXT,
                    "code": {"type": "string"},
                }
            )
        }
    ),
    "Usage": _object(
        {
            "prompt_tokens": _COUNT,
            "completion_tokens": _COUNT,
            "total_tokens": _COUNT,
            "prompt_tokens_details": _object({"image_tokens": _COUNT}),
        }
    ),
    "ChatLogprobs": _object(
        {
            "content": _list(_object({**_ALTERNATIVE, "top_logprobs": _list(_object(_ALTERNATIVE))})),
            "refusal": {"type": "null"},
        }
    ),
    "ChatCompletion": _object(
        {
            "id": _ID,
            "object": {"const": "chat.completion"},
            "created": _COUNT,
            "model": _ID,
            "choices": _list(
                _object(
                    {
                        "index": _COUNT,
                        "message": _object(
                            {
                                "role": {"const": "assistant"},
                                "content": _NULLABLE_TEXT,
                                "refusal": {"type": "null"},
                                "tool_calls": _list(_ref("ApiToolCall")),
                            },
                            optional=("tool_calls",),
                        ),
                        "logprobs": {"anyOf": [_ref("ChatLogprobs"), {"type": "null"}]},
                        "finish_reason": {"enum": ["stop", "length", "tool_calls"]},
                    }
                )
            ),
            "usage": _ref("Usage"),
        }
    ),
    "Completion": _object(
        {
            "id": _ID,
            "object": {"const": "text_completion"},
            "created": _COUNT,
            "model": _ID,
            "choices": _list(
                _object(
                    {
                        "index": _COUNT,
                        "text": {"type": "string"},
                        "logprobs": {
                            "anyOf": [
                                _object(
                                    {
                                        "tokens": _list({"type": "string"}),
                                        "token_logprobs": _list({"type": "number"}),
                                        "top_logprobs": _list(
                                            {"type": "object", "additionalProperties": {"type": "number"}}
                                        ),
                                        "text_offset": _list(_COUNT),
                                    }
                                ),
                                {"type": "null"},
                            ]
                        },
                        "finish_reason": {"enum": ["stop", "length"]},
                    }
                )
            ),
            "usage": _ref("Usage"),
        }
    ),
    "Tokens": _object(
        {"count": _COUNT, "max_model_len": _COUNT, "tokens": _list(_COUNT), "token_strs": _NULLABLE_TEXTS}
    ),
    "Model": _object(
        {"id": _ID, "object": {"const": "model"}, "created": _COUNT, "owned_by": _ID, "max_model_len": _COUNT}
    ),
    "Models": _object({"object": {"const": "list"}, "data": _list(_ref("Model"))}),
    "Health": _object({"status": {"const": "ok"}}),
    "Readiness": _object(
        {
            "ready": {"type": "boolean"},
            "missing": _list({"type": "string"}),
            "instances": _list({"type": "string"}),
        }
    ),
    "Timeline": {
        "type": "object",
        "properties": {"request_id": _ID, "model": _ID, "outcome": {"type": "string"}, "items": _list({})},
        "required": ["request_id", "model", "outcome", "items"],
    },
}
_HEADERS = [
    {"name": "x-request-id", "in": "header", "schema": {"type": "string"}, "description": "Names the request."},
    {
        "name": "x-request-timeout",
        "in": "header",
        "schema": {"type": "string"},
        "description": "Seconds that the request may take.",
    },
]
_CLOSED = {
    "400": "The request can never succeed as it stands; param names the field.",
    "401": "A valid API key is needed.",
    "403": "The header Host names something else.",
    "404": "There is no such model or request.",
    "408": "The body did not arrive in time.",
    "413": "The body is too large.",
    "415": "The body is compressed.",
    "417": "The header Expect asks for something that is not known.",
    "431": "Headers or trailers are too large.",
    "429": "A limit is reached; Retry-After says when to come again.",
    "499": "The client closed the connection.",
    "500": "A defect; the server's log has the details.",
    "503": "An instance is down, draining or not there yet.",
    "504": "The time of the request is over.",
}


def document() -> dict[str, Any]:
    """OpenAPI 3.1, as a JSON document."""
    models = (ChatCompletionRequest, CompletionRequest, TokenizeRequest)
    _, definitions = models_json_schema(
        [(model, "validation") for model in models], ref_template="#/components/schemas/{model}"
    )
    stream = "An answer, or with stream: true server-sent events of its chunks that end with data: [DONE]."
    model_id = [{"name": "model_id", "in": "path", "required": True, "schema": {"type": "string"}}]
    request_id = [{"name": "request_id", "in": "path", "required": True, "schema": {"type": "string"}}]
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Triptych",
            "version": __version__,
            "description": "OpenAI-compatible serving of multimodal language models.",
        },
        "paths": {
            "/v1/chat/completions": {
                "post": _post("chat", "ChatCompletionRequest", "ChatCompletion", stream, streams=True)
            },
            "/v1/completions": {"post": _post("complete", "CompletionRequest", "Completion", stream, streams=True)},
            "/tokenize": {"post": _post("tokenize", "TokenizeRequest", "Tokens", "The ids that the model would see.")},
            "/v1/models": {"get": _get("listModels", "Models", "The models that are served.")},
            "/v1/models/{model_id}": {"get": _get("getModel", "Model", "One model.", parameters=model_id)},
            "/v1/requests/{request_id}/timeline": {
                "get": _get("getTimeline", "Timeline", "Where a request's time went.", parameters=request_id)
            },
            "/health": {
                "get": _get("health", "Health", "The process is alive.", closed=("403", "500")) | {"security": []}
            },
            "/ready": {"get": _ready()},
            "/metrics": {"get": _metrics()},
        },
        "components": {
            "schemas": {**definitions["$defs"], **_ANSWERS},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


def _json(description: str, schema: str) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": _ref(schema)}}}


def _errors(statuses: tuple[str, ...]) -> dict[str, Any]:
    return {status: _json(_CLOSED[status], "Error") for status in statuses}


_EVENT: dict[str, Any] = {
    "type": "object",
    "description": "One server-sent event of many. `data` is a chunk as JSON text, an error, or, at the end, [DONE].",
    "required": ["data"],
    "properties": {"data": {"type": "string"}},
}


def _post(name: str, request: str, answer: str, description: str, *, streams: bool = False) -> dict[str, Any]:
    good = _json(description, answer)
    if streams:
        good["content"]["text/event-stream"] = {"schema": _EVENT}
    return {
        "operationId": name,
        "parameters": _HEADERS,
        "requestBody": {"required": True, "content": {"application/json": {"schema": _ref(request)}}},
        "responses": {"200": good, **_errors(tuple(_CLOSED))},
    }


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
    good = {"description": "What this process measures, in Prometheus' text format.", "content": text}
    return {
        "operationId": "metrics",
        "parameters": [],
        "responses": {"200": good, **_errors(("401", "403", "429", "500"))},
    }


def _ready() -> dict[str, Any]:
    operation = _get(
        "ready", "Readiness", "Every stage of a model has an instance.", closed=("401", "403", "429", "500")
    )
    operation["responses"]["503"] = _json("A stage has no instance.", "Readiness")
    return operation
