"""``rollserve run`` and ``rollserve policy``, and what ``status`` says of both."""

from __future__ import annotations

from pathlib import Path

from rollserve.wire import OpenRun
from tests.cli.test_cli_commands import as_json, rollserve
from tests.cli.test_cli_waiting import add_lonely, write_tasks
from tests.integration.conftest import Server, add_policy


async def test_runs_are_listed_with_counts_newest_first(
    server: Server, backend_url: str, tmp_path: Path
) -> None:
    at = ("--url", server.url)
    code, text, _ = await rollserve("run", "list", *at)
    assert (code, text) == (0, "no run\n")
    async with server.client() as client:
        await add_policy(client, backend_url)
        old = await client.open_run(OpenRun(policy="tiny", name="old"))
    tasks = write_tasks(tmp_path)
    submitted = await as_json("submit", tasks, "--policy", "tiny", "-n", "2", "--wait", *at)
    new = submitted["run_id"]
    listed = await as_json("run", "list", *at)
    assert [(run["id"], run["counts"]["completed"]) for run in listed["runs"]] == [(new, 2), (old.id, 0)]
    assert listed["next"] is None
    first = await as_json("run", "list", "--limit", "1", *at)
    assert [run["id"] for run in first["runs"]] == [new]
    second = await as_json("run", "list", "--limit", "1", "--cursor", first["next"], *at)
    assert [run["id"] for run in second["runs"]] == [old.id]
    code, text, _ = await rollserve("run", "list", "--limit", "1", *at)
    assert f"--cursor {first['next']}" in text
    code, text, _ = await rollserve("run", "show", new, *at)
    assert code == 0
    row = next(line for line in text.splitlines() if line.startswith(new) and "tiny" in line).split()
    assert row[-5:] == ["0", "0", "2", "0", "0"]  # waiting, running, completed, failed, cancelled


async def test_a_run_is_paused_resumed_and_closed(shared_server: Server, tmp_path: Path) -> None:
    at = ("--url", shared_server.url)
    async with shared_server.client() as client:
        await add_lonely(client)
        run = await client.open_run(OpenRun(policy="lonely"))
    assert (await as_json("run", "pause", run.id, *at))["state"] == "paused"
    code, _, said = await rollserve("status", *at)
    assert code == 0
    assert f"run {run.id} is paused; `rollserve run resume {run.id}`" in said
    assert "policy 'lonely' has no backend" in said
    paused = await as_json("run", "list", "--state", "paused", *at)
    assert [each["id"] for each in paused["runs"]] == [run.id]
    code, text, _ = await rollserve("run", "resume", run.id, *at)
    assert (code, text) == (0, f"run {run.id} is open\n")
    await as_json("submit", write_tasks(tmp_path), "--policy", "lonely", "--run", run.id, *at)
    code, text, _ = await rollserve("run", "close", run.id, *at)
    assert code == 0
    assert f"run {run.id} is closed" in text
    code, _, said = await rollserve("run", "resume", run.id, *at)
    assert (code, "is closed" in said) == (1, True)


async def test_a_policy_from_nothing_to_its_first_reward(
    server: Server, backend_url: str, tmp_path: Path
) -> None:
    at = ("--url", server.url)
    code, text, _ = await rollserve("policy", "list", *at)
    assert (code, "rollserve policy create" in text) == (0, True)
    made = ("--model", "scripted", "--tokenizer", "tiny", "--renderer-option", "enable_thinking=false")
    code, text, said = await rollserve("policy", "create", "mine", *made, *at)
    assert (code, text) == (0, "policy mine is there, at version 0\n")
    assert "rollserve policy add-backend mine" in said
    code, _, said = await rollserve("policy", "add-backend", "mine", "http://127.0.0.1:9", *at)
    assert code == 1
    assert "no inference server at http://127.0.0.1:9" in said
    assert "hint:" in said
    code, _, said = await rollserve("policy", "add-backend", "mine", backend_url, "--images", *at)
    assert code == 1
    assert "images can't be sent so" in said
    backend = await as_json("policy", "add-backend", "mine", backend_url, *at)
    listed = await as_json("policy", "list", *at)
    assert [[each["id"] for each in p["backends"]] for p in listed["policies"]] == [[backend["id"]]]
    assert (await as_json("policy", "pause", "mine", *at))["paused"]
    code, text, said = await rollserve("policy", "list", *at)
    assert "paused" in text
    assert "`rollserve policy resume mine`" in said
    whole = await as_json("status", *at)
    (policy,) = whole["policies"]
    assert policy == {"name": "mine", "version": 0, "paused": True, "backends": 1, "active": 1}
    code, text, _ = await rollserve("policy", "resume", "mine", *at)
    assert code == 0
    code, text, said = await rollserve("policy", "show", "mine", *at)
    assert (backend_url in text, said) == (True, "")
    done = await as_json("submit", write_tasks(tmp_path), "--policy", "mine", "--wait", *at)
    assert list(done["rewards"].values()) == [[1.0]]


async def test_unknown_ids_say_where_to_look(shared_server: Server) -> None:
    at = ("--url", shared_server.url)
    for command in ("show", "cancel", "drift", "verify"):
        code, _, said = await rollserve(command, "xyz", *at)
        assert code == 1
        assert "`rollserve run list`" in said, said
    for command in ("status", "run show", "run close", "drift"):
        code, _, said = await rollserve(*command.split(), "run_xyz", *at)
        assert code == 1
        assert "`rollserve run list`" in said, said
    code, _, said = await rollserve("policy", "show", "xyz", *at)
    assert (code, "`rollserve policy list`" in said) == (1, True)
