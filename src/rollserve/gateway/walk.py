"""Looking for a request in the trajectory tree: all calls whose path is a prefix of its messages. Pure.

A step (the messages of one call) is looked up by a digest of the messages as they were sent before, and by a
looser key of their meaning; a reply is known by a form that was seen before, or is judged. Where the tree
does not fork, what comes next is only compared. So what was sent before costs a comparison of strings, and
only messages at forks and new ones are hashed and judged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec.structs import replace

from rollserve.gateway.node import Difference, Form, Node
from rollserve.gateway.turns import Messages, Verdict, joined, same_step
from rollserve.records.call import Message

Judge = Callable[..., Verdict]
"""``turns.judge``."""
_KEY_CHARS = 32
_AS_IT_WAS = Form(())


@dataclass(slots=True)
class Fork:
    """What goes on from one node: by a digest of the messages that came next, and by a looser key of their
    meaning. ``most_turns`` is the largest number of model turns among such messages, ``size`` that of
    calls, ``first`` the oldest of them."""

    exact: dict[int, list[Node]] = field(default_factory=dict)
    loose: dict[tuple[int, str, str], list[Node]] = field(default_factory=dict)
    most_turns: int = 0
    size: int = 0
    first: Node | None = None


class Place(NamedTuple):
    """Where in the request a node's reply ends. ``sure`` counts replies on the way that were known by an
    id, less those whose id is another call's."""

    node: Node
    at: int
    sure: int = 0
    differences: tuple[Difference, ...] = ()


@dataclass(slots=True)
class Walk:
    """What came of looking for a request: the deepest places, and replies that came back edited."""

    places: list[Place] = field(default_factory=list)
    edits: list[tuple[int, Node]] = field(default_factory=list)

    def reach(self, place: Place) -> None:
        if not self.places or place.at >= self.places[0].at:
            if self.places and place.at > self.places[0].at:
                self.places.clear()
            self.places.append(place)


class Walker:
    """Reads the tree's own tables as they are."""

    def __init__(self, forks: Mapping[Node, Fork], calls: Mapping[str, Node], judge: Judge) -> None:
        self._forks = forks
        self._calls = calls
        self._judge = judge

    def walk(self, given: Messages, start: Place) -> Walk:
        """The deepest nodes whose path is a prefix of the request, best first: those known by an id, then
        those without differences, then the newest."""
        found = Walk()
        marks: list[int | None] = [None] * len(given)
        open_places = [start]
        while open_places:
            begun = open_places.pop()
            place = self._straight(begun, given)
            if place is not begun:
                found.reach(place)
            for child, end, difference in self._steps(place, given, marks):
                turn = self.turn(child, given, end)
                if turn is None:
                    found.edits.append((end, child))
                    continue
                onward = (*place.differences, *difference, *turn.differences)
                reached = Place(child, turn.at, place.sure + turn.sure, onward)
                found.reach(reached)
                open_places.append(reached)
        found.places.sort(key=lambda p: (p.sure, -len(p.differences), p.node.order), reverse=True)
        return found

    def _straight(self, place: Place, given: Messages) -> Place:
        """As far as the tree does not fork and what comes next is known as it is."""
        node, at, sure = place.node, place.at, place.sure
        differences = list(place.differences)
        while (fork := self._forks[node]).size == 1 and (child := fork.first) is not None:
            step = _next(child.forms, given, at)
            end = at + len(step.messages) if step else at
            if step is None or end >= len(given) or given[end].role != "assistant":
                break
            back = _AS_IT_WAS if given[end] == child.reply else _next(child.returned, given, end)
            if back is None:
                break
            differences += _difference(child, at, step)
            differences += _difference(child, end, back, of_reply=True)
            sure += self._sure(child, given[end])
            node, at = child, end + (len(back.messages) or 1)
        return place if node is place.node else Place(node, at, sure, tuple(differences))

    def _sure(self, child: Node, theirs: Message) -> int:
        if theirs.call_id is None:
            return int(_same_ids(child.reply, theirs))
        if theirs.call_id == child.call_id:
            return 1
        return -1 if theirs.call_id in self._calls else int(_same_ids(child.reply, theirs))

    def _steps(
        self, place: Place, given: Messages, marks: list[int | None]
    ) -> Iterator[tuple[Node, int, tuple[Difference, ...]]]:
        """Children whose messages come next, with the index of what must be their reply."""
        fork, at = self._forks[place.node], place.at
        found = ends(given, marks, at, fork.most_turns) if fork.size else ()
        for turns, (end, digest) in enumerate(found):
            children = fork.exact.get(digest, ())
            sent = [(child, form) for child in children if (form := child.sent(given[at:end]))]
            for child, form in sent:
                yield child, end, _difference(child, at, form)
            if len(sent) < fork.size:
                yield from self._respelled(fork, sent, given, at, end, turns)

    def _respelled(
        self, fork: Fork, sent: list[tuple[Node, Form]], given: Messages, at: int, end: int, turns: int
    ) -> Iterator[tuple[Node, int, tuple[Difference, ...]]]:
        """Children that are not among ``sent``, and mean what comes next."""
        met = {child for child, _ in sent}
        for child in fork.loose.get(loose_key(given, at, end, turns), ()):
            if child not in met:
                causes = same_step(child.forms[0].messages, given[at:end])
                if causes is not None:
                    yield child, end, _difference(child, at, Form(given[at:end], causes))

    def turn(self, child: Node, given: Messages, at: int) -> Place | None:
        """Behind the child's reply, where it comes back at ``at``; None where that is something else."""
        theirs = given[at]
        named, sure = theirs.call_id == child.call_id, self._sure(child, theirs)
        if theirs == child.reply:
            return Place(child, at + 1, sure)
        if (form := _next(child.returned, given, at)) is not None:
            return Place(child, at + len(form.messages), sure, _difference(child, at, form, of_reply=True))
        verdict, length = self._judge(child.reply, theirs, known=named, tools=child.tools), 1
        if verdict.edited and child.ending:
            ended = replace(child.reply, content=child.reply.content + child.ending)
            verdict = self._judge(ended, theirs, known=named, tools=child.tools)
            verdict = verdict._replace(causes=(*verdict.causes, "stop_text_kept"))
        if verdict.edited and (length := _run_length(given, at)) > 1:
            whole = joined(given[at : at + length])
            verdict = self._judge(child.reply, whole, known=named, tools=child.tools)
            verdict = verdict._replace(causes=(*verdict.causes, "turn_split"))
        if verdict.edited:
            return None
        form = Form(given[at : at + length], verdict.causes)
        return Place(child, at + length, sure, _difference(child, at, form, of_reply=True))


def _difference(node: Node, at: int, form: Form, *, of_reply: bool = False) -> tuple[Difference, ...]:
    return (Difference(node, at, form, of_reply),) if form.causes else ()


def _next(forms: Sequence[Form], given: Messages, at: int) -> Form | None:
    """The form in which messages stand at ``at``."""
    for form in forms:
        if given[at : at + len(form.messages)] == form.messages:
            return form
    return None


def _same_ids(ours: Message, theirs: Message) -> bool:
    """Whether tool calls say it is the same turn."""
    return bool(ours.tool_calls) and [c.id for c in ours.tool_calls] == [c.id for c in theirs.tool_calls]


def ends(given: Messages, marks: list[int | None], start: int, most_turns: int) -> Iterator[tuple[int, int]]:
    """Indices of model turns that may be a reply to what begins at ``start``, with that one's digest.
    ``marks`` are the messages' hashes, as far as they were needed."""
    left, digest = most_turns + 1, 0
    for index in range(start, len(given)):
        if given[index].role == "assistant":
            yield index, digest
            left -= 1
            if not left:
                return
        if (mark := marks[index]) is None:
            mark = marks[index] = hash(given[index])
        digest = hash((digest, mark))


def _run_length(given: Messages, at: int) -> int:
    """Of the model messages in a row from ``at`` on."""
    end = at
    while end < len(given) and given[end].role == "assistant":
        end += 1
    return end - at


def chain(messages: Messages) -> int:
    digest = 0
    for message in messages:
        digest = hash((digest, hash(message)))
    return digest


def loose_key(messages: Messages, start: int, end: int, turns: int) -> tuple[int, str, str]:
    """Of the messages ``[start, end)``; the same for all of one meaning: the number of model turns, the last
    role, the end of the text without blanks."""
    role, tail = messages[end - 1].role if end > start else "", ""
    for index in range(end - 1, start - 1, -1):
        message = messages[index]
        if message.role != role or len(tail) >= _KEY_CHARS or (role == "assistant" and index < end - 1):
            break
        tail = "".join(message.content.rstrip()[-4 * _KEY_CHARS :].split()) + tail
    return turns, role, tail[-_KEY_CHARS:]
