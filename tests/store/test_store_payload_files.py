"""Payload files: nothing lost, nothing changed, nothing outside the root, little space."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollserve.errors import Conflict, InfrastructureFailure, InvalidInput, NotFound
from rollserve.records.call import (
    Break,
    Call,
    Message,
    SamplingParams,
    ToolCall,
    VersionSpan,
    pack_floats,
    pack_ids,
    unpack_floats,
)
from rollserve.records.image import Image, PlacedImage
from rollserve.store.packing import Damaged, LogFrame, encode_frame, gather, pack, unpack
from rollserve.store.payload import AttemptPayload
from rollserve.store.payload_files import FilePayloadStore

SEEN = Image(digest="d1", at=2, media_type="image/png", size_bytes=9, detail="low")
FAR = Image(digest="d2", at=2, url="https://pictures.invalid/ü.png")


def make_call(name: str = "c1", parent: str | None = None, **changes: Any) -> Call:
    values: dict[str, Any] = {
        "id": name,
        "parent": parent,
        "messages": (Message(role="user", content="grüße \x00 ok", images=(SEEN, FAR)),),
        "tools": ({"type": "function", "function": {"name": "shell"}},),
        "prompt_ids": pack_ids([1, 2, 150_000]),
        "sampled_ids": pack_ids([7, 8]),
        "logprobs": pack_floats([-0.25, -1e-7]),
        "versions": (VersionSpan(0, 2, 3, 4, inferred=True),),
        "reply": Message(
            role="assistant", tool_calls=(ToolCall(id="t", name="shell", arguments="{", error="broken"),)
        ),
        "finish_reason": "tool_calls",
        "sampling": SamplingParams(stop_token_ids=(1, 2)),
        "asked": {"temperature": 0.3, "stop": ["x"]},
        "broke": Break(cause="template", at_message=2),
        "extras": {"experts": b"\x00\x01\x02"},
        "images": (PlacedImage(image=SEEN, start=1, end=3, exact=True),),
        "first_token_at": 1.5,
    }
    return Call(**{**values, **changes})


@pytest.fixture
def store(tmp_path: Path) -> FilePayloadStore:
    return FilePayloadStore(tmp_path / "payloads", clock=lambda: 5.0)


def files_under(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*.*"))


def start_writing(root: Path) -> subprocess.Popen[bytes]:
    """Another process that appends to the segment of attempt ``a`` of run ``r``, and says when it has
    begun."""
    program = (
        "import sys; from pathlib import Path\n"
        "from rollserve.store.payload_files import FilePayloadStore\n"
        "segment = FilePayloadStore(Path(sys.argv[1])).open_segment('r', 'a')\n"
        "for n in range(1_000_000):\n"
        "    segment.append_log(str(n) * 50)\n"
        "    if n == 100: print('going', flush=True)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        [sys.executable, "-c", program, str(root)], stdout=subprocess.PIPE, env=environment
    )


class TestSegments:
    async def test_from_live_to_sealed(self, store: FilePayloadStore, tmp_path: Path) -> None:
        segment = store.open_segment("run_1", "att_1")
        assert await store.read_live("run_1", "att_1") == AttemptPayload()
        calls = [make_call("c1"), make_call("c2", "c1", tools=None)]
        segment.append_call(calls[0])
        segment.append_log("one")
        segment.append_artifact("out/a.txt", b"\xff\x00")
        wanted = AttemptPayload(calls=calls[:1], log=[(5.0, "one")], artifacts={"out/a.txt": b"\xff\x00"})
        assert await store.read_live("run_1", "att_1") == wanted
        segment.append_call(calls[1])
        segment.append_call_rewards({"c1": 0.5})
        segment.append_call_rewards({"c2": 1.0})
        sealed = await segment.seal()
        wanted.calls, wanted.call_rewards = calls, {"c1": 0.5, "c2": 1.0}
        assert sealed.ref == "run_1/att_1.rsp"
        assert await store.read(sealed.ref) == wanted
        assert await store.read_live("run_1", "att_1") == wanted
        files = [path.name for path in (tmp_path / "payloads" / "run_1").iterdir()]
        assert files == ["att_1.rsp"]
        assert (tmp_path / "payloads" / "run_1" / "att_1.rsp").stat().st_size == sealed.size_bytes

    async def test_closed_segment_refuses(self, store: FilePayloadStore) -> None:
        sealed, dropped = store.open_segment("r", "a"), store.open_segment("r", "b")
        await sealed.seal()
        dropped.discard()
        dropped.discard()
        for segment in (sealed, dropped):
            with pytest.raises(Conflict):
                segment.append_log("late")
            with pytest.raises(Conflict):
                await segment.seal()
        assert await store.read_live("r", "b") == AttemptPayload()

    def test_one_segment_per_attempt(self, store: FilePayloadStore) -> None:
        segment = store.open_segment("r", "a")
        with pytest.raises(Conflict):
            store.open_segment("r", "a")
        segment.discard()

    async def test_full_disk_leaves_whole_frames(
        self, store: FilePayloadStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        segment = store.open_segment("r", "a")
        segment.append_log("first")
        real = os.write
        written: list[int] = []

        def half(fd: int, data: memoryview) -> int:
            if written:
                raise OSError(28, "No space left on device")
            written.append(real(fd, data[: len(data) // 2]))
            return written[0]

        with monkeypatch.context() as patch, pytest.raises(InfrastructureFailure) as caught:
            patch.setattr("rollserve.store.payload_files.os.write", half)
            segment.append_log("second")
        assert caught.value.operation == "payload.append"
        segment.append_log("third")
        sealed = await segment.seal()
        assert [line for _, line in (await store.read(sealed.ref)).log] == ["first", "third"]

    async def test_seal_never_drops_silently(self, store: FilePayloadStore, tmp_path: Path) -> None:
        segment = store.open_segment("r", "a")
        segment.append_log("first")
        segment.append_log("second")
        os.truncate(tmp_path / "payloads" / "r" / "a.live", 30)
        with pytest.raises(InfrastructureFailure, match="lost"):
            await segment.seal()
        segment.discard()

    async def test_read_while_another_process_writes(self, store: FilePayloadStore, tmp_path: Path) -> None:
        with start_writing(tmp_path / "payloads") as process:
            assert process.stdout is not None
            await asyncio.to_thread(process.stdout.readline)
            sizes = []
            for _ in range(5):
                log = (await store.read_live("r", "a")).log
                assert [line for _, line in log] == [str(n) * 50 for n in range(len(log))]
                sizes.append(len(log))
            os.kill(process.pid, signal.SIGKILL)
        assert sizes == sorted(sizes)
        assert sizes[0] > 100
        left = (await store.read_live("r", "a")).log
        assert [line for _, line in left] == [str(n) * 50 for n in range(len(left))]
        assert len(left) >= sizes[-1]


BAD_IDS = ["", ".", "..", "../x", "a/b", "/etc", "a\x00", "a\n", "-a", "é", "a" * 129]
BAD_REFS = ["", "r/a", "r/../a.rsp", "../r/a.rsp", "/r/a.rsp", "r/a.live", "r/a.rsp\n"]


class TestAddresses:
    @pytest.mark.parametrize(
        "bad", ["", ".", "..", "../x", "a/b", "/etc", "a\x00", "a\n", "-a", "é", "a" * 129]
    )
    def test_ids_are_names(self, store: FilePayloadStore, bad: str) -> None:
        for run_id, attempt_id, field in ((bad, "a", "run_id"), ("r", bad, "attempt_id")):
            with pytest.raises(InvalidInput) as caught:
                store.open_segment(run_id, attempt_id)
            assert caught.value.field == field

    @pytest.mark.parametrize(
        "ref", ["", "r/a", "r/../a.rsp", "../r/a.rsp", "/r/a.rsp", "r/a.live", "r/a.rsp\n"]
    )
    async def test_refs_stay_inside(self, store: FilePayloadStore, ref: str) -> None:
        with pytest.raises(NotFound):
            await store.read(ref)
        with pytest.raises(NotFound):
            await store.delete([ref])

    async def test_delete(self, store: FilePayloadStore, tmp_path: Path) -> None:
        refs = [(await store.open_segment("r", name).seal()).ref for name in ("a", "b")]
        await store.delete(refs[:1])
        with pytest.raises(NotFound, match="pruned"):
            await store.read(refs[0])
        assert await store.read(refs[1]) == AttemptPayload()
        await store.delete(refs)
        assert list((tmp_path / "payloads").iterdir()) == []

    async def test_sweep(self, store: FilePayloadStore, tmp_path: Path) -> None:
        assert await store.sweep(set()) == 0
        kept = (await store.open_segment("r", "kept").seal()).ref
        await store.open_segment("r", "orphan").seal()
        dead = store.open_segment("gone", "dead")
        dead.append_log("x")
        (tmp_path / "payloads" / "r" / "half.tmp").write_bytes(b"x")
        (tmp_path / "payloads" / "r" / "notes.txt").write_text("not ours")
        assert await store.sweep({kept}) == 3
        assert files_under(tmp_path / "payloads") == ["r/kept.rsp", "r/notes.txt"]
        dead.discard()

    async def test_salvage(self, store: FilePayloadStore, tmp_path: Path) -> None:
        assert await store.salvage("r", "never") is None
        dead = store.open_segment("r", "dead")
        dead.append_log("whole")
        live = tmp_path / "payloads" / "r" / "dead.live"
        with live.open("ab") as file:
            file.write(b"\x07torn")
        kept = await store.salvage("r", "dead")
        assert kept is not None
        assert [line for _, line in (await store.read(kept.ref)).log] == ["whole"]
        assert files_under(tmp_path / "payloads") == ["r/dead.rsp"]
        assert await store.salvage("r", "dead") == kept
        dead.append_log("by a worker that was not quite dead")
        assert await store.salvage("r", "dead") == kept
        dead.discard()

    async def test_what_is_left_can_be_salvaged(self, store: FilePayloadStore, tmp_path: Path) -> None:
        left, empty = store.open_segment("r", "left"), store.open_segment("r", "empty")
        left.append_log("whole")
        for segment in (left, empty):
            segment.leave()
            segment.leave()
            with pytest.raises(Conflict):
                segment.append_log("late")
        kept = await store.salvage("r", "left")
        assert kept is not None
        assert [line for _, line in (await store.read(kept.ref)).log] == ["whole"]
        assert await store.salvage("r", "empty") is None
        assert files_under(tmp_path / "payloads") == ["r/left.rsp"]

    async def test_damaged_file(self, store: FilePayloadStore, tmp_path: Path) -> None:
        segment = store.open_segment("r", "a")
        segment.append_call(make_call())
        ref = (await segment.seal()).ref
        path = tmp_path / "payloads" / ref
        whole = path.read_bytes()
        for damaged in (b"", whole[:20], b"XXXX" + whole[4:], whole[:-3] + b"abc"):
            path.write_bytes(damaged)
            with pytest.raises(InfrastructureFailure, match="damaged"):
                await store.read(ref)


ARRAYS = st.binary(max_size=40)
CALLS = st.builds(
    lambda prompt, sampled, logprobs: make_call(prompt_ids=prompt, sampled_ids=sampled, logprobs=logprobs),
    ARRAYS,
    ARRAYS,
    ARRAYS,
)


class TestPacking:
    @given(st.lists(CALLS, max_size=5), st.lists(st.tuples(st.floats(allow_nan=False), st.text())))
    def test_nothing_changes(self, calls: list[Call], log: list[tuple[float, str]]) -> None:
        payload = AttemptPayload(calls=calls, log=log, artifacts={"a": b"x"}, call_rewards={"c": -0.5})
        assert unpack(pack(payload)) == payload

    def test_logprobs_are_bit_exact(self) -> None:
        odd = np.array([-0.0, np.nan, -np.inf, 1e-45, -np.pi], dtype="<f4")
        (call,) = unpack(pack(AttemptPayload(calls=[make_call(logprobs=odd.tobytes())]))).calls
        assert unpack_floats(call.logprobs).tobytes() == odd.tobytes()

    def test_a_torn_frame_is_ignored_wherever_it_tears(self) -> None:
        frames = [encode_frame(LogFrame(1.0, text)) for text in ("one", "two", "three")]
        data = b"".join(frames)
        ends = np.cumsum([len(frame) for frame in frames])
        for cut in range(len(data) + 1):
            payload, whole = gather(data[:cut])
            assert len(payload.log) == int((ends <= cut).sum())
            assert whole == max([0, *(int(end) for end in ends if end <= cut)])

    def test_a_changed_byte_ends_the_reading(self) -> None:
        first, second = (encode_frame(LogFrame(1.0, text)) for text in ("one", "two"))
        for place in range(len(second)):
            changed = bytearray(second)
            changed[place] ^= 0x41
            assert len(gather(first + bytes(changed) + first)[0].log) == 1

    def test_bytes_that_are_no_payload(self) -> None:
        with pytest.raises(Damaged):
            unpack(b"PK\x03\x04")

    def test_a_long_trajectory_is_small(self) -> None:
        """32k tokens over 8 turns, 60 % sampled, with four letters of text a token."""
        random = np.random.default_rng(1)
        words = ["".join(random.choice(list("etaoinshrdlu"), 4)) for _ in range(20_000)]
        calls = []
        for turn in range(8):
            ids = np.minimum(random.zipf(1.2, 4096), 150_000)
            text = " ".join(words[token % 20_000] for token in ids)
            calls.append(
                make_call(
                    f"c{turn}",
                    prompt_ids=pack_ids(ids[:1638].astype("<i4")),
                    sampled_ids=pack_ids(ids[1638:].astype("<i4")),
                    logprobs=pack_floats((-random.exponential(1.0, 4096 - 1638)).astype("<f4")),
                    messages=(Message(role="user", content=text[:8000]),),
                    reply=Message(role="assistant", content=text[8000:]),
                )
            )
        payload = AttemptPayload(calls=calls)
        packed = pack(payload)
        assert unpack(packed) == payload
        assert len(packed) / (8 * 4096) < 8
