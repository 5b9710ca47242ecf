"""How ``rollserve doctor`` speaks of runtimes."""

from __future__ import annotations

from rollserve.cli.doctor import _runtime
from rollserve.sandbox.base import RuntimeReport


def test_a_runtime_that_claims_no_isolation_says_what_it_does() -> None:
    report = RuntimeReport(name="kubernetes", usable=True, isolated=False, detail="namespace a of b")
    finding = _runtime(report, "bubblewrap")
    assert finding.level == "note"
    assert finding.detail == "UNSAFE, claims no isolation: namespace a of b; holds for a sandbox: no bounds"
    plain = RuntimeReport(name="process", usable=True, isolated=False, detail="UNSAFE: as this user")
    assert _runtime(plain, "bubblewrap").detail.startswith("UNSAFE: as this user;")
