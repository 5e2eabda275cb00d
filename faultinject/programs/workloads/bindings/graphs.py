"""A cuda-bindings program: kernels, copies and captured graphs in three streams that wait for events.

Words are counted up in place and passed from one buffer to the next, so lost, repeated or early work changes
every result after it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cuda.bindings import driver

from faultinject.programs.devices.nvidia import checked
from faultinject.programs.workloads.bindings.counting import Counting, image_and_words

ROUNDS = 8
UNIT, PER_STEP, UNTIMED = "rounds", ROUNDS, ""


class Pipeline(Counting):
    """first -> middle -> last -> first; other work is ordered by the first stream alone."""

    def __init__(self, seed: int, image: bytes, words: int) -> None:
        super().__init__(seed, image, words, events=3)
        self.streams = [self._stream() for _ in range(3)]
        self.graphs = [self._captured(1, self._count_on), self._captured(2, self._hand_on)]

    def _captured(self, number: int, work: Callable[[Any], None]) -> Any:
        stream = self.streams[number]
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        checked(driver.cuStreamBeginCapture(stream, mode))
        work(stream)
        graph = checked(driver.cuStreamEndCapture(stream))
        executable = checked(driver.cuGraphInstantiate(graph, 0))
        checked(driver.cuGraphDestroy(graph))
        return executable

    def _count_on(self, stream: Any) -> None:
        self._launch(self.increment, self.middle, self.words // 2, 1, stream)
        checked(driver.cuMemcpyDtoDAsync(self.last, self.middle, self.bytes, stream))
        for _ in range(3):
            self._launch(self.increment, self.last, self.words // 4, 1, stream)

    def _hand_on(self, stream: Any) -> None:
        checked(driver.cuMemcpyDtoDAsync(self.first, self.last, self.bytes, stream))
        self._launch(self.increment, self.first, self.words, 1, stream)

    def step(self) -> None:
        one, two, three = self.streams
        for _ in range(ROUNDS):
            self._launch(self.increment, self.first, self.words, 1, one)
            self._then(0, one, two)
            checked(driver.cuMemcpyDtoDAsync(self.middle, self.first, self.bytes, two))
            checked(driver.cuGraphLaunch(self.graphs[0], two))
            self._launch(self.fill, self.beside, self.words, self.random.getrandbits(32), one)
            self._then(1, two, three)
            checked(driver.cuGraphLaunch(self.graphs[1], three))
            self._then(2, three, one)
        checked(driver.cuStreamSynchronize(one))

    def close(self) -> None:
        for graph in self.graphs:
            checked(driver.cuGraphExecDestroy(graph))
        super().close()


def start(seed: int, backend: str) -> Pipeline:
    return Pipeline(seed, *image_and_words(backend))
