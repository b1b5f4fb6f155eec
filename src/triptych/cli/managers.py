"""Pool managers, as commands reach them: those that are named, or that of a local cluster."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import httpx

from triptych.cli import running
from triptych.cli.outcome import CliError
from triptych.cli.process_plan import MANAGER
from triptych.domain.pool import ManagerStatus
from triptych.errors import DeadlineExceeded, InstanceLost, InvalidRequest, NotFound, TriptychError, Unavailable
from triptych.policy.addresses import why_not_called
from triptych.rpc.stubs import PoolManagerStub
from triptych.runtime.tls import TlsIdentity
from triptych.wire.status import LOST

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Managers:
    """The pool managers that ``named`` lists as ``HOST:PORT,...``; without it that of the local cluster at ``url``."""

    url: str
    named: str | None = None
    tls: TlsIdentity | None = None

    def addresses(self, local: Mapping[str, running.Process]) -> tuple[str, ...]:
        """Empty if none is named and the processes of no local cluster are known. Raises CliError for an invalid one."""
        if self.named is None:
            return (local[MANAGER].address,) if MANAGER in local else ()
        addresses = tuple(address.strip() for address in self.named.split(","))
        for address in addresses:
            if (reason := why_not_called(address, beyond_loopback=True)) is not None:
                raise CliError(f"--pool-manager {address!r}: {reason}", caller=True)
        return addresses

    async def local(self) -> Mapping[str, running.Process]:
        """The processes of the local cluster, by name; empty if there is none, or managers are named."""
        if self.named is not None:
            return {}
        async with httpx.AsyncClient(trust_env=False) as http:
            return await running.find(self.url, http)

    async def call(self, work: Callable[[PoolManagerStub], Awaitable[T]]) -> T:
        """The answer of the first manager that gives one. Raises NotFound and InvalidRequest, and CliError without any."""
        local = await self.local()
        addresses = self.addresses(local)
        if not addresses and local:
            raise CliError("the cluster's pool manager does not answer; triptych up starts it again", caller=False)
        if not addresses:
            text = f"no triptych up of this user runs at {self.url}; name a pool manager with --pool-manager HOST:PORT"
            raise CliError(text, caller=True)
        faults = []
        for address in addresses:
            stub = PoolManagerStub(address, self.tls)
            try:
                return await work(stub)
            except (InvalidRequest, NotFound):
                raise
            except InstanceLost as error:
                why = "" if error.message == LOST else f": {error.message}"
                faults.append(f"no pool manager can be reached at {address}{why}")
            except DeadlineExceeded:
                faults.append(f"the pool manager at {address} does not answer in time")
            except Unavailable as error:
                faults.append(f"the pool manager at {address} cannot do it: {error.message}")
            except TriptychError as error:
                faults.append(f"the pool manager at {address} refuses: {error.message}")
            finally:
                await stub.close()
        raise CliError("; ".join(faults), caller=False)

    async def status(self, local: Mapping[str, running.Process]) -> tuple[str, ManagerStatus | None] | None:
        """The address and the status of the manager that leads, else of the first that answers. The status is None if none
        answers; the address is empty then if it is that of a local cluster. All is None if no manager is known.
        """
        addresses = self.addresses(local)
        answers = await asyncio.gather(*map(self._status, addresses))
        statuses = [(address, status) for address, status in zip(addresses, answers, strict=True) if status is not None]
        statuses.sort(key=lambda answer: not answer[1].leads)
        if statuses:
            return statuses[0]
        return (", ".join(addresses), None) if addresses or local else None

    async def _status(self, address: str) -> ManagerStatus | None:
        stub = PoolManagerStub(address, self.tls)
        try:
            return await stub.status()
        except TriptychError:
            return None
        finally:
            await stub.close()
