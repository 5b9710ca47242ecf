"""The events of a streamed response. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from rollserve.dialect import responses_answer as answer_form
from rollserve.dialect.base import Answered, Piece, TokenLogprob
from rollserve.dialect.openai import logprob_entries
from rollserve.dialect.responses_ids import item_id
from rollserve.dialect.responses_request import ResponsesForm
from rollserve.dialect.writing import event
from rollserve.errors import RollserveError
from rollserve.records.call import ToolCall


class _Text:
    """The item whose text is coming."""

    def __init__(self, kind: Literal["content", "reasoning"], own_id: str) -> None:
        self.kind = kind
        self.own_id = own_id
        self.texts: list[str] = []


class EventWriter:
    """``StreamWriter`` of one response. Its ids, and the mark in its reasoning, are made of ``stream_id``:
    give it the id that the call has, or will have."""

    def __init__(self, *, stream_id: str, created_s: int, model: str, form: ResponsesForm) -> None:
        self._call_id = stream_id
        self._created_s = created_s
        self._model = model
        self._form = form
        self._sequence = 0
        self._items: list[dict[str, Any]] = []
        self._open: _Text | None = None

    def opening(self) -> bytes:
        return self._whole("response.created", "in_progress") + self.keep_alive()

    def keep_alive(self) -> bytes:
        """Says again what all clients know and none acts on; a comment line would not reset all timers."""
        return self._whole("response.in_progress", "in_progress")

    def piece(self, piece: Piece, *, choice: int = 0) -> bytes:
        before = b""
        if self._open is None or self._open.kind != piece.kind:
            before = self._close() + self._begin(piece.kind)
        return before + self._delta(piece.text)

    def closing(self, answers: Sequence[Answered], rest: Sequence[Sequence[Piece]]) -> bytes:
        answer = answers[0]
        calls = answer.message.tool_calls
        parts = [self.piece(piece) for piece in rest[0]]
        if not (self._items or self._open or calls):
            parts.append(self._begin("content"))
        cut = answer_form.was_cut(answer)
        parts.append(self._close(answer.tokens, cut=cut and not calls))
        parts += [self._call(call, cut=cut and number == len(calls)) for number, call in enumerate(calls, 1)]
        status = answer_form.status(answer)
        parts.append(
            self._whole(f"response.{status}", status, output=self._items, usage=answer_form.usage(answer))
        )
        return b"".join(parts)

    def failure(self, error: RollserveError, status: int) -> bytes:
        told = answer_form.stream_error(error, status)
        return self._whole("response.failed", "failed", output=self._items, error=told)

    def _begin(self, kind: Literal["content", "reasoning"]) -> bytes:
        own_id = item_id("msg" if kind == "content" else "rs", self._call_id, len(self._items))
        self._open = _Text(kind, own_id)
        if kind == "reasoning":
            item = answer_form.reasoning_item(own_id, None, None)
            name, part = "response.reasoning_summary_part.added", answer_form.summary_part("")
        else:
            item = answer_form.message_item(own_id, [], "in_progress")
            name, part = "response.content_part.added", answer_form.text_part("")
        return self._item("added", item) + self._in_open(name, part=part)

    def _delta(self, text: str) -> bytes:
        assert self._open is not None
        self._open.texts.append(text)
        if self._open.kind == "reasoning":
            return self._in_open("response.reasoning_summary_text.delta", delta=text)
        return self._in_open("response.output_text.delta", delta=text, logprobs=[])

    def _close(self, tokens: Sequence[TokenLogprob] | None = None, *, cut: bool = False) -> bytes:
        """End the text that is open, if there is one."""
        if self._open is None:
            return b""
        own_id, text = self._open.own_id, "".join(self._open.texts)
        if self._open.kind == "reasoning":
            item = answer_form.reasoning_item(own_id, text, self._call_id)
            done = self._in_open("response.reasoning_summary_text.done", text=text)
            done += self._in_open("response.reasoning_summary_part.done", part=answer_form.summary_part(text))
        else:
            part = answer_form.text_part(text, tokens)
            item = answer_form.message_item(own_id, [part])
            logprobs = logprob_entries(tokens or ())
            done = self._in_open("response.output_text.done", text=text, logprobs=logprobs)
            done += self._in_open("response.content_part.done", part=part)
        self._open = None
        return done + self._finish(item, cut=cut)

    def _call(self, call: ToolCall, *, cut: bool) -> bytes:
        item = answer_form.call_item(call, self._form, self._call_id, len(self._items))
        custom = item["type"] == "custom_tool_call"
        field = "input" if custom else "arguments"
        name = "response.custom_tool_call_input" if custom else "response.function_call_arguments"
        place = {"item_id": item["id"], "output_index": len(self._items)}
        return b"".join(
            (
                self._item("added", {**item, field: "", "status": "in_progress"}),
                self._event(f"{name}.delta", **place, delta=item[field]),
                self._event(f"{name}.done", **place, **{field: item[field]}),
                self._finish(item, cut=cut),
            )
        )

    def _finish(self, item: dict[str, Any], *, cut: bool) -> bytes:
        if cut:
            answer_form.cut_off(item)
        done = self._item("done", item)
        self._items.append(item)
        return done

    def _item(self, what: Literal["added", "done"], item: dict[str, Any]) -> bytes:
        return self._event(f"response.output_item.{what}", output_index=len(self._items), item=item)

    def _in_open(self, name: str, **fields: Any) -> bytes:
        assert self._open is not None
        index = "summary_index" if self._open.kind == "reasoning" else "content_index"
        place = {"item_id": self._open.own_id, "output_index": len(self._items), index: 0}
        return self._event(name, **place, **fields)

    def _whole(self, name: str, status: str, **fields: Any) -> bytes:
        document = answer_form.response(
            self._form,
            call_id=self._call_id,
            model=self._model,
            created_s=self._created_s,
            status=status,
            **fields,
        )
        return self._event(name, response=document)

    def _event(self, name: str, **fields: Any) -> bytes:
        number = self._sequence
        self._sequence += 1
        return event({"type": name, "sequence_number": number, **fields}, name)
