"""The demo, cut short: every part of it runs, and it reports."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rollserve.cli.processes import Processes
from rollserve.demo import __main__ as demo
from rollserve.demo.left import TASK, TRAINED, next_steps
from rollserve.demo.record import Follower, Record
from rollserve.demo.view import line, render, sparkline
from rollserve.gateway.tokens import load_tokenizer
from rollserve.localserver.model import load_model
from rollserve.records.task import Task
from rollserve.sandbox.registry import make_runtime


def run_demo(folder: Path, *arguments: str) -> dict[str, Any]:
    """Its report."""
    command = [sys.executable, "-m", "rollserve.demo", "--json", *arguments]
    if not make_runtime("bubblewrap", folder).report().usable:
        command += ["--runtime", "process", "--allow-unsafe"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder of a demo of three steps, and its report."""
    folder = tmp_path_factory.mktemp("demo")
    return folder, run_demo(folder, "--steps", "3")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_demo_trains_a_few_steps_and_leaves_its_report(trained: tuple[Path, dict[str, Any]]) -> None:
    folder, report = trained
    assert report == json.loads((folder / "demo-report.json").read_text())
    assert report["stuck"] == 0
    assert report["steps"] == 3
    assert report["rollouts_delivered"] == 3 * 64
    assert 0.2 < report["success_rate_start"] < 0.6
    assert report["tokens_sampled"] > 0
    assert 0 <= report["trainer_idle_share"] <= 1
    assert report["policy_versions"] == 3
    output = folder / "demo-output"
    assert (output / "learning.png").read_bytes().startswith(b"\x89PNG")
    assert load_tokenizer(str(output / TRAINED)).vocab_size > 0
    assert not _same_weights(output / "model", output / TRAINED)
    assert Task.model_validate_json((output / TASK).read_text()).instruction.startswith("lookup ")
    assert "[assistant]" in (output / "trajectory.txt").read_text()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_server_draws_the_tasks_and_the_first_good_version_is_found(
    trained: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    model = trained[0] / "demo-output" / "model"
    report = run_demo(
        tmp_path, *("--model", str(model), "--steps", "2", "--dynamic-sampling", "--milestone", "0.1")
    )
    assert report["dynamic_sampling"] is True
    assert (report["steps"], report["policy_versions"], report["stuck"]) == (2, 2, 0)
    assert report["rollouts_delivered"] == 2 * 64
    assert report["staleness_max"] <= 1
    assert report["milestone"]["step"] == 1
    assert report["milestone"]["trained"] == 8
    assert report["milestone"]["rollouts"] >= 64
    assert report["milestone"]["tokens"] > 0
    assert 0 < report["milestone"]["busy_s"] <= report["trainer_busy_seconds"]


def _same_weights(one: Path, other: Path) -> bool:
    """Of two folders that the local server can load."""
    left, right = (load_model(str(each), device="cpu", dtype="float32").state_dict() for each in (one, other))
    assert left.keys() == right.keys()
    return all(left[name].equal(right[name]) for name in left)


def test_what_to_type_next_is_whole(tmp_path: Path) -> None:
    commands = [command for _, some in next_steps(tmp_path / "out", allow_unsafe=True) for command in some]
    [serving] = [each for each in commands if "rollserve.localserver" in each]
    assert serving.endswith(f"--model {tmp_path / 'out' / TRAINED}")
    [trying] = [each for each in commands if " try " in each]
    assert str(tmp_path / "out" / TASK) in trying
    assert "--allow-unsafe-runtime" in trying


def test_an_unsafe_runtime_needs_the_explicit_flag(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rollserve.demo", "--runtime", "process"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "UNSAFE" in done.stdout
    assert "--allow-unsafe" in done.stdout


@pytest.mark.parametrize("rate", ["0", "2", "-1", "nan"])
def test_a_milestone_is_a_rate(rate: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        demo.parse([f"--milestone={rate}"])
    assert "--milestone is a success rate" in capsys.readouterr().err


def test_a_model_that_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        demo.parse(["--model", str(tmp_path)])
    assert "--model: there is no model in" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{}")
    assert demo.parse(["--model", str(tmp_path)]).model == tmp_path


async def test_a_given_model_is_copied_not_made(tmp_path: Path) -> None:
    given, output = tmp_path / "given", tmp_path / "out"
    given.mkdir()
    (given / "config.json").write_text("{}")
    options = demo.parse(["--output", str(output), "--model", str(given)])
    made = demo.Demo(options, Console(file=io.StringIO()))
    await made._make_model()
    made._processes.stop()
    assert (output / "model" / "config.json").read_text() == "{}"


def test_the_follower_reads_whole_lines_only(tmp_path: Path) -> None:
    path = tmp_path / "progress"
    follower = Follower(path)
    assert follower.new() == []
    path.write_text('{"event": "train", "run_id": "r"}\n{"event": "st')
    assert follower.new() == [{"event": "train", "run_id": "r"}]
    with path.open("a") as more:
        more.write('ep", "step": 1}\n')
    assert follower.new() == [{"event": "step", "step": 1}]


def test_the_view_says_what_is_known() -> None:
    record = Record()
    assert "starting" in line(record)
    record.take({"event": "train", "run_id": "r"})
    stats = {"staleness_mean": 1.5, "staleness_max": 2}
    step = {"event": "step", "began": record.started, "waited_s": 0.0, "reward": 0.5, "version": 3}
    record.take(step | {"stats": stats})
    assert "reward 0.50" in line(record)
    assert render(record).title == "rollserve demo"
    assert sparkline([0.0, 1.0]) == "▁█"


async def test_the_demo_is_not_silent_while_the_model_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "SAY_EVERY_S", 0.01)
    said = io.StringIO()
    options = demo.parse(["--output", str(tmp_path)])
    made = demo.Demo(options, Console(file=said))
    script = "import time; print('step 5/9', flush=True); time.sleep(1)"
    processes = Processes(tmp_path)
    await made._say_progress(processes.start("model", [sys.executable, "-c", script]))
    processes.stop()
    made._processes.stop()
    assert "step 5/9" in said.getvalue()
