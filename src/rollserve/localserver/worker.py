"""The engine's own thread, so that torch never holds up the event loop.

Others talk to the engine by sending it functions, which run between two steps; what the steps made is
published in one batch a step.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import structlog

from rollserve.errors import Unavailable
from rollserve.localserver.engine import Engine
from rollserve.localserver.sequence import Progress

T = TypeVar("T")
_log = structlog.get_logger(__name__)


class EngineThread:
    """Owns the engine from ``start`` to ``stop``. ``publish`` is called on the engine's thread."""

    def __init__(self, engine: Engine, publish: Callable[[list[Progress]], None]) -> None:
        self.engine = engine
        self._publish = publish
        self._inbox: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="localserver-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """End what is in flight as aborted, then the thread."""
        if self.alive:
            self.post(self._quit)
            self._thread.join(timeout_s)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._stopping

    def post(self, action: Callable[[], object]) -> None:
        """Run ``action`` between two steps; it must not raise."""
        self._inbox.put(action)

    def call(self, action: Callable[[], T]) -> Future[T]:
        """Run ``action`` between two steps and get what it returns or raises."""
        done: Future[T] = Future()
        done.set_running_or_notify_cancel()

        def guarded() -> None:
            try:
                done.set_result(action())
            except Exception as error:  # the caller's edge: it gets what was raised
                done.set_exception(error)

        if not self.alive:
            raise Unavailable("the inference server is shutting down", retry_after_s=1.0)
        self._inbox.put(guarded)
        return done

    def _quit(self) -> None:
        self._stopping = True
        self.engine.abort(lambda sequence: True)

    def _run(self) -> None:
        while not self._stopping:
            self._run_posted(block=not self.engine.has_work)
            self._step()

    def _run_posted(self, *, block: bool) -> None:
        if block:
            self._inbox.get()()
        while True:
            try:
                action = self._inbox.get_nowait()
            except queue.Empty:
                return
            action()

    def _step(self) -> None:
        try:
            reported = self.engine.step()
        except Exception as error:  # one bad step (out of memory, say) must not end the server
            _log.exception("engine step failed")
            self.engine.abort(lambda sequence: True, failure=f"the engine failed: {error}")
            reported = self.engine.take_reported()
        if reported:
            self._publish(reported)
