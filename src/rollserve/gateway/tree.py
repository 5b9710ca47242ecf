"""The trajectory tree of one session, and where a request belongs in it. Pure.

A node is a call: the messages its request added to its parent, and the model's reply. A request extends
the deepest node whose path (messages and replies, root to node) is a prefix of the request's messages and
behind which no model turn of another's comes. What comes back from the agent may have been rewritten on the
way (see ``turns``): a node is looked for by the messages as they were sent before, then by their meaning;
its reply by what round-trips unchanged (the id of the call, ids of tool calls), and then compared by
meaning. A form that was seen once is known: it costs a comparison of strings from then on. So a request
costs one pass over its messages, and a judgement of what is new in it.

References lead up only, from a call to its parent, and the tree alone knows what goes on from where: so a
tree is freed, token ids and all, the moment its session lets go of it, and not when the collector comes by.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import msgspec

from rollserve.dialect.base import POSITION
from rollserve.gateway.node import Difference, Form, Match, Node
from rollserve.gateway.turns import EDITED, Messages, Tools, instructions, judge, last_turn
from rollserve.gateway.walk import Fork, Judge, Place, Walk, Walker, chain, ends, loose_key
from rollserve.records.call import Break, Label, Message

Rule = Literal["exact", "faithful", "fail"]

_MOST_FORMS = 4
"""Of one step or reply that are remembered."""
_TELLING_CHARS = 24
"""A reply without calls is known again by its text alone when it has so many."""


class Tree:
    """Grows by ``add``; nothing is removed. ``judge`` is that of ``turns``."""

    def __init__(self, judge: Judge = judge) -> None:
        self._judge = judge
        self._top = Node("", None, (), Message(role="assistant"), (), b"", b"")
        self._forks: dict[Node, Fork] = {self._top: Fork()}
        self._calls: dict[str, Node] = {}
        self._tool_calls: dict[str, Node] = {}
        self._texts: dict[int, Node] = {}
        self._walker = Walker(self._forks, self._calls, judge)
        self._uninstructed: dict[int, list[Node]] = {}
        self._tools: list[Tools] = []
        self.newest: Node | None = None
        self.size = 0

    def get(self, call_id: str) -> Node | None:
        return self._calls.get(call_id)

    def nodes(self) -> Iterable[Node]:
        """In the order of their calls."""
        return self._calls.values()

    def twins(self, match: Match) -> list[Node]:
        """Calls of the same messages where ``match`` would put one."""
        fork = self._forks[match.parent or self._top]
        return [node for node in fork.exact.get(chain(match.form), ()) if node.sent(match.form)]

    def goes_on(self, node: Node) -> bool:
        """Whether any call has it for its parent."""
        return bool(self._forks[node].exact)

    def siblings(self, match: Match) -> Iterator[Node]:
        """All calls where ``match`` would put one; some perhaps twice."""
        for nodes in self._forks[match.parent or self._top].exact.values():
            yield from nodes

    # -- where a request belongs

    def match(self, messages: Sequence[Message], tools: Tools, rule: Rule = "exact") -> Match:
        """The same request again, once answered, is a sibling. Under ``faithful`` only what is the same
        bytes is extended."""
        given = tuple(messages)
        walk = self._walker.walk(given, Place(self._top, 0))
        last = last_turn(given)
        whole = [place for place in walk.places if place.at > last]
        fit = whole if rule != "faithful" else [place for place in whole if not place.differences]
        for place in fit:
            if place.node.tools == tools:
                new = given[place.at :]
                return Match(
                    parent=place.node,
                    new=_answering(new, place.node.reply),
                    given=given,
                    form=new,
                    differences=place.differences,
                )
        if fit:
            return self._root(given, fit[0], "tools_changed")
        if whole:
            return self._root(given, whole[0], whole[0].differences[0].form.causes[0], faithful=True)
        return self._foreign(given, walk, last, faithful=rule == "faithful")

    def reroot(self, match: Match, cause: str, detail: str = "") -> Match:
        """A new root for a request that goes on from ``match.parent`` and can't extend it."""
        parent = match.parent or self._top
        place = Place(parent, len(match.given) - len(match.form), 0, match.differences)
        return self._root(match.given, place, cause, detail)

    def _root(
        self, given: Messages, place: Place, cause: str, detail: str = "", *, faithful: bool = False
    ) -> Match:
        node, at = place.node, place.at
        if faithful:
            at = place.differences[0].at
        broke = Break(cause=cause, at_message=at, from_call=node.call_id, detail=detail)
        new = given if faithful else _recognised(given, place)
        return Match(
            parent=None, new=new, given=given, form=given, broke=broke, differences=place.differences
        )

    def _foreign(self, given: Messages, walk: Walk, last: int, *, faithful: bool) -> Match:
        """A root for a request whose model turns are not (all) ours. It has a break where some of it is."""
        best = walk.places[0] if walk.places else None
        at, kin = max(walk.edits, key=lambda edit: (edit[0], edit[1].order), default=(-1, None))
        start = best.at if best else 0
        cause, edited = EDITED, at >= start
        if not edited:
            at, kin = -1, None
        if kin is None and best is None and (moved := self._reinstructed(given)):
            at, kin, cause = 0, moved, "system_changed"
        if kin is None:
            at, kin = self._kin(given, start, last)
        if kin is None and best is not None and start <= last:
            at = next(i for i in range(start, last + 1) if given[i].role == "assistant")
            kin = best.node
        new = given
        if not faithful:
            head = best.node.conversation() if best else ()
            new = (*head, *self._restored(given[start:]))
        broke = None if kin is None else Break(cause=cause, at_message=at, from_call=kin.call_id)
        differences = best.differences if best else ()
        return Match(
            parent=None,
            new=new,
            given=given,
            form=given,
            broke=broke,
            differences=differences,
            edited=edited,
        )

    def _reinstructed(self, given: Messages) -> Node | None:
        """The deepest node of a conversation that is this one but for its system messages."""
        bare = given[len(instructions(given)) :]
        found: list[Place] = []
        marks: list[int | None] = [None] * len(bare)
        for end, digest in ends(bare, marks, 0, len(bare)):
            for root in self._uninstructed.get(digest, ()):
                if _bare(root.forms[0].messages) == bare[:end]:
                    turn = self._walker.turn(root, bare, end)
                    if isinstance(turn, Place):
                        found += [turn, *self._walker.walk(bare, turn).places]
            if found:
                break
        return max(found, key=lambda place: (place.at, place.node.order)).node if found else None

    def _kin(self, given: Messages, start: int, last: int) -> tuple[int, Node | None]:
        """The newest of our replies among the request's model turns from ``start`` on, and the first
        message that differs from its conversation."""
        for index in range(last, start - 1, -1):
            theirs = given[index]
            if theirs.role != "assistant":
                continue
            node, sure = self._known(theirs)
            if node is None:
                continue
            common = _common(node.conversation(), given)
            told = common > 0 or len(theirs.content.strip()) >= _TELLING_CHARS
            if sure or (common <= index and told):
                return min(common, index), node
        return -1, None

    def _known(self, theirs: Message) -> tuple[Node | None, bool]:
        """The call that said it, by an id of ours (then sure) or by its text."""
        if theirs.call_id and (node := self._calls.get(theirs.call_id)):
            return node, True
        for call in theirs.tool_calls:
            if call.id and (node := self._tool_calls.get(call.id)):
                return node, True
        text = theirs.content.strip()
        return self._texts.get(hash(text)) if text else None, False

    def _restored(self, messages: Messages) -> Iterator[Message]:
        """Model turns of ours as the model gave them, where they still mean the same."""
        for message in messages:
            node, sure = self._known(message) if message.role == "assistant" else (None, False)
            if node is not None and (sure or len(message.content.strip()) >= _TELLING_CHARS):
                known = message.call_id == node.call_id
                verdict = self._judge(node.reply, message, known=known, tools=node.tools)
                yield message if verdict.edited else node.reply
            else:
                yield message

    # -- growing

    def add(
        self,
        match: Match,
        *,
        call_id: str,
        reply: Message,
        tools: Tools,
        prompt_ids: bytes,
        sampled_ids: bytes,
        label: Label = "continuation",
        ending: str | None = None,
    ) -> Node:
        """Record a call where ``match`` put it."""
        above = match.parent or self._top
        node = Node(
            call_id=call_id,
            parent=match.parent,
            messages=match.new,
            reply=reply,
            tools=self._shared(tools),
            prompt_ids=prompt_ids,
            sampled_ids=sampled_ids,
            label=label,
            ending=ending,
            depth=above.depth + len(match.new) + 1,
            offset=above.offset + (len(above.sampled_ids) + len(prompt_ids)) // 4,
            order=self.size,
            forms=[Form(match.form)],
        )
        self._forks[node] = Fork()
        self._hang(node, self._forks[above], match)
        self._index(node)
        self._note(match.differences)
        self.newest = node
        self.size += 1
        return node

    def _hang(self, node: Node, fork: Fork, match: Match) -> None:
        """Let ``node`` be found below ``fork``, by each form that its messages came in."""
        turns = _turns(match.form)
        if match.new != match.form:
            node.forms.append(Form(match.new))
        for form in node.forms:
            fork.exact.setdefault(chain(form.messages), []).append(node)
        fork.loose.setdefault(loose_key(match.form, 0, len(match.form), turns), []).append(node)
        fork.most_turns = max(fork.most_turns, turns)
        fork.size += 1
        fork.first = fork.first or node

    def unseen(self, match: Match) -> list[Difference]:
        """Those of its differences that no call has had before."""
        return [each for each in match.differences if not _noted(each)]

    def _note(self, differences: Iterable[Difference]) -> None:
        """Know these forms again; the oldest of too many are forgotten, save what was first."""
        for each in differences:
            if _noted(each):
                continue
            known, first = (each.node.returned, 0) if each.of_reply else (each.node.forms, 1)
            if len(known) == _MOST_FORMS:
                del known[first]
            known.append(each.form)
            if not each.of_reply:
                fork = self._forks[each.node.parent or self._top]
                known_so = fork.exact.setdefault(chain(each.form.messages), [])
                if each.node not in known_so:
                    known_so.append(each.node)

    def _index(self, node: Node) -> None:
        self._calls[node.call_id] = node
        for call in node.reply.tool_calls:
            self._tool_calls[call.id] = node
        if text := node.reply.content.strip():
            self._texts[hash(text)] = node
        if node.parent is None:
            self._uninstructed.setdefault(chain(_bare(node.forms[0].messages)), []).append(node)

    def _shared(self, tools: Tools) -> Tools:
        """One copy of tools that are offered again and again."""
        for known in self._tools:
            if known == tools:
                return known
        self._tools.append(tools)
        return tools


def _noted(difference: Difference) -> bool:
    node = difference.node
    return difference.form in (node.returned if difference.of_reply else node.forms)


def _recognised(given: Messages, place: Place) -> Messages:
    """The request's conversation with the replies on the place's path as the model gave them."""
    return (*place.node.conversation(), *_answering(given[place.at :], place.node.reply))


def _answering(messages: Messages, reply: Message) -> Messages:
    """Results that say which call they are of by its position, with its id."""
    if not any((message.tool_call_id or "").startswith(POSITION) for message in messages):
        return messages
    return tuple(_named(message, reply) for message in messages)


def _named(message: Message, reply: Message) -> Message:
    position = (message.tool_call_id or "").removeprefix(POSITION)
    if message.tool_call_id == position or not position.isdecimal():
        return message
    if int(position) >= len(reply.tool_calls):
        return message
    return msgspec.structs.replace(message, tool_call_id=reply.tool_calls[int(position)].id)


def _turns(messages: Messages) -> int:
    return sum(message.role == "assistant" for message in messages)


def _bare(messages: Messages) -> Messages:
    return messages[len(instructions(messages)) :]


def _common(path: Sequence[Message], given: Messages) -> int:
    count = 0
    for one, other in zip(path, given, strict=False):
        if one != other:
            break
        count += 1
    return count
