"""Recipes as text, and what COPY takes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rollserve.errors import InvalidInput, SandboxError
from rollserve.sandbox.images.base import Job
from rollserve.sandbox.images.context import Context, digest_of
from rollserve.sandbox.images.recipe import Copy, Run, parse_recipe
from rollserve.sandbox.images.stack import Stack

FULL = r"""# syntax=docker/dockerfile:1
ARG VERSION=3
FROM example.org/base:${VERSION} AS base
ARG VERSION
ARG NAME=you GREETING="hello $NAME"
ENV A=1 B="two words" C=${A:-x} D=\$HOME
ENV OLD the rest  of it
WORKDIR /srv
WORKDIR app
USER builder
# a comment
RUN echo one && \
    # another

    echo two
RUN ["printf", "%s", "a b"]
COPY src/*.py "a file" dest/
LABEL a=b
CMD ["sh"]
"""


def test_a_whole_recipe() -> None:
    recipe = parse_recipe(FULL, {"VERSION": "4"})
    assert (recipe.base.image, recipe.base.line) == ("example.org/base:4", 3)
    assert dict(recipe.env) == {"A": "1", "B": "two words", "C": "x", "D": "$HOME", "OLD": "the rest  of it"}
    assert (recipe.workdir, recipe.user) == ("/srv/app", "builder")
    first, second, third = recipe.steps
    assert isinstance(first, Run)
    assert (first.line, first.command) == (12, "echo one &&     echo two")
    assert dict(first.arguments) == {"VERSION": "4", "NAME": "you", "GREETING": "hello you"}
    assert isinstance(second, Run)
    assert second.command == "printf %s 'a b'"
    assert third == Copy(17, ("src/*.py", "a file"), "dest/", "/srv/app")


def test_the_environment_of_the_base_is_seen() -> None:
    recipe = parse_recipe("FROM x\nENV PATH=/opt:$PATH", {}, base_env={"PATH": "/bin"})
    assert dict(recipe.env) == {"PATH": "/opt:/bin"}


def test_defaults_and_alternatives() -> None:
    text = "FROM x\nARG N\nENV A=${N:-none} B=${N:+some}"
    assert dict(parse_recipe(text, {}).env) == {"A": "none", "B": ""}
    assert dict(parse_recipe(text, {"N": "1"}).env) == {"A": "1", "B": "some"}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no FROM"),
        ("RUN x", "line 1: RUN before FROM"),
        ("FROM x\n\nADD a b", "line 3: ADD is not supported"),
        ("FROM x\nVOLUME /v", "line 2: VOLUME is not supported"),
        ('FROM x\nSHELL ["bash"]', "line 2: SHELL is not supported"),
        ("FROM x\nFROM y", "line 2: a second FROM"),
        ("FROM --platform=x y", "line 1: FROM --platform is not supported"),
        ("FROM a b", "line 1: FROM wants one image"),
        ("FROM x\nRUN --mount=type=cache x", "line 2: RUN --mount is not supported"),
        ("FROM x\nCOPY --from=y a b", "line 2: COPY --from is not supported"),
        ("FROM x\nRUN <<EOF\nls\nEOF", "line 2: a here-document"),
        ("FROM x\nRUN \\\n", "line 2: RUN wants something"),
        ("FROM x\nCOPY a", "line 2: COPY wants a source and a target"),
        ("FROM x\nENV A", "line 2: ENV A has no value"),
        ("FROM x\nENV 1A=2", "line 2: '1A' is no name"),
        ("FROM x\nENV A='x", "line 2: quotes that don't close"),
        ("# escape=`\nFROM x", "line 1: the directive escape"),
        ("FROM x\nWHAT", "line 2: WHAT is not supported"),
    ],
)
def test_what_is_not_supported_is_named_with_its_line(text: str, why: str) -> None:
    with pytest.raises(InvalidInput, match=why):
        parse_recipe(text, {})


def test_arguments_that_the_recipe_does_not_have() -> None:
    with pytest.raises(InvalidInput, match="no ARG WHAT"):
        parse_recipe("FROM x", {"WHAT": "1"})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "context"
    (place / "src" / "inner").mkdir(parents=True)
    (place / "src" / "a.py").write_text("a")
    (place / "src" / "b.pyc").write_text("b")
    (place / "src" / "inner" / "c.py").write_text("c")
    (place / "src" / "link").symlink_to("a.py")
    (place / "one").write_text("1")
    (tmp_path / "secret").write_text("secret")
    (place / "out").symlink_to(tmp_path / "secret")
    return place


def selected(folder: Path, *words: str, below: Stack | None = None, workdir: str = "/w") -> list[str]:
    step = Copy(7, words[:-1], words[-1], workdir)
    return ["/".join(one.target) for one in Context(folder).select(step, below or Stack(()))]


def test_copy_selects(folder: Path, tmp_path: Path) -> None:
    assert selected(folder, "one", "two") == ["w/two"]
    assert selected(folder, "one", "/there/") == ["there/one"]
    assert selected(folder, "src/*.py", "one", "d") == ["w/d/a.py", "w/d/one"]
    assert set(selected(folder, "src", "/app")) == {
        *("app", "app/a.py", "app/b.pyc", "app/inner", "app/inner/c.py", "app/link"),
    }
    (tmp_path / "layer" / "usr" / "lib").mkdir(parents=True)
    (tmp_path / "layer" / "lib").symlink_to("usr/lib")
    below = Stack([tmp_path / "layer"])
    assert selected(folder, "one", "/lib", below=below) == ["usr/lib/one"]
    assert selected(folder, "one", "/lib/../lib/x", below=below) == ["usr/lib/x"]


def test_ignored_files_stay_out(folder: Path) -> None:
    (folder / ".dockerignore").write_text("# note\n**/*.pyc\nsrc/inner\n!src/inner/c.py\n.dockerignore\n")
    assert set(selected(folder, "src", "/app")) == {
        "app",
        "app/a.py",
        "app/inner",
        "app/inner/c.py",
        "app/link",
    }
    with pytest.raises(SandboxError, match="finds nothing"):
        selected(folder, "src/b.pyc", "/app")


@pytest.mark.parametrize("source", ["../secret", "out", "src/../../secret", "missing", "no*such"])
def test_copy_stays_beside_the_recipe(folder: Path, source: str) -> None:
    with pytest.raises(SandboxError, match="line 7"):
        selected(folder, source, "/x")


def test_the_same_files_have_the_same_digest(folder: Path) -> None:
    def digest() -> str:
        return digest_of(Context(folder).select(Copy(1, ("src",), "/app", ""), Stack(())), Job())

    first = digest()
    os.utime(folder / "src" / "a.py", (1, 1))
    assert digest() == first
    (folder / "src" / "a.py").chmod(0o755)
    assert digest() != first
