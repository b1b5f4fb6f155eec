"""The gateway against its OpenAPI description: schemathesis calls every operation in ``/openapi.json``."""

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.integration.gateway.door import make_gateway
from tests.integration.gateway.test_fuzz import SniffingRouter
from triptych.runtime.clock import monotonic
from triptych.services.gateway.openapi import document
from triptych.services.gateway.routes import create_app
from triptych.virtual.offload import InlineOffload

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


schema = schemathesis.openapi.from_dict(document())
gateway = make_gateway(SniffingRouter(), InlineOffload(), monotonic, fetch=False, allowed_hosts=("testserver",))
schema.app = create_app(gateway, clock=monotonic)


@pytest.mark.timeout(120)
@schema.parametrize()
@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],
)
def test_every_response_matches_the_document(case: "schemathesis.Case[Any]") -> None:
    case.call_and_validate(checks=CHECKS)


@pytest.mark.parametrize(
    ("path", "ask"),
    [
        ("/v1/completions", {"prompt": "Hello"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}),
    ],
)
def test_a_stream_matches_the_document(path: str, ask: dict[str, Any]) -> None:
    case = schema[path]["POST"].Case(body={**ask, "model": "any", "stream": True}, media_type="application/json")
    answer = case.call_and_validate(checks=CHECKS)
    assert answer.status_code == 200
    assert "data: [DONE]" in answer.text
