"""What is refused: in one line, by its flag, field or place, and nothing is left behind."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from pydantic import ValidationError

from rollserve.build.data_dir import check_data_dir
from rollserve.cli.edge import run_app
from rollserve.cli.submit import Into, _submitted
from rollserve.cli.tasks import TaskFile, read_task, read_tasks
from rollserve.cli.try_task import _in
from rollserve.client import RunHandle
from rollserve.config import Settings
from rollserve.errors import ConfigError, InvalidInput, NotFound, UnknownName
from rollserve.records.policy import BackendKind
from rollserve.records.run import RunState
from rollserve.records.task import AgentSpec, GraderSpec
from rollserve.wire import CreatePolicy, GroupSummary, OpenRun
from tests.cli.test_cli_commands import as_json, rollserve
from tests.integration.conftest import Server, add_policy, shell_task


async def test_values_that_no_record_takes_are_one_line(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(shell_task().model_dump_json())
    nowhere = ("--url", "http://127.0.0.1:9")
    backend = ("--backend", "http://127.0.0.1:9", "--model", "m", "--tokenizer", "tiny")
    cases = [
        (("submit", str(tasks), "--policy", "p", "-n", "0", *nowhere), 2, "--num-rollouts"),
        (("submit", str(tasks), "--policy", "p", "--name", "my run", *nowhere), 1, "name: is no name, got"),
        (("submit", str(tasks), *nowhere), 1, "--policy NAME, or --run RUN"),
        (("policy", "create", "bad name/../x", "--model", "m", *nowhere), 1, "name: is no name"),
        (("policy", "create", "p9", "--model", "", *nowhere), 1, "model: "),
        (("try", str(tasks), *backend, "--temperature", "-1"), 2, "--temperature"),
        (("try", str(tasks), *backend, "--kind", "vlm"), 1, "did you mean 'vllm'?"),
        (("show", "a/b?c", *nowhere), 1, "'a/b?c' is no id"),
    ]
    results = await asyncio.gather(*(rollserve(*arguments) for arguments, _, _ in cases))
    for (arguments, wanted, words), (code, out, err) in zip(cases, results, strict=True):
        said = " ".join((out + err).split())
        assert code == wanted, (arguments, said)
        assert words in said, (arguments, said)
        assert "Traceback" not in said


def test_what_is_given_is_shown_and_cut(capsys: pytest.CaptureFixture[str]) -> None:
    def app() -> None:
        CreatePolicy(name="p", model="m" * 2000)

    with pytest.raises(SystemExit) as ended:
        run_app(app)
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert said.startswith("error: model: String should have at most 1024")
    assert len(said) < 300
    with pytest.raises(ValidationError):
        app()


async def test_a_refused_submit_leaves_no_open_run(server: Server, backend_url: str, tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    bad = shell_task(grader=GraderSpec(name="exakt")).model_dump_json()
    tasks.write_text(f"{shell_task().model_dump_json()}\n\n{bad}\n")
    at = ("--url", server.url)
    async with server.client() as client:
        await add_policy(client, backend_url)
        code, _, said = await rollserve("submit", str(tasks), "--policy", "tiny", *at)
        assert code == 1
        assert "tasks.jsonl line 3: grader.name: " in said
        (run,) = (await client.runs()).items
        assert run.state is RunState.CLOSED

        named = await client.open_run(OpenRun(policy="tiny"))
        code, _, said = await rollserve("submit", str(tasks), "--run", named.id, *at)
        assert code == 1
        code, _, said = await rollserve("submit", str(tasks), "--run", named.id, "--policy", "other", *at)
        assert "is of the policy 'tiny', not 'other'" in said
        tasks.write_text(shell_task().model_dump_json())
        done = await as_json("submit", str(tasks), "--run", named.id, "--wait", *at)
        assert not done["closed"]
        assert (await named.status()).run.state is RunState.OPEN
        left = await as_json("submit", str(tasks), "--policy", "tiny", *at)
        assert (await client.run(left["run_id"])).run.state is RunState.OPEN


def test_where_tasks_go_is_said_once() -> None:
    with pytest.raises(InvalidInput):
        Into.of(policy=None, name=None, run_id=None)
    with pytest.raises(InvalidInput):
        Into.of(policy=None, name="x", run_id="run_1")
    assert Into.of(policy=None, name=None, run_id="run_1").run_id == "run_1"


def test_places_of_what_the_server_refused() -> None:
    file = TaskFile([shell_task()] * 2, ["t.jsonl line 1", "t.jsonl line 3"])
    for field, said in [
        ("groups.1.task.grader.name", "t.jsonl line 3: grader.name"),
        ("groups.0.num_rollouts", "t.jsonl line 1: num_rollouts"),
        ("groups.7.task.x", "groups.7.task.x"),
        ("policy", "policy"),
    ]:
        error = InvalidInput("no", field=field)
        file.place(error)
        assert error.field == said


def test_try_takes_one_task(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    crasher = shell_task(agent=AgentSpec(name="my_agents:Crasher"))
    tasks.write_text(f"{shell_task().model_dump_json()}\n\n{crasher.model_dump_json()}\n")
    with pytest.raises(InvalidInput, match="has 2 lines") as caught:
        read_task(tasks, None)
    assert "--line N" in str(caught.value.hint)
    assert read_task(tasks, 3) == crasher
    with pytest.raises(InvalidInput, match="no task at line 2"):
        read_task(tasks, 2)
    tasks.write_text(crasher.model_dump_json(indent=2))
    assert read_task(tasks, None) == crasher
    assert read_tasks(tasks).places == ["tasks.jsonl line 1"]
    tasks.write_text('{\n"instruction": "x",\n')
    with pytest.raises(InvalidInput, match="JSON"):
        read_task(tasks, None)


def test_harnesses_of_try_lie_in_a_folder_that_lasts(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path / "data")
    inside = _in(tmp_path / "short-lived", settings)
    assert inside.data_dir == tmp_path / "short-lived"
    assert inside.harness_folder == tmp_path / "data" / "harnesses"


async def test_doctor_speaks_of_a_data_folder_in_whole_lines(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 20) / "data"
    _, out, _ = await rollserve("doctor", "--data-dir", str(folder), cwd=tmp_path)
    command = next(line for line in out.splitlines() if "rollserve.agent.harness.install" in line)
    assert f"--into {folder / 'harnesses'} " in command


def test_kinds_are_hinted_as_they_are_typed() -> None:
    assert UnknownName("kind", "vlm", list(BackendKind)).hint == "did you mean 'vllm'?"


async def test_backends_are_drained_and_removed_by_url_or_id(shared_server: Server, backend_url: str) -> None:
    at = ("--url", shared_server.url)
    async with shared_server.client() as client:
        await add_policy(client, backend_url)
        (backend,) = await client.backends("tiny")
        drained = await as_json("policy", "drain-backend", "tiny", f"{backend_url}/v1/", *at)
        assert drained["draining"] == backend.id
        code, _, said = await rollserve("policy", "remove-backend", "tiny", "be_nobody", *at)
        assert code == 1
        assert backend.id in said
        code, out, _ = await rollserve("policy", "remove-backend", "tiny", backend.id, *at)
        assert code == 0
        assert "is removed" in out
        assert await client.backends("tiny") == []
        with pytest.raises(NotFound):
            await client.remove_backend("tiny", backend.id)


async def test_a_taken_port_is_said_before_anything_is_loaded(shared_server: Server, tmp_path: Path) -> None:
    port = shared_server.url.rpartition(":")[2]
    code, _, said = await rollserve("serve", "--port", port, "--data-dir", str(tmp_path))
    assert code == 1
    assert "--port PORT" in said


@pytest.mark.parametrize("command", ["serve", "doctor", "image list", "image prune --all"])
async def test_a_data_folder_that_can_not_be_used_is_what_is_blamed(tmp_path: Path, command: str) -> None:
    """Even root can make nothing there, as on a read-only mount."""
    code, out, err = await rollserve(*command.split(), "--data-dir", "/proc/x", cwd=tmp_path)
    said = " ".join((out + err).split())
    assert code == 1
    assert "can't use /proc/x: nothing can be written in /proc" in said
    assert "Traceback" not in said
    if command != "doctor":  # which goes on to all else
        assert said.startswith("error: data_dir: can't use"), said
        assert "ROLLSERVE_DATA_DIR" in said


def test_looking_at_a_data_folder_makes_nothing(tmp_path: Path) -> None:
    check_data_dir(tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="Not a directory") as caught:
        check_data_dir(tmp_path / "file" / "data", "--output")
    assert caught.value.field == "--output"


class Stuck(RunHandle):
    """A run whose submits the server doesn't answer."""

    def __init__(self, handle: RunHandle) -> None:
        super().__init__(handle._transport, handle.run)
        self.asked = asyncio.Event()

    async def submit(self, *_: object, **__: object) -> list[GroupSummary]:
        self.asked.set()
        await asyncio.Event().wait()
        return []


async def test_a_submit_that_is_cut_off_leaves_no_run_open(shared_server: Server, backend_url: str) -> None:
    async with shared_server.client() as client:
        await add_policy(client, backend_url)
        handle = await client.open_run(OpenRun(policy="tiny"))
        stuck = Stuck(handle)
        submitting = asyncio.create_task(_submitted(stuck, TaskFile([], []), 1, own=True))
        await stuck.asked.wait()
        submitting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await submitting
        assert (await handle.status()).run.state is RunState.CLOSED
