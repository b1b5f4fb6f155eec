"""Requests of web pages from other origins (CORS), which browsers ask for before they send them."""

from collections.abc import Callable, Collection

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp

from triptych.errors import PermissionDenied

from .edge import REQUEST_ID, error_response


class Cors(CORSMiddleware):
    """Answers preflight requests, and marks every response, errors included, for pages of the allowed ``origins``.

    It goes around authentication: a browser sends a preflight request without the key. Any header may be sent and read, as
    clients add their own.
    """

    def __init__(self, app: ASGIApp, origins: Collection[str], new_id: Callable[[], str]) -> None:
        super().__init__(
            app,
            allow_origins=origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            allow_private_network=True,
            expose_headers=("*",),
        )
        self._new_id = new_id

    def preflight_response(self, request_headers: Headers) -> Response:
        """204, or 403 with the body of all errors."""
        response = super().preflight_response(request_headers)
        headers = {name: value for name, value in response.headers.items() if not name.startswith("content-")}
        headers[REQUEST_ID] = self._new_id()
        if response.status_code == 200:
            return Response(status_code=204, headers=headers)
        origin, method = request_headers["origin"], request_headers["access-control-request-method"]
        asked = f"{method[:20]!r} from the origin {origin[:100]!r}"
        return error_response(PermissionDenied(f"{asked} is not allowed; --allowed-origins adds origins"), headers)
