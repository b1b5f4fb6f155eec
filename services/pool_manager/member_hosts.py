"""Members that a caller may act for that is a member itself."""

from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing

from triptych.domain.pool import MemberReport, Registration
from triptych.rpc.authorization import OPERATORS, Authorization, Context, host_of
from triptych.runtime.tls import TlsIdentity


class MemberHosts:
    """The hosts that members attend from, by the last registration of each stream.

    Certificates tell kinds of processes: those of all instances have one name. So a caller that is an instance or a router
    acts for members that attend from the address it calls from. In a pod or a container that is itself alone.
    """

    def __init__(self, tls: TlsIdentity | None) -> None:
        self._authorization = Authorization(tls)
        self._streams = Counter[tuple[str, str]]()
        """Streams by instance id and host."""

    async def noted(self, reports: AsyncGenerator[MemberReport], context: Context) -> AsyncGenerator[MemberReport]:
        """The reports of one stream. Its member is known here until it ends."""
        host, name = host_of(context), ""
        try:
            async with aclosing(reports):
                async for report in reports:
                    if isinstance(report, Registration):
                        self._forget(name, host)
                        name = report.instance_id
                        self._streams[name, host] += 1
                    yield report
        finally:
            self._forget(name, host)

    def check(self, instance_id: str, what: str, context: Context) -> None:
        """Raises PermissionDenied unless the caller is an operator, or on the member's host. ``what`` is the rpc path."""
        if (instance_id, host_of(context)) not in self._streams:
            self._authorization.require(OPERATORS, f"{what} of another member", context)

    def _forget(self, name: str, host: str) -> None:
        if self._streams[name, host] <= 1:
            del self._streams[name, host]
        else:
            self._streams[name, host] -= 1
