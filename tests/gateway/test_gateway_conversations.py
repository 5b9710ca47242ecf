"""Random conversations, end to end: what the backend gets is the path of the tree."""

from __future__ import annotations

import random

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from rollserve.agent.base import Reply
from rollserve.backend.base import GenerateRequest, Generation
from rollserve.gateway.samples import build_samples
from rollserve.gateway.tokens import TextTokenizer
from rollserve.records.call import Message, unpack_ids
from rollserve.records.rollout import Rollout
from rollserve.records.run import RunSpec

from .conftest import SHELL, World, context

USER = Message(role="user", content="hi")


CALL = '<tool_call>\n{"name": "shell", "arguments": {"command": "ls"}}\n</tool_call>'


SAYINGS = [
    "ok",
    f"look\n{CALL}",
    "<think>\nhm\n</think>\n\nyes",
    "<think>\nhm",
    "<tool_call>\n{nope}\n</tool_call>",
    "",
]


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32), turns=st.integers(1, 10))
async def test_contexts_are_the_concatenation_of_the_path(tiny: TextTokenizer, seed: int, turns: int) -> None:
    """Forks, retries, cut-offs, aborts, broken tool calls, dropped reasoning: what the backend got is
    always root → call (and what an abort left), and each sampled token is in the samples exactly once."""
    rng = random.Random(seed)
    world = World(tiny)
    begun: list[list[int]] = []
    stopped = False

    def script(request: GenerateRequest) -> Generation:
        nonlocal stopped
        if not stopped:
            begun.append(list(request.token_ids))
        finish = rng.choice(["stop", "stop", "stop", "length", "abort"])
        stopped = finish == "abort"
        return world.generation(rng.choice(SAYINGS), finish_reason=finish)

    world.pool.script = script
    run = {"rewrites": rng.choice(["exact", "faithful"])}
    session = await world.open(limits={"max_turns": 100}, run=run)
    histories: list[list[Message]] = [[USER]]
    for _ in range(turns):
        history = rng.choice(histories)
        reply = await session.model.chat(history, tools=[SHELL] if rng.random() < 0.9 else [])
        histories.append([*history, _sent_back(reply, rng), *_answers(reply, rng)])
    calls = world.segments[0].calls
    assert begun == [context(calls, call) for call in calls]
    made = build_samples(
        calls, rollout=Rollout(id="r", group_id="g", run_id="x", index=0, reward=1.0), run=RunSpec(policy="p")
    )
    trained = sorted(i for sample in made for i in sample.ids[sample.loss_mask].tolist())
    assert trained == sorted(i for call in calls for i in unpack_ids(call.sampled_ids).tolist())
    for sample in made:
        first = next(call for call in calls if call.id == sample.call_ids[-1])
        whole = [*context(calls, first), *unpack_ids(first.sampled_ids).tolist()]
        assert sample.ids.tolist() == whole
    await world.service.close()


def _sent_back(reply: Reply, rng: random.Random) -> Message:
    back = reply.message
    if rng.random() < 0.3:
        back = msgspec.structs.replace(back, reasoning=None)
    if rng.random() < 0.3:
        respelled = (
            msgspec.structs.replace(call, arguments=call.arguments.replace(": ", ":"))
            for call in back.tool_calls
        )
        back = msgspec.structs.replace(back, tool_calls=tuple(respelled))
    return back


def _answers(reply: Reply, rng: random.Random) -> list[Message]:
    tools = [
        Message(role="tool", content=rng.choice(["a", "<|im_end|>"]), tool_call_id=call.id)
        for call in reply.message.tool_calls
    ]
    return tools or [Message(role="user", content=rng.choice(["more", "<think>"]))]
