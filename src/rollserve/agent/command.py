"""The agent ``command``: any command-line program as the agent, unmodified, inside the sandbox.

The program is run to its end by a shell in the sandbox and calls the model over HTTP, on an address of
the sandbox's own loopback that serves the attempt's session and nothing else. The attempt's budgets hold:
when one runs out, the program is killed with all it started, and what it did is graded and marked.
"""

from __future__ import annotations

import json
import re
import shlex
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from rollserve.agent.base import AgentResult, Episode, last_words
from rollserve.errors import AgentFailure, ProgramMissing, SandboxError, TooLarge
from rollserve.records.task import Path, Value, Variable
from rollserve.sandbox.base import Sandbox

VALUES = (
    *("base_url", "session_url", "plain_url", "api_key", "model"),
    *("instruction", "instruction_file", "home", "context_tokens", "max_tokens"),
)
"""What templates may name in braces; any other braces stand for themselves."""

ARGUMENT_BYTES = 120_000
"""Linux takes no single argument over 128 KiB."""

TAIL_BYTES = 2000
SETUP_S = 60.0
ANSWER_BYTES = 1 << 20

_NAMED = re.compile("{(" + "|".join(VALUES) + ")}")
_QUOTED_FILES = (".json", ".toml")

LogBytes = Annotated[int, Field(ge=0, le=4 << 20)]
Tokens = Annotated[int, Field(ge=1, le=10_000_000)]
ModelName = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/@-]*$")]


class CommandOptions(BaseModel):
    """``command`` is read by the sandbox's shell, in ``workdir`` (of the sandbox's own working directory),
    with ``env``; ``files`` are written before (``~/`` is the home folder). All three are templates:
    ``{base_url}``, ``{session_url}`` (without ``/v1``), ``{plain_url}`` (without the session),
    ``{api_key}``, ``{model}``, ``{instruction}`` and the rest of ``VALUES``. The answer is the model's
    last text, or the content of ``answer_file``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    command: Annotated[str, Field(min_length=1, max_length=100_000, pattern=r"^[^\x00]+$")]
    env: Annotated[dict[Variable, Value], Field(max_length=200)] = {}
    files: Annotated[dict[Path, str], Field(max_length=200)] = {}
    workdir: Path = "."
    needs: Annotated[tuple[str, ...], Field(max_length=100)] = ()
    answer_file: Path | None = None
    model: ModelName = "policy"
    context_tokens: Tokens = 131_072
    max_tokens: Tokens = 4096
    log_bytes: LogBytes = 262_144


@dataclass(frozen=True, kw_only=True)
class Program:
    """What is run. ``path`` are folders inside, put before the sandbox's own ``PATH``; ``needs`` are
    programs that must be found, ``remedy`` says what to do where they are not; ``ends`` says what exit
    codes mean; the end of ``report`` goes to the log."""

    command: str
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, str] = field(default_factory=dict)
    path: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    remedy: str = "docs/harnesses.md says how a sandbox comes by its programs"
    workdir: str = "."
    answer_file: str | None = None
    report: str | None = None
    ends: Mapping[int, str] = field(default_factory=dict)
    log_bytes: int = 262_144


def program_of(options: CommandOptions) -> Program:
    return Program(
        command=options.command,
        env=options.env,
        files=options.files,
        values=values_of(options.model, options.context_tokens, options.max_tokens),
        needs=options.needs,
        workdir=options.workdir,
        answer_file=options.answer_file,
        log_bytes=options.log_bytes,
    )


def values_of(model: str, context_tokens: int, max_tokens: int) -> dict[str, str]:
    return {"model": model, "context_tokens": str(context_tokens), "max_tokens": str(max_tokens)}


class CommandAgent:
    def __init__(self, program: Program) -> None:
        self._program = program

    async def run(self, episode: Episode) -> AgentResult:
        sandbox, program = episode.sandbox, self._program
        if sandbox is None:
            raise SandboxError("a command needs a sandbox to run in", operation="agent.command")
        home = await self._look(sandbox)
        values = await self._values(episode, home)
        for path, text in self._files(values).items():
            await sandbox.write_file(path.replace("~", home, 1) if path.startswith("~/") else path, text)
        output = _Output(episode.log, program.log_bytes, secret=episode.api_key)
        try:
            code = await sandbox.run(
                self._script(values), timeout_s=episode.task.limits.wall_s, on_output=output.feed
            )
        finally:
            output.finish()
        ended = _ended(code, program.ends)
        episode.log(f"the command ended: {ended}")
        await self._report(episode, sandbox, home)
        self._check(episode, code, ended, output)
        detail = {"exit_code": code, "ended": ended, "output_bytes": output.size, "output_end": output.end}
        return AgentResult(answer=await self._answer(episode, sandbox, home), detail=detail)

    # -- before
    async def _look(self, sandbox: Sandbox) -> str:
        """The home folder. Raises ``ProgramMissing``."""
        names = " ".join(shlex.quote(name) for name in self._program.needs)
        looks = f'for p in {names}; do command -v "$p" >/dev/null || echo "$p"; done' if names else ":"
        script = f'( {self._path()}mkdir -p "$HOME"; printf "%s\\n" "$HOME"; {looks} )'
        home, *missing = (await sandbox.exec(script, timeout_s=SETUP_S)).output.splitlines() or ["/tmp"]
        if missing:
            raise ProgramMissing(
                f"not found in the sandbox: {', '.join(missing)}",
                operation="agent.command",
                hint=self._program.remedy,
            )
        return home

    async def _values(self, episode: Episode, home: str) -> dict[str, str]:
        base_url = await episode.reach()
        session_url = base_url.removesuffix("/v1")
        instruction = episode.task.instruction
        if "{instruction}" in self._program.command and len(instruction.encode()) > ARGUMENT_BYTES:
            raise AgentFailure(
                f"the instruction has more than {ARGUMENT_BYTES} bytes, which no command line takes",
                operation="agent.command",
                hint="{instruction_file} names a file that holds it",
            )
        return {
            **self._program.values,
            "base_url": base_url,
            "session_url": session_url,
            "plain_url": session_url.partition("/s/")[0],
            "api_key": episode.api_key,
            "instruction": instruction,
            "instruction_file": f"{home}/instruction.txt",
            "home": home,
        }

    def _files(self, values: Mapping[str, str]) -> dict[str, bytes]:
        """In JSON and TOML, values are written as those write them inside a string."""
        made = {values["instruction_file"]: values["instruction"].encode("utf-8", "replace")}
        for path, text in self._program.files.items():
            escape = _escape if path.endswith(_QUOTED_FILES) else str
            made[path] = filled(text, values, escape).encode("utf-8", "replace")
        return made

    def _script(self, values: Mapping[str, str]) -> str:
        """In the command itself, values are quoted for the shell."""
        exports = [
            f"export {name}={shlex.quote(filled(text, values))}" for name, text in self._program.env.items()
        ]
        enter = f"{self._path()}cd {shlex.quote(self._program.workdir)} || exit 126"
        return "\n".join([*exports, enter, filled(self._program.command, values, shlex.quote)])

    def _path(self) -> str:
        if not self._program.path:
            return ""
        return f'PATH={shlex.quote(":".join(self._program.path))}:"$PATH"; export PATH; '

    # -- after
    def _check(self, episode: Episode, code: int | None, ended: str, output: _Output) -> None:
        """Raises ``AgentFailure``; whether something else was the cause is for the attempt to say, which
        asks the session: so also when the program kept it to itself."""
        session = episode.session
        if code != 0:
            raise AgentFailure(f"{ended}: {output.end[-500:].strip()}", operation="agent.command")
        if session is not None and session.trouble is not None:
            raise AgentFailure("ended well, though its last call failed", operation="agent.command")
        if session is not None and not session.call_ids:
            raise AgentFailure(
                f"ended without one model call: {output.end[-500:].strip()}", operation="agent.command"
            )

    async def _report(self, episode: Episode, sandbox: Sandbox, home: str) -> None:
        if self._program.report is None:
            return
        path = shlex.quote(self._program.report.replace("~", home, 1))
        told = await sandbox.exec(f"tail -c {TAIL_BYTES * 2} {path}", timeout_s=SETUP_S)
        episode.log(f"{self._program.report}: {told.output}")

    async def _answer(self, episode: Episode, sandbox: Sandbox, home: str) -> str | None:
        if (path := self._program.answer_file) is None:
            return last_words(episode.session.conversation()) if episode.session is not None else None
        if path.startswith("~/"):
            path = path.replace("~", home, 1)
        else:
            path = str(PurePosixPath(self._program.workdir, path))
        try:
            data = await sandbox.read_file(path, limit_bytes=ANSWER_BYTES)
        except (SandboxError, TooLarge) as error:
            episode.log(f"no answer: {error}")
            return None
        return data.decode("utf-8", "replace").strip()


class _Output:
    """Lines for the attempt's log, up to a bound; the end of it all is kept besides. The session's
    secret is left out."""

    def __init__(self, log: Callable[[str], None], limit_bytes: int, *, secret: str) -> None:
        self._keep = log
        self._secret = secret
        self._left = limit_bytes
        self._part = b""
        self._end = b""
        self.size = 0

    @property
    def end(self) -> str:
        return self._clean(self._end)

    def feed(self, data: bytes) -> None:
        self.size += len(data)
        self._end = (self._end + data[-TAIL_BYTES:])[-TAIL_BYTES:]
        taken, self._left = data[: self._left], max(0, self._left - len(data))
        *lines, self._part = (self._part + taken).split(b"\n")
        for line in lines:
            self._keep(self._clean(line))

    def finish(self) -> None:
        if self._part:
            self._keep(self._clean(self._part))
        if self._left == 0:
            self._keep(f"[of {self.size} bytes of output the rest is not kept]")

    def _clean(self, data: bytes) -> str:
        text = data.decode("utf-8", "replace")
        return text.replace(self._secret, "[secret]") if self._secret else text


def filled(template: str, values: Mapping[str, str], write: Callable[[str], str] = str) -> str:
    """``template`` with each ``{name}`` of ``values`` replaced, as ``write`` writes it."""
    return _NAMED.sub(lambda found: write(values.get(found[1], found[0])), template)


def _escape(text: str) -> str:
    return json.dumps(text)[1:-1]


def _ended(code: int | None, ends: Mapping[int, str]) -> str:
    if code is None:
        return "killed at its time-out"
    if code in ends:
        return f"exit code {code} ({ends[code]})"
    if code > 128 and code - 128 in set(signal.Signals):
        return f"killed by {signal.Signals(code - 128).name}"
    return f"exit code {code}"
