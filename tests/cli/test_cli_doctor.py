"""How ``rollserve doctor`` speaks of runtimes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollserve.cli.doctor import _runtime, _session_address, doctor
from rollserve.config import Settings
from rollserve.sandbox.base import RuntimeReport


def test_a_runtime_that_claims_no_isolation_says_what_it_does() -> None:
    report = RuntimeReport(name="kubernetes", usable=True, isolated=False, detail="namespace a of b")
    finding = _runtime(report, "bubblewrap")
    assert finding.level == "note"
    assert finding.detail == "UNSAFE, claims no isolation: namespace a of b; holds for a sandbox: no bounds"
    plain = RuntimeReport(name="process", usable=True, isolated=False, detail="UNSAFE: as this user")
    assert _runtime(plain, "bubblewrap").detail.startswith("UNSAFE: as this user;")


def with_address(told: dict[str, Any], runtime: str = "none") -> Settings:
    return Settings.model_validate({"session_address": told, "workers": {"runtimes": [runtime]}})


def test_the_address_of_sessions() -> None:
    assert _session_address(with_address({})).level == "ok"
    needed = _session_address(with_address({}, "remote"))
    assert needed.level == "note"
    assert "session_address.url" in needed.remedy
    good = _session_address(with_address({"url": "http://127.0.0.1:{port}", "host": "127.0.0.1"}))
    assert (good.level, good.detail) == (
        "ok",
        "http://127.0.0.1:{port}; workers listen on 127.0.0.1 by plain HTTP",
    )
    bad = _session_address(with_address({"url": "http://10.0.0.5:{port}"}))
    assert bad.level == "problem"
    assert "allow_plain" in bad.remedy


@pytest.mark.parametrize("url", ["nothing", "https://[::1:{port}"])
async def test_a_wrong_address_hides_nothing_else(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = {"data_dir": tmp_path, "session_address": {"url": url}}
    assert await doctor(None, told, [], as_json=True) == 1
    findings = {found["name"]: found for found in json.loads(capsys.readouterr().out)["findings"]}
    assert findings["session address"]["level"] == "problem"
    assert "runtime kubernetes" in findings
