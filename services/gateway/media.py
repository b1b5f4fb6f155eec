"""Fetches the media at a request's URLs."""

import asyncio
from collections.abc import Callable

from triptych.errors import InvalidMedia, InvalidRequest
from triptych.media.fetch import Fetcher

from .openai_api import ParsedRequest, Remote


class RemoteMedia:
    """Fetches a request's items by URL, at most ``max_urls``. Without a fetcher all URLs are refused."""

    def __init__(self, fetcher: Fetcher | None, max_urls: int) -> None:
        self._fetcher = fetcher
        self._max_urls = max_urls

    async def complete(self, request: ParsedRequest, took: Callable[[int], None]) -> ParsedRequest:
        """The request with all its media. ``took`` is called with the size of every chunk received, and may raise.

        Raises InvalidMedia or InvalidRequest, naming the part at fault.
        """
        if not request.remote:
            return request
        first = request.remote[0].param
        if self._fetcher is None:
            raise InvalidRequest(f"{first}: this server does not fetch URLs; send a data: URL", param=first)
        if len(request.remote) > self._max_urls:
            raise InvalidRequest(
                f"messages: {len(request.remote)} URLs to fetch, the limit is {self._max_urls}", param="messages"
            )
        fetcher = self._fetcher
        try:
            async with asyncio.TaskGroup() as group:
                fetches = [group.create_task(_fetch(fetcher, remote, took)) for remote in request.remote]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return request.with_media([fetch.result() for fetch in fetches])


async def _fetch(fetcher: Fetcher, remote: Remote, took: Callable[[int], None]) -> bytes:
    try:
        return await fetcher.fetch(remote.url, took)
    except InvalidMedia as error:
        raise InvalidMedia(f"{remote.param}: {error.message}", param=remote.param) from None
