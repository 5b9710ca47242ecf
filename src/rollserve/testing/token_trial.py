"""Nothing is wasted silently: a whole server under updates, cancels, nacks, killed workers and failing
backends, and then every sampled token looked for.

They are counted three times, apart from each other: what the records of all attempts hold (their files, read
here), what the server has in its bins, and what the trainer was given to train on.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sqlite3
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

from rollserve.cli.processes import Processes
from rollserve.client import Client, FinishedGroup, RunHandle
from rollserve.errors import NotFound, RollserveError
from rollserve.records.control import FilterRule, GroupRule, StalenessRule
from rollserve.records.policy import BackendKind, RendererSpec
from rollserve.records.run import RetrySettings
from rollserve.records.task import GraderSpec, Limits, Task
from rollserve.records.update import UpdateMode
from rollserve.store.packing import unpack
from rollserve.testing.scripted import Fault, FaultKind, Reply, Script, ScriptedEngine
from rollserve.testing.scripted_server import ScriptedApp, serving
from rollserve.tiny_tokenizer import TinyTokenizer
from rollserve.wire import CreatePolicy, OpenRun, RegisterBackend

ROLLOUTS = 4
"""Of a group."""
BACKENDS = 3
OPEN_GROUPS = 40
"""Of all runs together."""
_TAKE_S = 0.05
_QUIET_S = 120.0
"""The longest that the trial waits for its groups, and for its workers' last reports."""
_FAULTS: tuple[FaultKind, ...] = ("status", "drop", "hang")

RULES: tuple[dict[str, object], ...] = (
    {"filters": (FilterRule(name="zero_variance"),)},
    {"groups": GroupRule(oversample=2, deadline_s=8)},
    {"groups": GroupRule(min_usable=3, stragglers="cancel", deadline_s=8)},
    {"staleness": StalenessRule(max_staleness=1, on_stale="mask")},
    {"staleness": StalenessRule(max_staleness=1, on_stale="withhold")},
    {"staleness": StalenessRule(max_staleness=1)},
)
"""A run each."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """Tokens: ``recorded`` in the attempts' files, by bin, ``trained`` in samples that were acked;
    ``sampled`` by the backends, of which some never came to a worker that lived on. ``did`` is what the trial
    did."""

    rollouts: int
    recorded: int
    bins: dict[str, int]
    trained: int
    sampled: int
    did: dict[str, int]
    seconds: float

    @property
    def equal(self) -> bool:
        return self.recorded == sum(self.bins.values()) and self.trained == self.bins.get("delivered", 0)


@dataclass(kw_only=True)
class Trial:
    """``rollouts`` are the least that are run, ``kills`` of workers are spread over them."""

    folder: Path
    rollouts: int
    kills: int
    seed: int = 1
    did: Counter[str] = field(default_factory=Counter)
    trained: int = 0

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.engines = [ScriptedEngine(self._script(), latency_s=0.01) for _ in range(BACKENDS)]
        self.processes = Processes(self.folder / "logs")
        self.url = f"http://127.0.0.1:{self.processes.port()}"

    def _script(self) -> Script:
        """Of random length: a call of a tool that is not there, or an answer, right or wrong."""
        tokenizer = TinyTokenizer()
        filler = tokenizer.encode(" the file is not found;")
        endings = [" 42", " 41", '\n<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>']
        ends = [tokenizer.encode(f"{ending}<|im_end|>") for ending in endings]

        def script(prompt_ids: list[int]) -> Reply:
            end = self.chance.choices(ends, weights=(3, 3, 4))[0]
            return Reply(token_ids=(*(filler * 8)[: self.chance.randint(1, 60)], *end))

        return script

    async def run(self) -> Found:
        began = time.monotonic()
        try:
            async with self._serving() as client:
                runs = await self._open(client)
                await self._play(client, runs)
                await self._settle(client, runs)
                bins = await self._bins(runs)
        finally:
            self.processes.stop()
        counted, recorded = self._records()
        return Found(
            rollouts=counted,
            recorded=recorded,
            bins=dict(bins),
            trained=self.trained,
            sampled=sum(engine.generated_tokens for engine in self.engines),
            did=dict(self.did),
            seconds=round(time.monotonic() - began, 1),
        )

    # -- the server
    @asynccontextmanager
    async def _serving(self) -> AsyncIterator[Client]:
        settings = ("workers.count=2", "workers.run_slots=64", "backends.silent_s=5", "backends.quiet_s=2")
        command = [
            *(sys.executable, "-m", "rollserve", "serve", "--port", self.url.rsplit(":", 1)[1]),
            *("--data-dir", str(self.folder / "data"), "--runtime", "none"),
            *(part for setting in settings for part in ("--set", setting)),
        ]
        async with AsyncExitStack() as stack:
            urls = [await stack.enter_async_context(serving(ScriptedApp(engine))) for engine in self.engines]
            server = self.processes.start("server", command)
            await self.processes.wait_ready(server, f"{self.url}/readyz", 60)
            client = await stack.enter_async_context(Client(self.url))
            renderer = RendererSpec(name="qwen3", options={"enable_thinking": False})
            await client.create_policy(
                CreatePolicy(name="p", model="scripted", tokenizer="tiny", renderer=renderer)
            )
            for url in urls:
                await client.register_backend("p", RegisterBackend(url=url, kind=BackendKind.VLLM))
            yield client

    async def _open(self, client: Client) -> list[RunHandle]:
        retry = RetrySettings(max_attempts=3, backoff_s=0.05)
        specs = [OpenRun.model_validate({"policy": "p", "retry": retry, **rule}) for rule in RULES]
        return [await client.open_run(spec) for spec in specs]

    # -- the trial
    async def _play(self, client: Client, runs: list[RunHandle]) -> None:
        groups = -(-self.rollouts // ROLLOUTS)
        kill_at = {groups * (n + 1) // (self.kills + 1) for n in range(self.kills)}
        async with asyncio.TaskGroup() as tasks:
            trainers = [tasks.create_task(self._train(run)) for run in runs]
            troubles = [tasks.create_task(each(client)) for each in (self._update, self._cancel, self._fail)]
            for made in range(groups):
                await self._submit(runs)
                if made in kill_at:
                    await self._kill(client)
            await self._until_open(runs, 0, look_s=0.2)
            for trouble in troubles:
                trouble.cancel()
            await asyncio.gather(*troubles, return_exceptions=True)
            for engine in self.engines:
                engine.faults.clear()
            for trainer in trainers:
                trainer.cancel()

    async def _submit(self, runs: list[RunHandle]) -> None:
        run = runs[self.did["groups"] % len(runs)]
        task = Task(
            instruction="What is in the note?",
            runtime="none",
            tools=["submit"],
            grader=GraderSpec(name="numeric", options={"answer": 42}),
            limits=Limits(run_s=20, max_turns=6),
        )
        if self.did["groups"] % 20 == 0:
            await self._until_open(runs, OPEN_GROUPS, look_s=_TAKE_S)
        await run.submit([task], num_rollouts=ROLLOUTS)
        self.did["groups"] += 1

    async def _train(self, run: RunHandle) -> None:
        """Ack most groups, nack some. What it has is counted once its ack was heard: a cancel between the two
        would lose count, so that it waits."""
        while True:
            stream = run.groups(auto_ack=False, prefetch=1)
            try:
                async for group in stream:
                    taking = asyncio.create_task(self._take(group))
                    try:
                        await asyncio.shield(taking)
                    finally:
                        await taking
                    await asyncio.sleep(self.chance.uniform(0, _TAKE_S))
            finally:
                await stream.aclose()

    async def _take(self, group: FinishedGroup) -> None:
        if self.chance.random() < 0.1:
            await group.nack()
            self.did["nacks"] += 1
            return
        await group.ack()
        self.did["acks"] += 1
        self.trained += sum(int(sample.loss_mask.sum()) for sample in group.samples)

    async def _update(self, client: Client) -> None:
        version = 0
        while True:
            await asyncio.sleep(self.chance.uniform(0.3, 1.5))
            mode = self.chance.choice(list(UpdateMode))
            version += 1
            try:
                async with client.updating("p", mode=mode, lease_s=30) as update:
                    await asyncio.sleep(0.05)
                    await update.commit(version)
            except RollserveError:
                self.did["updates that failed"] += 1
                version = (await client.policy("p")).version
                continue
            self.did[f"updates ({mode.value})"] += 1

    async def _cancel(self, client: Client) -> None:
        while True:
            await asyncio.sleep(self.chance.uniform(0.05, 0.3))
            running = client.rollouts(state="running")
            found = await anext(running, None)
            if found is None:
                continue
            with suppress(NotFound):
                if self.chance.random() < 0.3:
                    await client.cancel_group(found.group_id)
                    self.did["groups cancelled"] += 1
                else:
                    await client.cancel_rollout(found.id)
                    self.did["rollouts cancelled"] += 1

    async def _fail(self, client: Client) -> None:
        while True:
            await asyncio.sleep(self.chance.uniform(0.02, 0.2))
            kind = self.chance.choices(_FAULTS, weights=(6, 6, 1))[0]
            fault = Fault(kind=kind, status=self.chance.choice((500, 503)), after_tokens=3)
            self.chance.choice(self.engines).faults.append(fault)
            self.did[f"faults ({kind})"] += 1

    async def _kill(self, client: Client) -> None:
        workers = (await client.status()).workers
        if workers:
            os.kill(self.chance.choice(workers)["pid"], signal.SIGKILL)
            self.did["workers killed"] += 1

    async def _until_open(self, runs: list[RunHandle], most: int, *, look_s: float) -> None:
        """Until no more groups than that are open in all."""

        async def open_now() -> int:
            return sum([(await run.status()).counts["groups_open"] for run in runs])

        await _falls_to(most, open_now, "groups are open", look_s=look_s)

    # -- the count
    async def _settle(self, client: Client, runs: list[RunHandle]) -> None:
        """Close the runs, take what is left, and wait until no worker owes a report."""
        for run in runs:
            await run.close()
            async for group in run.groups(auto_ack=False, prefetch=1):
                await self._take(group)
        await _falls_to(0, self._owed, "attempts have no end in the store", look_s=0.2)

    async def _owed(self) -> int:
        with closing(self._database()) as store:
            owed: int = store.execute("SELECT count(*) FROM attempts WHERE fate IS NULL").fetchone()[0]
        return owed

    def _database(self) -> sqlite3.Connection:
        return sqlite3.connect(f"file:{self.folder / 'data' / 'rollserve.db'}?mode=ro", uri=True)

    async def _bins(self, runs: list[RunHandle]) -> Counter[str]:
        total: Counter[str] = Counter()
        for run in runs:
            tokens = (await run.status()).bins.get("tokens", {})
            total.update({name: each.tokens for name, each in tokens.items()})
        return total

    def _records(self) -> tuple[int, int]:
        """Rollouts, and the tokens in the files of all their attempts."""
        data = self.folder / "data"
        with closing(self._database()) as store:
            rollouts: int = store.execute("SELECT count(*) FROM rollouts").fetchone()[0]
            refs = store.execute("SELECT payload FROM attempts WHERE payload IS NOT NULL").fetchall()
        total = 0
        for (ref,) in refs:
            payload = unpack((data / "payloads" / ref).read_bytes())
            total += sum(len(call.sampled_ids) // 4 for call in payload.calls)
        return rollouts, total


async def _falls_to(most: int, count: Callable[[], Awaitable[int]], what: str, *, look_s: float) -> None:
    """Until ``count`` is no more than ``most``. Raises ``TimeoutError`` where it is still more at the end of
    ``_QUIET_S``."""
    until = time.monotonic() + _QUIET_S
    while (now := await count()) > most:
        if time.monotonic() > until:
            raise TimeoutError(f"{now} {what} after {_QUIET_S:g} s, and no more than {most} were to be")
        await asyncio.sleep(look_s)
