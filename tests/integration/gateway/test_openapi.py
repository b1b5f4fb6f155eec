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
from tests.unit.services.gateway.endpoints import RESPONSES, Endpoint, each_endpoint
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
    max_examples=24,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],
)
def test_every_response_matches_the_document(case: "schemathesis.Case[Any]") -> None:
    case.call_and_validate(checks=CHECKS)


@each_endpoint
def test_an_answer_matches_the_document_whole_and_as_a_stream(endpoint: Endpoint) -> None:
    for stream in (False, True):
        body = {**endpoint.ask, "stream": stream}
        case = schema[endpoint.path]["POST"].Case(body=body, media_type="application/json")
        answer = case.call_and_validate(checks=CHECKS)
        assert answer.status_code == 200
        assert (endpoint.streamed(answer.text) if stream else endpoint.text(answer.json())) == "word"


def test_a_stored_response_matches_the_document() -> None:
    posted = schema["/v1/responses"]["POST"].Case(body=RESPONSES.ask, media_type="application/json")
    stored = {"response_id": posted.call_and_validate(checks=CHECKS).json()["id"]}
    for path, method in (("", "GET"), ("/input_items", "GET"), ("", "DELETE")):
        case = schema[f"/v1/responses/{{response_id}}{path}"][method].Case(path_parameters=stored)
        assert case.call_and_validate(checks=CHECKS).status_code == 200
