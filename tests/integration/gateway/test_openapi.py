"""The gateway against its own description: schemathesis asks for everything that ``/openapi.json`` says is there."""

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

from services.gateway.app import remote_media
from services.gateway.keys import KeyRing
from services.gateway.openapi import document
from services.gateway.routes import create_app
from services.gateway.service import Gateway
from services.gateway.settings import GatewaySettings
from tests.integration.gateway.test_fuzz import SniffingRouter
from triptych.runtime.clock import monotonic
from triptych.testing.offload import InlineOffload

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


def application() -> Any:
    chosen = GatewaySettings(fetch=False)
    gateway = Gateway(
        SniffingRouter(),
        InlineOffload(),
        chosen,
        lambda: 1.0,
        keys=KeyRing({}, monotonic),
        media=remote_media(chosen),
    )
    return create_app(gateway, clock=monotonic)


schema = schemathesis.openapi.from_dict(document())
schema.app = application()


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
def test_every_answer_is_one_that_the_document_describes(case: schemathesis.Case) -> None:
    case.call_and_validate(checks=CHECKS)
