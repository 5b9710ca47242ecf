"""How an attempt's payload is laid out: frames while it runs, columns and zstd when it rests.

A *frame* is ``length:u32 crc32:u32 body``, little-endian, the body one msgpack value. At rest the token
arrays of all calls are joined into two columns (ids; logprobs), each transposed into byte planes: the
high bytes of neighbours are alike, so that zstd packs them, which it can't while they are interleaved.
Everything is kept bit for bit. Pure functions: no I/O here.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import msgspec
import numpy as np
import zstandard

from rollserve.records.call import Call
from rollserve.store.payload import AttemptPayload, EndState

MAGIC = b"RSP1"
LEVEL = 3
_HEAD_BYTES = 8
_WIDTH = 4


class CallFrame(msgspec.Struct, frozen=True, array_like=True, tag=1):
    call: Call


class LogFrame(msgspec.Struct, frozen=True, array_like=True, tag=2):
    at: float
    line: str


class ArtifactFrame(msgspec.Struct, frozen=True, array_like=True, tag=3):
    path: str
    data: bytes


class RewardsFrame(msgspec.Struct, frozen=True, array_like=True, tag=4):
    rewards: dict[str, float]


class EndFrame(msgspec.Struct, frozen=True, array_like=True, tag=5):
    end: EndState


Frame = CallFrame | LogFrame | ArtifactFrame | RewardsFrame | EndFrame


class _Rest(msgspec.Struct, array_like=True):
    """What is compressed. ``sizes`` are, per call, the bytes of its prompt ids, sampled ids and
    logprobs, which lie in the planes in that order."""

    calls: list[Call]
    sizes: list[tuple[int, int, int]]
    id_planes: bytes
    logprob_planes: bytes
    log: list[tuple[float, str]]
    artifacts: dict[str, bytes]
    call_rewards: dict[str, float]
    end: EndState | None = None


class Damaged(Exception):
    """Bytes that are no payload, or not whole. The payload store says which."""


def encode_frame(frame: Frame) -> bytes:
    body = msgspec.msgpack.encode(frame)
    head = len(body).to_bytes(4, "little") + zlib.crc32(body).to_bytes(4, "little")
    return head + body


def read_frames(data: bytes) -> Iterator[tuple[Frame, int]]:
    """The whole frames from the start, each with the place where it ends; stops before the first that
    is torn."""
    decode = msgspec.msgpack.Decoder(Frame).decode
    view = memoryview(data)
    at = 0
    while at + _HEAD_BYTES <= len(view):
        length = int.from_bytes(view[at : at + 4], "little")
        crc = int.from_bytes(view[at + 4 : at + _HEAD_BYTES], "little")
        body = view[at + _HEAD_BYTES : at + _HEAD_BYTES + length]
        if len(body) < length or zlib.crc32(body) != crc:
            return
        try:
            frame = decode(body)
        except msgspec.DecodeError:
            return
        at += _HEAD_BYTES + length
        yield frame, at


def gather(data: bytes) -> tuple[AttemptPayload, int]:
    """The payload that a live segment's bytes hold, and how many of them are whole frames."""
    payload = AttemptPayload()
    whole = 0
    for frame, end in read_frames(data):
        whole = end
        match frame:
            case CallFrame():
                payload.calls.append(frame.call)
            case LogFrame():
                payload.log.append((frame.at, frame.line))
            case ArtifactFrame():
                payload.artifacts[frame.path] = frame.data
            case RewardsFrame():
                payload.call_rewards.update(frame.rewards)
            case EndFrame():
                payload.end = frame.end
    return payload, whole


def pack(payload: AttemptPayload) -> bytes:
    """The file that rests."""
    ids: list[bytes] = []
    logprobs: list[bytes] = []
    rest = _Rest([], [], b"", b"", payload.log, payload.artifacts, payload.call_rewards, payload.end)
    for call in payload.calls:
        arrays = (call.prompt_ids, call.sampled_ids, call.logprobs)
        ids += arrays[:2]
        logprobs.append(arrays[2])
        rest.sizes.append((len(arrays[0]), len(arrays[1]), len(arrays[2])))
        rest.calls.append(msgspec.structs.replace(call, prompt_ids=b"", sampled_ids=b"", logprobs=b""))
    rest.id_planes = _to_planes(b"".join(ids))
    rest.logprob_planes = _to_planes(b"".join(logprobs))
    compressor = zstandard.ZstdCompressor(level=LEVEL, write_checksum=True, write_content_size=True)
    return MAGIC + compressor.compress(msgspec.msgpack.encode(rest))


def unpack(data: bytes) -> AttemptPayload:
    """Raises ``Damaged``."""
    if not data.startswith(MAGIC):
        raise Damaged("it does not begin like a payload")
    try:
        plain = zstandard.ZstdDecompressor().decompress(memoryview(data)[len(MAGIC) :])
        rest = msgspec.msgpack.decode(plain, type=_Rest)
    except (zstandard.ZstdError, msgspec.DecodeError) as error:
        raise Damaged(str(error)) from error
    return AttemptPayload(
        calls=list(_with_arrays(rest)),
        log=rest.log,
        artifacts=rest.artifacts,
        call_rewards=rest.call_rewards,
        end=rest.end,
    )


def _with_arrays(rest: _Rest) -> Iterator[Call]:
    ids = _from_planes(rest.id_planes)
    logprobs = _from_planes(rest.logprob_planes)
    id_at = logprob_at = 0
    for call, (prompt, sampled, scored) in zip(rest.calls, rest.sizes, strict=True):
        split = id_at + prompt
        yield msgspec.structs.replace(
            call,
            prompt_ids=ids[id_at:split],
            sampled_ids=ids[split : split + sampled],
            logprobs=logprobs[logprob_at : logprob_at + scored],
        )
        id_at = split + sampled
        logprob_at += scored


def _to_planes(column: bytes) -> bytes:
    """All first bytes, then all second bytes, …; what does not fill a word follows as it is."""
    whole = len(column) - len(column) % _WIDTH
    words = np.frombuffer(column, dtype=np.uint8, count=whole).reshape(-1, _WIDTH)
    return words.T.tobytes() + column[whole:]


def _from_planes(planes: bytes) -> bytes:
    whole = len(planes) - len(planes) % _WIDTH
    words = np.frombuffer(planes, dtype=np.uint8, count=whole).reshape(_WIDTH, -1)
    return words.T.tobytes() + planes[whole:]
