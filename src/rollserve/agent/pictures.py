"""Images for the model: those of a task, and what a tool attached to its result."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from rollserve.agent.base import ModelClient
from rollserve.errors import AgentFailure, InvalidInput
from rollserve.records.call import Message
from rollserve.records.image import Image
from rollserve.records.task import Task, TaskPicture
from rollserve.sandbox.tools import ToolResult


async def instruction_message(task: Task, model: ModelClient) -> Message:
    """The task as the user's first message, its pictures where they stand. Raises ``AgentFailure`` where it
    has some and the model takes none, ``InvalidInput`` for what the gateway does not take."""
    end = len(task.instruction)
    placed = sorted(task.pictures, key=lambda picture: _place(picture, end))
    images: list[Image] = []
    for picture in placed:
        image = await model.show(picture.url)
        if image is None:
            message = "the task has pictures, and a backend of the model takes no images"
            raise AgentFailure(message, operation="agent.pictures")
        images.append(replace(image, at=_place(picture, end), detail=picture.detail))
    return Message(role="user", content=task.instruction, images=tuple(images))


def _place(picture: TaskPicture, end: int) -> int:
    return end if picture.at is None else min(picture.at, end)


async def shown(
    result: ToolResult, model: ModelClient, *, most: int, log: Callable[[str], None]
) -> tuple[Image, ...]:
    """The images that a tool attached, at most so many, as the model is shown them; none where it takes none.
    One that the gateway does not take is a line in the log: the result's text names it all the same."""
    images: list[Image] = []
    for each in result.attachments:
        if len(images) >= most or not each.media_type.startswith("image/"):
            continue
        try:
            image = await model.show(f"data:{each.media_type};base64,{each.base64}")
        except InvalidInput as error:
            log(f"an image of a tool is not shown: {error}")
            continue
        if image is None:
            break
        images.append(image)
    return tuple(images)
