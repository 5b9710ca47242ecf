"""Inside a host: find what an import path names, check it, describe it."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

from rollserve.errors import InvalidInput, listed, nearest
from rollserve.usercode.arguments import argument_model, parameters_schema, summary
from rollserve.usercode.base import CodeFault, CodeInfo, Ending, Role
from rollserve.usercode.child import headline, tail
from rollserve.usercode.sources import Sources


def split(path: str) -> tuple[str, str]:
    """``package.module:attribute`` in two. Raises ``InvalidInput``."""
    module, colon, attribute = path.partition(":")
    words = [*module.split("."), *attribute.split(".")]
    if not colon or not all(word.isidentifier() for word in words):
        raise InvalidInput(f"{path!r} is no import path", hint="package.module:name")
    return module, attribute


def load_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            hint = "it must be installed where rollserve is, or lie in the folder that --code-dir names"
            raise InvalidInput(f"no module named {error.name!r}", hint=hint) from None
        raise CodeFault(
            f"importing {name!r} failed: {error}", ending=Ending.RAISED, trace=tail(error)
        ) from None
    except SystemExit as error:
        message = f"importing {name!r} called sys.exit({error.code!r})"
        raise CodeFault(message, ending=Ending.EXITED, trace=tail(error)) from None
    except Exception as error:  # the edge to the user's module-level code
        message = f"importing {name!r} failed: {headline(error)}"
        raise CodeFault(message, ending=Ending.RAISED, trace=tail(error)) from None


def load(path: str) -> Any:
    """The object ``path`` names. Raises ``InvalidInput``, or ``CodeFault`` when importing crashed."""
    module_name, attribute = split(path)
    found: Any = load_module(module_name)
    where = f"module {module_name!r}"
    for part in attribute.split("."):
        if not hasattr(found, part):
            public = [name for name in dir(found) if not name.startswith("_")]
            raise InvalidInput(f"{where} has no {part!r}", hint=nearest(part, public) or listed(public))
        found = getattr(found, part)
        where = repr(part)
    return found


def describe(path: str, role: Role, sources: Sources) -> CodeInfo:
    """Import and check. Raises like ``load``, and ``InvalidInput`` when it can't play ``role``."""
    threads = threading.active_count()
    found = load(path)
    if not callable(found):
        raise InvalidInput(f"{path!r} is a {type(found).__name__}, not something that can be called")
    _CHECKS[role](path, found)
    skip = given_first(found, role)
    parameters: dict[str, Any] = {}
    if role is not Role.ANY:
        try:
            parameters = parameters_schema(argument_model(found, skip=skip))
        except (TypeError, ValueError, NameError) as error:
            raise InvalidInput(f"{path!r} can't be used as {_a(role)}: {error}") from None
    module = sys.modules[split(path)[0]]
    return CodeInfo(
        path=path,
        role=role,
        name=path.rpartition(":")[2].rpartition(".")[2],
        module=module.__name__,
        description=summary(found),
        parameters=parameters,
        wants_sandbox=role is Role.TOOL and skip > 0,
        version=version(module, sources),
        forkable=threading.active_count() == threads,
    )


def given_first(found: Any, role: Role) -> int:
    """How many positional parameters are ours to give: a grader's grading, a tool's sandbox."""
    if role is Role.TOOL:
        return int(next(iter(inspect.signature(found).parameters), None) == "sandbox")
    return int(role is Role.GRADER)


def _a(role: Role) -> str:
    return f"an {role}" if role is Role.AGENT else f"a {role}"


def _check_agent(path: str, found: Any) -> None:
    if not inspect.isclass(found):
        raise InvalidInput(
            f"{path!r} is not a class", hint="an agent is a class with `async def run(self, episode)`"
        )
    run = getattr(found, "run", None)
    if not inspect.iscoroutinefunction(run):
        raise InvalidInput(f"{path!r} has no `async def run(self, episode)`")
    _needs_positional(f"{path}.run", run, ("self", "episode"))


def _check_grader(path: str, found: Any) -> None:
    if inspect.isclass(found):
        raise InvalidInput(f"{path!r} is a class", hint="a grader is a function of one argument, the grading")
    _needs_positional(path, found, ("grading",))


def _check_tool(path: str, found: Any) -> None:
    if inspect.isclass(found):
        raise InvalidInput(f"{path!r} is a class", hint="a tool is a function")


def _needs_positional(path: str, function: Callable[..., Any], names: tuple[str, ...]) -> None:
    """Raise ``InvalidInput`` unless ``function(*names)`` is a call it can take, options aside."""
    parameters = list(inspect.signature(function).parameters.values())
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(positional) < len(names) and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        wanted, given = ", ".join(names), inspect.signature(function)
        raise InvalidInput(f"{path!r} must take ({wanted}), not {given}")


_CHECKS: dict[Role, Callable[[str, Any], None]] = {
    Role.AGENT: _check_agent,
    Role.GRADER: _check_grader,
    Role.TOOL: _check_tool,
    Role.ANY: lambda path, found: None,
}


def version(module: ModuleType, sources: Sources) -> str:
    """What identifies the code: the hash of the module's source, and its distribution's version."""
    parts = []
    source = getattr(module, "__file__", None)
    if source:
        parts.append(sources.digest(source))
    if distribution := _distribution(module.__name__.partition(".")[0], source or ""):
        parts.append(f"{distribution.metadata['Name']}=={distribution.version}")
    return " ".join(parts)


def _distribution(package: str, source: str) -> importlib.metadata.Distribution | None:
    """The installed distribution ``package`` belongs to. Listing them all takes a while, so that is
    done only for a module that was installed under another name than its distribution's."""
    try:
        return importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        if "-packages" not in source:
            return None
    names = importlib.metadata.packages_distributions().get(package, [])
    return importlib.metadata.distribution(names[0]) if names else None
