"""Options of gRPC channels."""

import asyncio

import grpc.aio

from triptych.rpc.limits import channel_options

_EMPTY_SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


async def test_a_server_that_is_slow_to_accept_is_not_given_up_and_tried_again() -> None:
    """A busy machine takes longer than a moment for the first bytes of a connection."""
    attempts, ended = 0, asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal attempts
        attempts += 1
        await asyncio.sleep(0.3)
        writer.write(_EMPTY_SETTINGS)
        await reader.read(-1)
        writer.close()
        await writer.wait_closed()
        ended.set()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=channel_options()) as channel:
            async with asyncio.timeout(60):
                await channel.channel_ready()
        async with asyncio.timeout(60):
            await ended.wait()
    assert attempts == 1
