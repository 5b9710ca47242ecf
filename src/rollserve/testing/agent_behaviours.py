"""Sessions as agents make them, at random: they go on, retry in storms, fork, ask several times at once, run
sub-agents beside each other, compact, lose their connection, edit the past, and rewrite what the model said
by habit; some of what users and tools tell them is an image. Each request is put into a ``Tree`` and into the
``ReferenceTree``, which must agree; and each sampled token must be trained once or be left out for a reason.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import msgspec

from rollserve.gateway.images import placed
from rollserve.gateway.lineage import at_record, of_request, without_break
from rollserve.gateway.node import Match
from rollserve.gateway.samples import build_samples, left_out, token_report
from rollserve.gateway.tree import Tree
from rollserve.records.call import (
    Call,
    ChatRequest,
    Message,
    SamplingParams,
    ToolCall,
    VersionSpan,
    pack_floats,
    pack_ids,
)
from rollserve.records.image import Image
from rollserve.records.rollout import Rollout
from rollserve.records.run import RunSpec
from rollserve.testing.agent_lines import SHELL, SPELLINGS, Habit, Line, Said
from rollserve.testing.tree_reference import ReferenceTree

_WORDS = ("a", "b", "look", "yes")
_IMAGES = (
    Image(digest="1", media_type="image/png", size_bytes=1),
    Image(digest="2", media_type="image/png", size_bytes=1),
    Image(digest="2", media_type="image/png", size_bytes=1, detail="low"),
    Image(digest="3", url="https://images.invalid/1"),
)


class Session:
    """One session; raises ``AssertionError`` where tree and reference differ. ``happened`` counts what the
    agent did, ``tokens`` what became of sampled tokens."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.tree = Tree()
        self.reference = ReferenceTree()
        self.faithful = rng.random() < 0.25
        self.run_spec = RunSpec(
            policy="p",
            rewrites="faithful" if self.faithful else "exact",
            on_inexact=rng.choice(["drop", "text"]),
        )
        self.happened: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self._calls: list[Call] = []
        self._next_token = 0
        self._lines: list[Line] = []

    def run(self, calls: int) -> None:
        """Until so many calls are recorded."""
        actions = {
            "go on": (self._go_on, 30),
            "retry": (self._retry, 5),
            "storm": (self._storm, 1),
            "at once": (self._at_once, 3),
            "fork": (self._fork, 5),
            "sub-agent": (self._subagent, 4),
            "compaction": (self._compaction, 3),
            "title": (self._title, 2),
            "disconnect": (self._disconnect, 4),
            "edit": (self._edit, 3),
            "other image": (self._other_image, 4),
            "other tools": (self._other_tools, 2),
            "foreign turn": (self._foreign, 2),
            "other instructions": (self._other_instructions, 1),
            "other habit": (self._other_habit, 2),
        }
        names, weights = list(actions), [weight for _, weight in actions.values()]
        self._lines.append(self._new_line("main"))
        while len(self._calls) < calls:
            name = self._rng.choices(names, weights)[0]
            self.happened[name] += 1
            actions[name][0]()
        self._account()

    # -- what agents do

    def _new_line(self, system: str) -> Line:
        rng = self._rng
        habit = Habit(
            drops_reasoning=rng.random() < 0.3,
            respells=rng.random() < 0.4,
            fills_defaults=rng.random() < 0.2,
            trims=rng.random() < 0.2,
            merges=rng.random() < 0.2,
            splits=rng.random() < 0.1,
            ids=rng.choice(["kept", "kept", "kept", "marks", "dropped"]),
        )
        begun: list[Message | Said] = [Message(role="system", content=system)]
        if rng.random() < 0.15:  # few-shots that no model said
            begun += [self._user(), Message(role="assistant", content="Ok.")]
        return Line([*begun, *(self._user() for _ in range(rng.choice([1, 1, 2])))], habit)

    def _user(self) -> Message:
        return self._given(role="user")

    def _given(self, **fields: Any) -> Message:
        """Words, and sometimes images among them."""
        words = self._rng.choice(_WORDS)
        count = self._rng.choices([0, 1, 2], [85, 12, 3])[0]
        self.happened["image"] += count
        places = sorted(self._rng.choice([0, len(words)]) for _ in range(count))
        images = (msgspec.structs.replace(self._rng.choice(_IMAGES), at=at) for at in places)
        return Message(content=words, images=tuple(images), **fields)

    def _line(self) -> Line:
        return self._rng.choice(self._lines)

    def _go_on(self) -> None:
        line = self._line()
        self._answer_tools(line)
        self._keep(line, self._ask(line.request()))

    def _answer_tools(self, line: Line) -> None:
        last = line.memory[-1]
        if not isinstance(last, Said):
            return
        for call in last.message.tool_calls:
            line.memory.append(self._given(role="tool", tool_call_id=call.id))
        if not last.message.tool_calls or self._rng.random() < 0.1:
            line.memory.append(self._user())

    def _retry(self) -> None:
        """The same again; either answer may be the one that is kept."""
        line = self._line()
        self._answer_tools(line)
        answers = [self._ask(line.request()) for _ in range(2)]
        self._keep(line, self._rng.choice(answers))

    def _storm(self) -> None:
        line = self._line()
        self._answer_tools(line)
        for _ in range(self._rng.randrange(3, 8)):
            answer = self._ask(line.request())
        self._keep(line, answer)

    def _at_once(self) -> None:
        """``n`` above 1: matched together, recorded one after another."""
        line = self._line()
        self._answer_tools(line)
        asked = [line.request() for _ in range(self._rng.randrange(2, 5))]
        planned = [(request, self._place(request)) for request in asked]
        answers = [self._record(request, match) for request, match in planned]
        self._keep(line, self._rng.choice(answers))

    def _fork(self) -> None:
        old = self._line()
        turns = [at for at, each in enumerate(old.memory) if isinstance(each, Said)]
        if not turns:
            return
        memory = old.memory[: self._rng.choice(turns) + 1]
        line = Line(memory, old.habit, old.tools, old.hints)
        self._answer_tools(line)
        line.memory.append(self._user())
        self._lines.append(line)
        self._keep(line, self._ask(line.request()))

    def _subagent(self) -> None:
        line = self._new_line(self._rng.choice(["helper", "main", "scout"]))
        if self._rng.random() < 0.4:
            line.hints = {"subagent": "x"}
        self._lines.append(line)
        self._keep(line, self._ask(line.request()))

    def _compaction(self) -> None:
        line = self._line()
        self._answer_tools(line)
        asked = line.request()
        asked = msgspec.structs.replace(
            asked,
            messages=(*asked.messages, Message(role="user", content="summarize")),
            hints=line.hints | ({"purpose": "compaction"} if self._rng.random() < 0.5 else {}),
        )
        answer = self._ask(asked)
        kept = line.memory[-2:] if self._rng.random() < 0.5 and isinstance(line.memory[-2], Said) else []
        text = Message(role="user", content=f"So far: {answer.message.content}")
        line.memory = [line.memory[0], text, *kept]
        self._keep(line, self._ask(line.request()))

    def _title(self) -> None:
        system = Message(role="system", content="title")
        self._ask(ChatRequest(messages=(system, self._user())))

    def _disconnect(self) -> None:
        """Nothing is recorded; it is asked again."""
        line = self._line()
        self._answer_tools(line)
        self._place(line.request())
        self._keep(line, self._ask(line.request()))

    def _edit(self) -> None:
        line = self._line()
        at = self._rng.randrange(len(line.memory))
        each = line.memory[at]
        if isinstance(each, Said):
            changed = msgspec.structs.replace(each.message, content=f"{each.message.content}!")
            line.memory[at] = Said(changed, each.call_id)
        else:
            line.memory[at] = msgspec.structs.replace(each, content=f"{each.content}?")
        self._go_on_with(line)

    def _other_image(self) -> None:
        """One is left out, or put elsewhere, or another (or the same again) stands in its place."""
        line = self._line()
        given = [at for at, each in enumerate(line.memory) if isinstance(each, Message) and each.images]
        if not given:
            return
        at = self._rng.choice(given)
        message = line.memory[at]
        assert isinstance(message, Message)
        first, *others = message.images
        changed = self._rng.choice([_IMAGES[0], None, first])
        if changed is not None:
            place = first.at if changed is not first else len(message.content) - first.at
            others.append(msgspec.structs.replace(changed, at=place))
        images = tuple(sorted(others, key=lambda image: image.at))
        line.memory[at] = msgspec.structs.replace(message, images=images)
        self._go_on_with(line)

    def _other_tools(self) -> None:
        line = self._line()
        line.tools = () if line.tools else (SHELL,)
        self._go_on_with(line)

    def _foreign(self) -> None:
        line = self._line()
        self._answer_tools(line)
        line.memory += [Message(role="assistant", content="foreign"), self._user()]
        self._go_on_with(line)

    def _other_instructions(self) -> None:
        line = self._line()
        line.memory[0] = Message(role="system", content=self._rng.choice(["main", "new", "newer"]))
        self._go_on_with(line)

    def _other_habit(self) -> None:
        line = self._line()
        line.habit = replace(self._new_line("").habit, merges=line.habit.merges)
        self._go_on_with(line)

    def _go_on_with(self, line: Line) -> None:
        self._answer_tools(line)
        self._keep(line, self._ask(line.request()))

    def _keep(self, line: Line, answer: Said) -> None:
        line.memory.append(answer)

    # -- tree and reference

    def _ask(self, request: ChatRequest) -> Said:
        return self._record(request, self._place(request))

    def _place(self, request: ChatRequest) -> Match:
        match = self.tree.match(request.messages, request.tools, self.run_spec.rewrites)
        expected = self.reference.parent(request.messages, request.tools, faithful=self.faithful)
        found = match.parent.call_id if match.parent else None
        assert found == expected, (found, expected, request)
        if match.parent is None:
            named = self.reference.named(request.messages)
            assert match.broke is not None or not named, request
        else:
            assert match.broke is None
            assert match.form == request.messages[len(request.messages) - len(match.form) :]
            assert not any(message.role == "assistant" for message in match.new)
        assert len(match.new) == len(match.form) or match.parent is None
        return match

    def _record(self, request: ChatRequest, match: Match) -> Said:
        lineage = of_request(self.tree, match, request)
        match = without_break(self.tree, match, lineage)
        lineage = at_record(self.tree, match, lineage)
        call_id = f"c{self.tree.size}"
        call = self._sampled(call_id, request, match)
        call = msgspec.structs.replace(call, label=lineage.label, origin=lineage.origin)
        node = self.tree.add(
            match,
            call_id=call_id,
            reply=call.reply,
            tools=request.tools,
            prompt_ids=call.prompt_ids,
            sampled_ids=call.sampled_ids,
            label=call.label,
        )
        assert node.depth == len(node.conversation())
        self.reference.add(call_id, call.parent, match.form, match.new, call.reply, request.tools)
        self._calls.append(call)
        return Said(call.reply, call_id)

    def _sampled(self, call_id: str, request: ChatRequest, match: Match) -> Call:
        rng = self._rng
        prompt, sampled = (self._tokens(count) for count in (rng.randrange(1, 4), rng.randrange(5)))
        return Call(
            id=call_id,
            parent=match.parent.call_id if match.parent else None,
            messages=match.new,
            tools=request.tools or None,
            prompt_ids=pack_ids(prompt),
            sampled_ids=pack_ids(sampled),
            logprobs=pack_floats([-0.5] * len(sampled)),
            versions=(VersionSpan(0, len(sampled), 1, 1),) if sampled else (),
            reply=self._summary(call_id) if _asks_for_summary(request) else self._reply(call_id),
            finish_reason="stop",
            sampling=SamplingParams(),
            broke=match.broke,
            inexact="backend_ids" if rng.random() < 0.04 else None,
            constrained=rng.random() < 0.03,
            images=placed(match.new, prompt, None),
        )

    def _tokens(self, count: int) -> list[int]:
        first, self._next_token = self._next_token, self._next_token + count
        return list(range(first, first + count))

    def _reply(self, call_id: str) -> Message:
        rng = self._rng
        calls = tuple(self._tool_call(f"{call_id}.{at}") for at in range(rng.choice([0, 0, 1, 1, 2])))
        return Message(
            role="assistant",
            content=rng.choice(["", "ok", "go", "then", " so\n"]),
            reasoning=rng.choice([None, "hm", "thus"]),
            tool_calls=calls,
        )

    def _summary(self, call_id: str) -> Message:
        return Message(role="assistant", content=f"{call_id}-{'summary' * 8}")

    def _tool_call(self, call_id: str) -> ToolCall:
        if self._rng.random() < 0.1:
            return ToolCall(id=call_id, name="shell", arguments='{"a": ', error="not JSON")
        return ToolCall(id=call_id, name="shell", arguments=self._rng.choice(SPELLINGS))

    # -- tokens

    def _account(self) -> None:
        """Each sampled token is trained once, or left out for one reason."""
        rollout = Rollout(id="r", group_id="g", run_id="run", index=0, reward=1.0)
        samples = build_samples(self._calls, rollout=rollout, run=self.run_spec)
        trained = Counter(int(i) for sample in samples for i in sample.ids[sample.loss_mask])
        reasons = left_out(self._calls, self.run_spec)
        kept = Counter({i: 1 for call in self._calls if call.id not in reasons for i in _ids(call)})
        assert trained == kept, (trained - kept, kept - trained)
        report = token_report(self._calls, samples, self.run_spec)
        assert report.sampled == report.trained + sum(report.left_out.values())
        assert report.trained == sum(label.trained for label in report.by_label.values())
        for sample in samples:
            assert sample.ids.tolist() == self._whole(sample.call_ids)
            assert [(each.call_id, each.image) for each in sample.images] == self._seen(sample.call_ids)
        self.tokens.update({"sampled": report.sampled, "trained": report.trained, **report.left_out})
        self.tokens.update({"calls": report.calls, "sequences": report.sequences})
        self.happened.update(f"label {call.label}" for call in self._calls)
        self.happened.update(f"break {call.broke.cause}" for call in self._calls if call.broke)

    def _seen(self, call_ids: Iterable[str]) -> list[tuple[str, Image]]:
        """What a path shows, each image with the call that brought it."""
        by_id = {call.id: call for call in self._calls}
        shown = ((call_id, message) for call_id in call_ids for message in by_id[call_id].messages)
        return [(call_id, image) for call_id, message in shown for image in message.images]

    def _whole(self, call_ids: Iterable[str]) -> list[int]:
        by_id = {call.id: call for call in self._calls}
        path = [by_id[call_id] for call_id in call_ids]
        assert [call.parent for call in path] == [None, *(call.id for call in path[:-1])]
        return [i for call in path for i in (*_ids(call, "prompt_ids"), *_ids(call))]


def _asks_for_summary(request: ChatRequest) -> bool:
    return request.messages[-1].content == "summarize"


def _ids(call: Call, name: str = "sampled_ids") -> list[int]:
    data: bytes = getattr(call, name)
    return [int.from_bytes(data[at : at + 4], "little") for at in range(0, len(data), 4)]
