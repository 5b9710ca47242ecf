"""The command line as a process, against a real server."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from rollserve.agent.harness.table import HARNESSES
from rollserve.records.task import AgentSpec, GraderSpec
from rollserve.testing.scripted import ScriptedEngine
from tests.integration.conftest import CODE, Server, add_policy, shell_task


async def rollserve(*arguments: str, stdin: str = "", cwd: Path | None = None) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "rollserve", *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=cwd,
    )
    out, err = await asyncio.wait_for(process.communicate(stdin.encode()), timeout=90)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def as_json(*arguments: str, **how: Any) -> Any:
    code, out, err = await rollserve(*arguments, "--json", **how)
    assert code == 0, err
    return json.loads(out)


async def test_submit_status_show_and_cancel(server: Server, backend_url: str, tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("".join(shell_task().model_dump_json() + "\n" for _ in range(2)))
    async with server.client() as client:
        await add_policy(client, backend_url)
    at = ("--url", server.url)
    submitted = await as_json("submit", str(tasks), "--policy", "tiny", "-n", "2", "--wait", *at)
    assert sorted(submitted["rewards"]) == sorted(submitted["groups"])
    assert all(rewards == [1.0, 1.0] for rewards in submitted["rewards"].values())

    run = await as_json("status", submitted["run_id"], *at)
    assert run["counts"]["completed"] == 4
    assert submitted["closed"]
    assert run["run"]["state"] == "closed"
    assert len({each["id"] for each in run["rollouts"]}) == 4
    whole = await as_json("status", *at)
    assert [entry["id"] for entry in whole["runs"]] == [submitted["run_id"]]
    assert all("age_s" in backend for backend in whole["backends"])
    code, text, _ = await rollserve("status", *at)
    assert code == 0
    assert "seen" in text
    assert " ago" in text or "not yet" in text

    async with server.client() as client:
        (rollout, *_) = [r async for r in client.rollouts(run_id=submitted["run_id"])]
    shown = await as_json("show", rollout.id, "--log", *at)
    assert shown["rollout"]["reward"] == 1.0
    assert shown["log"]
    code, text, _ = await rollserve("status", submitted["run_id"], *at)
    assert code == 0
    assert rollout.id in text  # so that a person finds one to look into
    code, text, _ = await rollserve("show", rollout.id, *at)
    assert code == 0
    assert "the answer is 42" in text
    assert await as_json("cancel", rollout.group_id, *at) == {"ended": 0, "stopping": 0}
    assert "has ended already" in (await rollserve("cancel", rollout.id, *at))[1]


async def test_errors_are_one_line_and_say_where(shared_server: Server, tmp_path: Path) -> None:
    at = ("--url", shared_server.url)
    broken = tmp_path / "broken.jsonl"
    broken.write_text(shell_task().model_dump_json() + "\n" + '{"instruction": "x"}\n')
    typo = tmp_path / "typo.json"
    typo.write_text('{\n"instruction": "x",\n"gradr": {"name": "exact"}\n}')
    cases = [
        (("submit", str(broken), "--policy", "p", *at), "broken.jsonl line 2: grader"),
        (("submit", str(tmp_path / "none.jsonl"), "--policy", "p", *at), "can't read"),
        (("submit", str(typo), "--policy", "p", *at), "did you mean 'grader'?"),
        (("show", "rol_nobody", *at), "rol_nobody"),
        (("status", "--url", "localhost:1"), "is no URL"),
        (("status", "--url", "http://127.0.0.1:9"), "rollserve serve"),
        (("try", str(broken), "--policy", "p", "--backend", "x", *at), "broken.jsonl"),
        (("serve", "--data-dir", str(tmp_path / "d"), "--set", "workers.conut=3"), "workers.conut"),
        (("serve", "--data-dir", str(tmp_path / "d"), "--runtime", "bubblewrp"), "bubblewrap"),
        (("serve", "--data-dir", str(tmp_path / "d"), "--runtime", "process"), "UNSAFE"),
        (("serve", "--data-dir", str(shared_server.folder / "data"), "--port", "0"), "another server"),
    ]
    results = await asyncio.gather(*(rollserve(*arguments) for arguments, _ in cases[:7]))
    results += await asyncio.gather(*(rollserve(*arguments) for arguments, _ in cases[7:]))
    for (arguments, words), (code, _, err) in zip(cases, results, strict=True):
        assert code == 1, arguments
        assert words in err.replace("\n", " "), (arguments, err)
        assert "Traceback" not in err


async def test_try_shows_one_rollout(shared_server: Server, backend_url: str, runtime: str) -> None:
    async with shared_server.client() as client:
        await add_policy(client, backend_url)
    task = shell_task(runtime=runtime).model_dump_json()
    code, out, err = await rollserve("try", "-", "--policy", "tiny", "--url", shared_server.url, stdin=task)
    assert code == 0, err
    assert "the answer is 42" in out
    assert "completed: reward 1.0" in out


async def test_try_finds_code_by_a_flag_before_the_environment(
    shared_server: Server, backend_url: str, runtime: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with shared_server.client() as client:
        await add_policy(client, backend_url)
    task = shell_task(runtime=runtime, agent=AgentSpec(name="my_agents:Crasher")).model_dump_json()
    asked = ("try", "-", "--policy", "tiny", "--url", shared_server.url)
    monkeypatch.setenv("ROLLSERVE_CODE_DIR", "/nowhere")
    code, _, err = await rollserve(*asked, stdin=task)
    assert code == 1
    assert "--code-dir DIR, ROLLSERVE_CODE_DIR" in err
    code, out, err = await rollserve(*asked, "--code-dir", str(CODE), stdin=task)
    assert code == 1
    assert "failed (agent): " in out
    assert (out + err).count("Traceback") == 1


async def test_doctor_looks_at_a_backend(backend_url: str, tmp_path: Path) -> None:
    found = await as_json("doctor", "--backend", backend_url, cwd=tmp_path)
    names = {finding["name"]: finding for finding in found["findings"]}
    assert names[f"backend {backend_url}"]["level"] in ("ok", "note")
    assert "scripted" in names[f"backend {backend_url}"]["detail"]
    assert "runtime bubblewrap" in names
    assert {"extra math", "extra mcp", "extra local", "extra train", "harnesses"} <= names.keys()


async def test_doctor_lists_the_harnesses_that_are_there(tmp_path: Path) -> None:
    program = tmp_path / ".rollserve" / "harnesses" / HARNESSES["pi"].folder / "bin" / "pi"
    program.parent.mkdir(parents=True)
    program.touch()
    found = await as_json("doctor", cwd=tmp_path)
    [said] = [finding for finding in found["findings"] if finding["name"] == "harnesses"]
    assert said["level"] == "ok"
    assert f"in {tmp_path / '.rollserve' / 'harnesses'}: pi" in said["detail"]
    assert "codex" in said["detail"].partition("not installed:")[2]
    assert "rollserve.agent.harness.install --into" in said["remedy"]


async def test_doctor_says_that_a_rollserve_server_is_no_backend(
    shared_server: Server, tmp_path: Path
) -> None:
    code, out, _ = await rollserve("doctor", "--backend", shared_server.url, "--json", cwd=tmp_path)
    [said] = [each for each in json.loads(out)["findings"] if each["name"].startswith("backend")]
    assert code == 1
    assert "is a rollserve server" in said["detail"]
    assert "--enable-scale-out" in said["remedy"]


async def test_try_says_at_once_that_there_is_no_tokenizer(backend_url: str, tmp_path: Path) -> None:
    task = shell_task().model_dump_json()
    at = ("--backend", backend_url, "--model", "scripted", "--tokenizer", "./nothing")
    code, _, err = await rollserve("try", "-", *at, stdin=task, cwd=tmp_path)
    assert code == 1
    assert "no such file or directory: ./nothing" in err
    assert "— init" not in err


async def test_bench_loses_nothing(tmp_path: Path) -> None:
    report = await as_json("bench", "--episodes", "12", "--turns", "3", "--tokens", "30", cwd=tmp_path)
    assert report["lost"] == 0
    assert report["episodes"] == 12
    assert report["cpu_ms_per_call"] > 0
    assert report["rss_mb_peak"] > 0
    by_round = report["rss_mb_by_round"]
    assert [len(by_round[each]) for each in ("server", "workers")] == [3, 3]
    assert min(*by_round["server"], *by_round["workers"]) > 10
    assert {"episodes_per_s", "loop_lag_ms_p99"} <= report.keys()


async def test_a_server_that_may_not_open_enough_files_says_so(tmp_path: Path) -> None:
    start = f"ulimit -n 256; exec {sys.executable} -m rollserve serve --port 0 --data-dir {tmp_path}"
    process = await asyncio.create_subprocess_exec(
        "bash", "-c", start, stderr=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL
    )
    _, err = await asyncio.wait_for(process.communicate(), timeout=60)
    assert process.returncode == 1
    assert b"ulimit -n" in err


async def test_try_opens_a_shell_in_the_sandbox_of_a_task_that_earned_nothing(
    shared_server: Server, backend_url: str, runtime: str, tmp_path: Path
) -> None:
    async with shared_server.client() as client:
        await add_policy(client, backend_url)
    grader = GraderSpec(name="numeric", options={"answer": 41})
    task = tmp_path / "task.json"
    task.write_text(shell_task(runtime=runtime, grader=grader).model_dump_json())
    flags = ["--allow-unsafe-runtime"] if runtime == "process" else []
    at = ("--policy", "tiny", "--url", shared_server.url)
    code, out, err = await rollserve("try", str(task), "--shell", *at, *flags, stdin="wc -l < note\nexit\n")
    assert code == 0, err
    assert "the sandbox is kept" in err
    assert "1\n" in out
    assert "completed: reward 0.0" in out


async def test_verify_proves_a_run_and_one_rollout(
    shared_server: Server, backend_url: str, engine: ScriptedEngine, tmp_path: Path
) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(shell_task().model_dump_json())
    async with shared_server.client() as client:
        await add_policy(client, backend_url)
    at = ("--url", shared_server.url)
    submitted = await as_json("submit", str(tasks), "--policy", "tiny", "-n", "2", "--wait", *at)
    proved = await as_json("verify", submitted["run_id"], *at)
    assert proved["ok"]
    differences = [sample["difference"] for each in proved["rollouts"] for sample in each["samples"]]
    assert len(differences) == 2
    assert all(found["compared"] > 0 and found["max"] < 1e-5 for found in differences)

    engine.score_shift = 0.25
    rollout = proved["rollouts"][0]["rollout_id"]
    code, text, err = await rollserve("verify", rollout, *at)
    assert code == 1, err
    assert "0.25000 on average" in text
    assert "difference" in text
    code, text, _ = await rollserve("verify", rollout, "--no-score", *at)
    assert code == 0
    assert "not proven: " in text
    assert "tokens not compared" in text
    assert "nothing is wrong" not in text
    assert "not asked for" in text
    assert (await rollserve("verify", "rol_nobody", *at))[0] == 1
