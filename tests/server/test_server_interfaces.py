"""How a policy's backends are spoken to is the policy's to say, and one way for all of them."""

from __future__ import annotations

import pytest

from rollserve.errors import InvalidInput
from rollserve.records.control import TaskSource
from rollserve.records.policy import BackendKind, BackendSpec, Interface, Modality, PolicySpec
from rollserve.records.run import RunSpec
from rollserve.rollouts.templates import is_probed
from rollserve.testing.server_room import Room, a_task
from rollserve.wire import GroupBody

TEXT = PolicySpec(name="pol", model="m", interface="text")


async def test_a_policy_of_text_needs_no_tokenizer_and_no_probe(room: Room) -> None:
    policy = await room.core.policies.create(TEXT)
    assert policy.spec.tokenizer is None
    assert is_probed(policy)
    backend = await room.core.policies.register("pol", BackendSpec(url="http://b", kind=BackendKind.TEXT))
    assert backend.spec.kind is BackendKind.TEXT


@pytest.mark.parametrize("interface", ["tokens", "chat"])
async def test_where_there_are_ids_there_is_a_tokenizer(interface: Interface, room: Room) -> None:
    spec = TEXT.model_copy(update={"interface": interface})
    with pytest.raises(InvalidInput, match="needs a tokenizer") as refused:
        await room.core.policies.create(spec)
    assert refused.value.field == "tokenizer"


async def test_an_engine_that_renders_needs_no_renderer_of_ours(room: Room) -> None:
    spec = TEXT.model_copy(update={"interface": "chat", "tokenizer": "tiny"})
    assert is_probed(await room.core.policies.create(spec))


@pytest.mark.parametrize(
    ("interface", "kind", "accepts", "why"),
    [
        ("tokens", BackendKind.VLLM, ["text", "image"], "images can't be sent so"),
        ("tokens", BackendKind.SGLANG, ["image", "text"], "images can't be sent so"),
        ("chat", BackendKind.CHAT, ["image"], "text at least"),
    ],
)
async def test_what_can_not_take_images_is_not_said_to(
    interface: Interface, kind: BackendKind, accepts: list[Modality], why: str, room: Room
) -> None:
    await room.core.policies.create(TEXT.model_copy(update={"interface": interface, "tokenizer": "tiny"}))
    with pytest.raises(InvalidInput, match=why) as refused:
        await room.core.policies.register("pol", BackendSpec(url="http://b", kind=kind, accepts=accepts))
    assert refused.value.field == "accepts"
    assert (await room.core.policies.backends("pol")).items == []


async def test_a_backend_that_takes_images_says_so(room: Room) -> None:
    await room.core.policies.create(TEXT)
    spec = BackendSpec(url="http://b", kind=BackendKind.TEXT, accepts=["text", "image"])
    assert (await room.core.policies.register("pol", spec)).spec.accepts == ["text", "image"]
    (kept,) = (await room.core.policies.backends("pol")).items
    assert kept.spec.accepts == ["text", "image"]


@pytest.mark.parametrize(
    ("interface", "kind"),
    [
        ("tokens", BackendKind.CHAT),
        ("tokens", BackendKind.TEXT),
        ("chat", BackendKind.VLLM),
        ("chat", BackendKind.TEXT),
        ("text", BackendKind.OPENAI),
        ("text", BackendKind.CHAT),
    ],
)
async def test_a_policy_mixes_no_interfaces(interface: Interface, kind: BackendKind, room: Room) -> None:
    spec = TEXT.model_copy(update={"interface": interface, "tokenizer": "tiny"})
    await room.core.policies.create(spec)
    with pytest.raises(InvalidInput, match="can't mix them") as refused:
        await room.core.policies.register("pol", BackendSpec(url="http://b", kind=kind))
    assert refused.value.field == "kind"
    assert (await room.core.policies.backends("pol")).items == []


PICTURED = a_task(pictures=[{"url": "https://pictures.invalid/a.png"}])


async def submit_pictures(room: Room, run_id: str | None = None) -> None:
    """Beside a task that has none: all are taken, or none."""
    run_id = run_id or (await room.core.runs.open(RunSpec(policy="pol"))).id
    await room.core.groups.submit(run_id, [GroupBody(task=a_task()), GroupBody(task=PICTURED)])


async def test_a_policy_that_is_sent_ids_is_given_no_task_with_pictures(room: Room) -> None:
    await room.core.policies.create(TEXT.model_copy(update={"interface": "tokens", "tokenizer": "tiny"}))
    run = await room.core.runs.open(RunSpec(policy="pol"))
    with pytest.raises(InvalidInput, match="policy 'pol' takes no images: it is sent token ids") as refused:
        await submit_pictures(room, run.id)
    assert refused.value.field == "groups.1.task.pictures"
    assert (await room.store.list_groups(run.id)).items == []
    spec = RunSpec(policy="pol", source=TaskSource(tasks=(PICTURED,)))
    with pytest.raises(InvalidInput, match="takes no images") as inline:
        await room.core.runs.open(spec)
    assert inline.value.field == "source.tasks.0.pictures"


async def test_all_backends_of_a_policy_take_a_tasks_pictures(room: Room) -> None:
    await room.core.policies.create(TEXT)
    await submit_pictures(room)  # none is there yet
    sees = BackendSpec(url="http://a", kind=BackendKind.TEXT, accepts=["text", "image"])
    await room.core.policies.register("pol", sees)
    await submit_pictures(room)
    await room.core.policies.register("pol", BackendSpec(url="http://b", kind=BackendKind.TEXT))
    with pytest.raises(InvalidInput, match="has a backend that does not accept them"):
        await submit_pictures(room)
