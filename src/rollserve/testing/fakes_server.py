"""Stand-ins for what surrounds the server's side of the core: workers, payload files, backends.

``FakeExecutor`` has workers without processes. Give it a ``play`` (what a worker does with an attempt,
``completes`` and the like) or end attempts by hand.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, Literal

from rollserve.backend.base import Backend
from rollserve.errors import BackendUnavailable, FailureKind, InvalidInput, UnknownName
from rollserve.executor.base import (
    AckAttempt,
    AttemptEnded,
    CancelAttempt,
    FromWorker,
    PolicyView,
    RegradingEnded,
    StageChanged,
    StartAttempt,
    StartRegrading,
    ToWorker,
    WorkerHello,
    WorkerLost,
    WorkerStats,
)
from rollserve.records.call import Call, Message, SamplingParams, VersionSpan, pack_floats, pack_ids
from rollserve.records.policy import BackendInfo, BackendSpec, PolicySpec, TemplateFinding, TemplateReport
from rollserve.records.regrade import Graded
from rollserve.records.rollout import Attempt, Failure, RolloutState
from rollserve.records.task import Task
from rollserve.records.update import UpdateMode
from rollserve.store.payload import AttemptPayload
from rollserve.testing.fake_payloads import FakePayloads
from rollserve.testing.scripted import ScriptedBackend, ScriptedEngine

Play = Callable[["FakeExecutor", str, StartAttempt], None]


class FakeExecutor:
    """``rollserve.executor.base.Executor``. ``started`` has every attempt that was sent to a worker
    and has not ended."""

    def __init__(self, *, workers: int = 1, capacity: int = 8, play: Play | None = None) -> None:
        self.play = play
        self.started: dict[str, tuple[str, StartAttempt]] = {}
        self.history: list[StartAttempt] = []
        self.cancels: list[CancelAttempt] = []
        self.acks: list[AckAttempt] = []
        self.views: list[PolicyView] = []
        self.regradings: list[tuple[str, StartRegrading]] = []
        self.grade: Callable[[FakeExecutor, str, StartRegrading], None] | None = None
        self.stopped = False
        self._workers = workers
        self._capacity = capacity
        self._alive: set[str] = set()
        self._made = 0
        self._said: asyncio.Queue[tuple[str, FromWorker | WorkerLost]] = asyncio.Queue()

    # -- the contract
    async def start(self) -> None:
        for _ in range(self._workers):
            self.join()

    def send(self, worker_id: str, message: ToWorker) -> bool:
        if worker_id not in self._alive:
            return False
        match message:
            case StartAttempt():
                self.history.append(message)
                self.started[message.attempt_id] = (worker_id, message)
                if self.play is not None:
                    self.play(self, worker_id, message)
            case CancelAttempt():
                self.cancels.append(message)
            case AckAttempt():
                self.acks.append(message)
            case StartRegrading():
                self.regradings.append((worker_id, message))
                if self.grade is not None:
                    self.grade(self, worker_id, message)
            case _:
                raise TypeError(f"not sent to one worker: {message!r}")
        return True

    def broadcast(self, message: ToWorker) -> None:
        if not isinstance(message, PolicyView):
            raise TypeError(f"not for all: {message!r}")
        self.views.append(message)

    async def reports(self) -> AsyncIterator[tuple[str, FromWorker | WorkerLost]]:
        while True:
            yield await self._said.get()

    async def stop(self, grace_s: float) -> None:
        self.stopped = True
        self._alive.clear()

    # -- what a test does with it
    def join(self, capacity: int | None = None) -> str:
        """Another worker says hello."""
        self._made += 1
        worker_id = f"w{self._made}"
        self._alive.add(worker_id)
        capacity = capacity or self._capacity
        self.say(
            worker_id,
            WorkerHello(
                worker_id=worker_id,
                pid=self._made,
                capacity=capacity,
                slots={"init": capacity, "run": capacity, "grade": capacity},
                runtimes=["process"],
                gateway_url="http://127.0.0.1:1",
            ),
        )
        return worker_id

    def say(self, worker_id: str, message: FromWorker | WorkerLost) -> None:
        self._said.put_nowait((worker_id, message))

    def end(self, attempt_id: str, attempt: Attempt) -> None:
        """Report the end of an attempt; may be called again with the same."""
        worker_id, _ = self.started[attempt_id]
        self.say(worker_id, AttemptEnded(attempt_json=attempt.model_dump_json().encode()))

    def graded(self, worker_id: str, start: StartRegrading, graded: Graded) -> None:
        """Report the end of a grading."""
        self.say(
            worker_id,
            RegradingEnded(
                regrade_id=start.regrade_id,
                rollout_id=start.rollout_id,
                tries=start.tries,
                graded_json=graded.model_dump_json().encode(),
            ),
        )

    def kill(self, worker_id: str, *, replace: bool = True) -> str | None:
        """A worker dies with its attempts; another takes its place."""
        self._alive.discard(worker_id)
        self.started = {key: value for key, value in self.started.items() if value[0] != worker_id}
        self.say(worker_id, WorkerLost(detail="killed"))
        return self.join() if replace else None

    def stage(self, attempt_id: str, stage: str) -> None:
        worker_id, _ = self.started[attempt_id]
        self.say(worker_id, StageChanged(attempt_id=attempt_id, stage=stage, at=0.0))

    def stats(self, worker_id: str, counters: dict[str, float]) -> None:
        self.say(
            worker_id,
            WorkerStats(
                at=0.0, stages={"run": 1}, counters=counters, loop_lag_ms_p99=1.0, rss_mb=100.0, cpu_s=1.0
            ),
        )


# -- plays


def ended(
    start: StartAttempt,
    *,
    reward: float | None = 1.0,
    failure: Failure | None = None,
    outcome: RolloutState | None = None,
    payload: str | None = None,
) -> Attempt:
    """A finished attempt, completed unless there is a failure."""
    default = RolloutState.COMPLETED if failure is None else RolloutState.FAILED
    return Attempt(
        id=start.attempt_id,
        rollout_id=start.rollout_id,
        epoch=start.epoch,
        started_at=1.0,
        finished_at=2.0,
        outcome=outcome or default,
        failure=failure,
        reward=reward if failure is None else None,
        payload=payload,
        counts={"turns": 1},
    )


def failed(kind: FailureKind, code: str = "broken") -> Failure:
    return Failure(kind=kind, code=code, message=f"{kind.value} trouble", operation="test")


def completes(payloads: FakePayloads | None = None, reward: float = 1.0) -> Play:
    """Every attempt completes at once; with ``payloads`` it has a call of three sampled tokens."""

    def play(executor: FakeExecutor, _: str, start: StartAttempt) -> None:
        ref = None
        if payloads is not None:
            ref = payloads.keep(f"{start.run_id}/{start.attempt_id}", AttemptPayload(calls=[a_call()]))
        executor.end(start.attempt_id, ended(start, reward=reward, payload=ref))

    return play


def fails(failure: Failure) -> Play:
    def play(executor: FakeExecutor, _: str, start: StartAttempt) -> None:
        executor.end(start.attempt_id, ended(start, failure=failure))

    return play


def a_call(call_id: str = "c1", parent: str | None = None, prompt: int = 4, sampled: int = 3) -> Call:
    """A call whose prompt ids count from 0 and whose sampled ids from 100."""
    return Call(
        id=call_id,
        parent=parent,
        messages=(Message(role="user", content=f"question of {call_id}"),),
        prompt_ids=pack_ids(list(range(prompt))),
        sampled_ids=pack_ids(list(range(100, 100 + sampled))),
        logprobs=pack_floats([-0.5] * sampled),
        versions=(VersionSpan(0, sampled, 0, 0),),
        reply=Message(role="assistant", content=f"answer of {call_id}"),
        finish_reason="stop",
        sampling=SamplingParams(),
        started_at=1.0,
        finished_at=2.0,
    )


# -- what composition would hand in


async def check_task(task: Task, field: str) -> None:
    """Knows the agent ``tool`` and the grader ``exact``."""
    if task.agent.name != "tool":
        raise UnknownName("agent", task.agent.name, ["tool"], field=f"{field}.agent.name")
    if task.grader.name != "exact":
        raise UnknownName("grader", task.grader.name, ["exact", "math"], field=f"{field}.grader.name")
    if task.image == "nowhere":
        raise InvalidInput("no such image", field=f"{field}.image")


async def check_function(path: str, field: str) -> None:
    """Knows the module ``filters``."""
    if not path.startswith("filters:"):
        raise InvalidInput(f"{path!r} can't be loaded", field=field)


async def keeps(path: str, arguments: dict[str, Any]) -> bool:
    """``filters:raises`` raises; any other keeps groups whose best reward is 1."""
    if path == "filters:raises":
        raise ZeroDivisionError("division by zero")
    rewards: list[float] = arguments["rewards"]
    return max(rewards) == 1.0


async def next_tasks(path: str, arguments: dict[str, Any]) -> list[int | dict[str, Any]] | None:
    """``filters:raises`` raises, ``filters:hangs`` never answers, ``filters:lost`` gives a line that is not
    there. ``filters:until_solved`` gives its task again, one at a time, until a group of it has earned 1
    throughout. Any other gives the lines in their order, each once."""
    given, results = int(arguments["given"]), arguments["results"]
    match path.partition(":")[2]:
        case "raises":
            raise ZeroDivisionError("division by zero")
        case "hangs":
            await asyncio.Event().wait()
        case "lost":
            return [99]
        case "until_solved":
            if any(min(result["rewards"]) == 1.0 for result in results):
                return None
            return [] if len(results) < given else [dict(arguments["options"]["task"])]
    left = list[int | dict[str, Any]](range(given, arguments["lines"]))
    return left[: arguments["wanted"]] or None


async def probe_backend(spec: BackendSpec, model: str) -> BackendInfo:
    """Every URL serves the model, save ``…/other`` (another model) and ``…/nothing`` (no backend)."""
    if spec.url.endswith("/nothing"):
        raise InvalidInput("an nginx answers there", field="url")
    served = "another-model" if spec.url.endswith("/other") else model
    return BackendInfo(engine="fake", models=[served], context_tokens=4096)


def open_backend(spec: BackendSpec, model: str) -> Backend:
    """Of engines that have said nothing yet; one whose address says ``silent`` does not score."""
    engine = ScriptedEngine(model=model)
    engine.scores = "silent" not in spec.url
    return ScriptedBackend(engine)


class FakeControl:
    """``rollserve.backend.control.Control``; ``said`` is what was asked of which address, over all that one
    ``FakeControls`` made."""

    def __init__(self, url: str, made: FakeControls) -> None:
        self._url = url
        self._made = made
        self.waits = made.waits

    async def check(self, mode: UpdateMode) -> str:
        if self._url in self._made.fixed:
            raise InvalidInput(f"{self._url} can't be paused", field="backends")
        await self._say("check")
        return ""

    async def pause(self, mode: UpdateMode, within_s: float) -> None:
        await self._made.gate.wait()
        await self._say(f"pause {mode.value}")

    async def announce(self, label: str, adapter_path: str | None = None) -> None:
        await self._say(f"announce {label}" if adapter_path is None else f"load {adapter_path} as {label}")

    async def resume(self) -> None:
        await self._say("resume")

    async def close(self) -> None:
        self._made.open -= 1

    async def _say(self, what: str) -> None:
        await asyncio.sleep(0)
        if self._url in self._made.away:
            raise BackendUnavailable(f"{self._url} does not answer", operation="backend.control")
        self._made.said.append((self._url, what))


class FakeControls:
    """``Ports.open_control``. Servers ``away`` do not answer, ``fixed`` ones can't be updated; no pause takes
    hold while ``gate`` is cleared. ``open`` are those that are not closed."""

    waits = True

    def __init__(self) -> None:
        self.said: list[tuple[str, str]] = []
        self.away: set[str] = set()
        self.fixed: set[str] = set()
        self.open = 0
        self.gate = asyncio.Event()
        self.gate.set()

    def __call__(self, spec: BackendSpec, shared_with: str | None, adapter: str | None = None) -> FakeControl:
        self.open += 1
        return FakeControl(spec.url, self)


async def check_tokenizer(name: str) -> None:
    """There is one, the shipped one; ``gone`` passes, and is not there any more when it is probed."""
    if name not in ("tiny", "gone"):
        raise InvalidInput(f"no such file or directory: {name}", field="tokenizer")


async def probe_template(spec: PolicySpec) -> TemplateFinding:
    """Nothing is wrong with a template; of ``gone`` nothing can be said."""
    verdict: Literal["unknown", "exact"] = "unknown" if spec.tokenizer == "gone" else "exact"
    report = TemplateReport(verdict=verdict, detail="it is gone" if verdict == "unknown" else "")
    return TemplateFinding(keep=report, strip=report)
