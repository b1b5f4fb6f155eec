"""The answers to several prompts of one request as one."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import fields, replace

from triptych.domain.generation import ChatEvent, ChatFinished, FieldsIgnored, Usage
from triptych.errors import InstanceLost
from triptych.runtime.tasks import TaskScope

_MAX_WAITING = 64
"""Batches of events that wait for the reader."""


async def joined(
    answers: Sequence[AsyncGenerator[Sequence[ChatEvent]]], choices: int
) -> AsyncGenerator[Sequence[ChatEvent]]:
    """Events of answers with ``choices`` each, as they come. The choices of one follow those of the answer before.

    Raises the first error, and ends the other answers then.
    """
    waiting: asyncio.Queue[Sequence[ChatEvent] | Exception] = asyncio.Queue(_MAX_WAITING)
    usages: list[Usage] = []

    async def read(number: int, answer: AsyncGenerator[Sequence[ChatEvent]]) -> None:
        try:
            async for events in answer:
                await waiting.put([_moved(event, number * choices) for event in events])
                if events and isinstance(events[-1], ChatFinished):
                    return
            await waiting.put(InstanceLost("the answer's stream ended early"))
        except Exception as error:  # noqa: BLE001 - the reader raises it
            await waiting.put(error)

    async with AsyncExitStack() as stack:
        for answer in answers:
            await stack.enter_async_context(aclosing(answer))
        scope = await stack.enter_async_context(TaskScope("prompts"))
        for number, answer in enumerate(answers):
            scope.spawn(read(number, answer), name=str(number))
        while len(usages) < len(answers):
            got = await waiting.get()
            if isinstance(got, Exception):
                raise got
            usages.extend(event.usage for event in got if isinstance(event, ChatFinished))
            if events := [event for event in got if not isinstance(event, ChatFinished)]:
                yield events
    # After all of it is closed, as the reader's client may leave with the last event.
    yield [ChatFinished(_sum(usages))]


def _moved(event: ChatEvent, by: int) -> ChatEvent:
    return event if isinstance(event, FieldsIgnored | ChatFinished) else replace(event, choice=event.choice + by)


def _sum(usages: Sequence[Usage]) -> Usage:
    return Usage(**{field.name: sum(getattr(usage, field.name) for usage in usages) for field in fields(Usage)})
