"""Two engines of a process divide torch's threads while both compute."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch
from torch import nn

from triptych.engine.shared_threads import SharedThreads, SharingOffload
from triptych.runtime.offload import ThreadOffload

pytestmark = pytest.mark.timeout(30)


class Told:
    """What each thread has set, and a clock that is set by hand."""

    def __init__(self, threads: int) -> None:
        self.now_s = 0.0
        self.by_thread: dict[int, list[int]] = {}
        self.shared = SharedThreads(threads, clock=lambda: self.now_s, set_threads=self._set)

    def _set(self, threads: int) -> None:
        self.by_thread.setdefault(threading.get_ident(), []).append(threads)

    @property
    def mine(self) -> list[int]:
        return self.by_thread.get(threading.get_ident(), [])


class Another:
    """A second engine, in a thread that computes between ``begin`` and ``end``."""

    def __init__(self, shared: SharedThreads, keeps_s: float = 0.0) -> None:
        self._shared = shared
        self._keeps_s = keeps_s
        self._begun, self._end = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        with self._shared.computing(self._keeps_s):
            self._begun.set()
            self._end.wait(60)

    def begin(self) -> int:
        self._thread.start()
        assert self._begun.wait(60)
        assert self._thread.ident is not None
        return self._thread.ident

    def end(self) -> None:
        self._end.set()
        self._thread.join()


@pytest.mark.parametrize(("threads", "half"), [(2, 1), (3, 1), (4, 2), (16, 8)])
def test_who_computes_alone_has_all_threads_and_two_have_half_each(threads: int, half: int) -> None:
    told, another = Told(threads), Another
    with told.shared.computing():
        assert told.mine == [threads]
        other = another(told.shared)
        thread = other.begin()
        assert told.by_thread[thread] == [half]
        assert told.mine == [threads], "each thread sets its own number only"
        told.shared.adjust()
        assert told.mine == [threads, half]
        other.end()


def test_an_engine_keeps_its_share_for_as_long_as_it_says() -> None:
    told = Told(2)
    other = Another(told.shared, keeps_s=0.05)
    other.begin()
    other.end()
    told.now_s = 0.049
    with told.shared.computing():
        assert told.mine == [1], "it is about to go on"
        told.now_s = 0.051
        told.shared.adjust()
        assert told.mine == [1, 2]


def test_an_engine_that_keeps_nothing_gives_its_share_away_at_once() -> None:
    told = Told(2)
    other = Another(told.shared)
    other.begin()
    other.end()
    with told.shared.computing():
        assert told.mine == [2]


def test_the_number_is_set_only_when_it_changes() -> None:
    told = Told(2)
    for _ in range(3):
        with told.shared.computing():
            told.shared.adjust()
    assert told.mine == [2]


def test_an_engine_that_fails_gives_its_share_back() -> None:
    told = Told(2)
    thread = ThreadOffload(1, name="engine")
    offload = SharingOffload(thread, told.shared)

    async def fail() -> None:
        with pytest.raises(ZeroDivisionError):
            await offload.run(lambda: 1 // 0)
        assert await offload.run(lambda number: number + 1, 1) == 2

    asyncio.run(fail())
    thread.close()
    told.now_s = 1.0
    with told.shared.computing():
        assert told.mine == [2]


class Layered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(1, 1) for _ in range(3)])
        self.head = nn.Linear(1, 1)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            values = layer(values)
        made: torch.Tensor = self.head(values)
        return made


def test_a_pass_adjusts_before_each_layer() -> None:
    told = Told(2)
    model = Layered()
    told.shared.adjust_between_layers(model)
    other = Another(told.shared)

    def begin_other(*_: object) -> None:
        other.begin()

    model.layers[0].register_forward_hook(begin_other)
    with ExitStack() as stack:
        stack.callback(other.end)
        with told.shared.computing():
            model(torch.zeros(1))
    assert told.mine == [2, 1]


@pytest.fixture
def torch_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("torch_threads")
def test_torch_computes_with_the_share_of_the_calling_thread() -> None:
    shared = SharedThreads(2, clock=lambda: 0.0)
    other = Another(shared)
    with shared.computing():
        assert torch.get_num_threads() == 2
        other.begin()
        assert torch.get_num_threads() == 2, "torch keeps the number for each thread"
        shared.adjust()
        assert torch.get_num_threads() == 1
    other.end()
