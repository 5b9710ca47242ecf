"""What the project says about itself is so."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from pydantic import BaseModel

from rollserve.api.app import make_app
from rollserve.api.auth import Auth
from rollserve.config import ApiSettings, Settings

ROOT = Path(__file__).parents[2]


def setting_names(model: type[BaseModel], prefix: str = "") -> list[str]:
    names: list[str] = []
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            names += setting_names(kind, f"{prefix}{name}.")
        else:
            names.append(prefix + name)
    return names


@pytest.mark.parametrize("name", setting_names(Settings))
def test_every_setting_is_documented(name: str) -> None:
    assert f"| `{name}` |" in (ROOT / "docs/operations.md").read_text()


def test_no_setting_is_documented_that_does_not_exist() -> None:
    rows = re.findall(r"^\| `([a-z_.]+)` \|", (ROOT / "docs/operations.md").read_text(), flags=re.M)
    runtimes = {"bubblewrap", "process", "none"}
    assert set(rows) - runtimes == set(setting_names(Settings))


def test_every_route_is_documented() -> None:
    never_asked: Any = None
    app: FastAPI = make_app(never_asked, ApiSettings(), Auth(never_asked, required=False))
    text = (ROOT / "docs/api.md").read_text()
    for path, item in app.openapi()["paths"].items():
        for method in item:
            assert f"| {method.upper()} | `{path}` |" in text, (method, path)


@pytest.mark.parametrize("module", ["rollserve.client", "rollserve.records.task", "rollserve.wire"])
def test_the_client_is_light(module: str) -> None:
    code = (
        f"import sys, {module}; heavy = {{'torch', 'fastapi', 'uvicorn', 'starlette', 'sqlalchemy', 'ray', "
        "'renderers', 'transformers'} & set(sys.modules); sys.exit(', '.join(heavy) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_help_is_instant_enough_to_import_nothing_heavy() -> None:
    code = (
        "import sys\nfrom rollserve.cli.app import app\n"
        "heavy = {'torch', 'fastapi', 'sqlalchemy', 'renderers', 'matplotlib'} & set(sys.modules)\n"
        "sys.exit(', '.join(heavy) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_links_between_documents_lead_somewhere() -> None:
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
            if "://" not in target:
                assert (path.parent / target).exists(), (path, target)


def test_the_version_is_said_once() -> None:
    from rollserve import __version__

    assert f'version = "{__version__}"' in (ROOT / "pyproject.toml").read_text()
