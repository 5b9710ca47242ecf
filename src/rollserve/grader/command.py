"""``command``: run a command in a fresh sandbox; its exit code, or a file it writes, is the reward."""

from __future__ import annotations

import shlex
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from rollserve.errors import GraderFailure, SandboxError, TooLarge
from rollserve.grader.base import Grade, Grading, check_grade
from rollserve.grader.reward_file import read_grade
from rollserve.sandbox.base import WORKDIR, ExecResult, Sandbox

OPERATION = "grader command"
REWARD_FILE_BYTES = 1 << 20
OUTPUT_CHARS = 2000
PREPARE_S = 30.0
NOT_RUN = {126: "can't be executed", 127: "was not found"}


class CommandOptions(BaseModel):
    """``carry`` are the paths of the run sandbox it gets to see. Without ``reward_file`` exit code 0
    is 1.0 and any other 0.0; with it, the file's number (or JSON ``{"reward": …}``) is the reward,
    whatever the exit code."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    command: Annotated[str, Field(min_length=1, max_length=1_000_000)]
    carry: Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=100)] = [WORKDIR]
    timeout_s: Annotated[float, Field(gt=0, le=86400)] = 120.0
    reward_file: Annotated[str | None, Field(min_length=1, max_length=4096)] = None


class CommandGrader:
    """A time-out, a command that could not run, and a reward that can't be read are failures: they
    say nothing about the agent's work."""

    def __init__(self, options: CommandOptions) -> None:
        self._options = options
        self.carry: tuple[str, ...] | None = tuple(options.carry)

    async def grade(self, grading: Grading) -> Grade:
        if grading.sandbox is None:
            raise GraderFailure("there is no sandbox to run the command in", operation=OPERATION)
        if self._options.reward_file is not None:
            await self._clear(grading.sandbox, self._options.reward_file)
        result = await grading.sandbox.exec(self._options.command, timeout_s=self._options.timeout_s)
        grading.log(result.output[-OUTPUT_CHARS:])
        self._check_ran(result)
        if self._options.reward_file is None:
            return Grade(reward=0.0 if result.exit_code else 1.0, detail={"exit_code": result.exit_code})
        data = await self._read(grading.sandbox, self._options.reward_file)
        return check_grade(read_grade(data, operation=OPERATION), grading.call_ids, operation=OPERATION)

    async def _clear(self, sandbox: Sandbox, path: str) -> None:
        """What lies there was carried over: the agent wrote it, and must not grade itself."""
        result = await sandbox.exec(f"rm -rf -- {shlex.quote(path)}", timeout_s=PREPARE_S)
        if result.exit_code != 0:
            raise GraderFailure(f"{path} can't be cleared: {result.output[-500:]}", operation=OPERATION)

    def _check_ran(self, result: ExecResult) -> None:
        if result.timed_out or result.exit_code is None:
            message = f"the command ran longer than {self._options.timeout_s:g} s"
            raise GraderFailure(message, operation=OPERATION)
        if (why := NOT_RUN.get(result.exit_code)) is not None:
            message = f"the command {why}: {result.output[-500:].strip()}"
            raise GraderFailure(message, operation=OPERATION)

    async def _read(self, sandbox: Sandbox, path: str) -> bytes:
        try:
            return await sandbox.read_file(path, limit_bytes=REWARD_FILE_BYTES)
        except TooLarge as error:
            raise GraderFailure(f"{path} is too large: {error.message}", operation=OPERATION) from error
        except SandboxError as error:
            await sandbox.exec(":", timeout_s=PREPARE_S)  # gone altogether is another failure
            raise GraderFailure(f"no reward in {path}: {error.message}", operation=OPERATION) from error
