"""Where a tokenizer is read from: the shipped one, a folder, a file, or the Hugging Face hub.

``hf_hub_download`` goes on asking a hub that it can't reach for about 25 s, a file. So the hub is looked
at once, with the library's own time-out (``HF_HUB_ETAG_TIMEOUT``, 10 s); out of reach, only what this
machine's cache holds is read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollserve.errors import InvalidInput
from rollserve.tiny_tokenizer import tokenizer_file

TINY = "tiny"
"""The name of the shipped one."""

MAIN = "tokenizer.json"
_FILES = (MAIN, "tokenizer_config.json", "chat_template.jinja")
_FOLDER = f"give a folder with {MAIN} that the server and its workers can read"
_REASON_CHARS = 300


@dataclass(frozen=True, kw_only=True)
class TokenizerFiles:
    """A tokenizer as found: its JSON, its settings, its chat template."""

    name: str
    tokenizer_json: str
    settings: dict[str, Any] = field(default_factory=dict)
    chat_template: str | None = None


def read_files(name: str) -> TokenizerFiles:
    """Blocking. Raises ``InvalidInput`` (field ``tokenizer``)."""
    if name == TINY:
        return _from_folder(name, tokenizer_file().parent)
    path = Path(name)
    if path.is_dir():
        return _from_folder(name, path)
    if path.is_file():
        return _from_folder(name, path.parent, path.name)
    if path.is_absolute() or name.startswith(".") or name.endswith(".json") or not _may_be_on_hub(name):
        raise _refused(f"no such file or directory: {name}", _here(path))
    return _from_hub(name)


def _here(path: Path) -> str:
    return _FOLDER if path.is_absolute() else f"{_FOLDER}; a relative one is looked for in {Path.cwd()}"


def _refused(message: str, hint: str | None = None) -> InvalidInput:
    return InvalidInput(message, field="tokenizer", hint=hint)


def _from_folder(name: str, folder: Path, file: str = MAIN) -> TokenizerFiles:
    return _assemble(name, {path.name: path for path in _candidates(folder, file)}, file)


def _candidates(folder: Path, file: str) -> Iterator[Path]:
    for each in (file, *_FILES[1:]):
        if (folder / each).is_file():
            yield folder / each


def _may_be_on_hub(name: str) -> bool:
    """By its form alone."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.errors import HFValidationError

    try:
        hf_hub_url(name, MAIN)
    except HFValidationError:
        return False
    return True


def _from_hub(name: str) -> TokenizerFiles:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    away = _out_of_reach(name)
    found: dict[str, Path] = {}
    for file in _FILES:
        try:
            found[file] = Path(hf_hub_download(name, file, local_files_only=away is not None))
        except EntryNotFoundError:
            continue  # optional, or reported below
        except Exception as error:  # as in _out_of_reach
            raise _refused(f"can't get {file} of {name!r} from the hub: {_said(error)}", _FOLDER) from error
    if away is not None and MAIN not in found:
        here = f"no folder {name!r} in {Path.cwd()}"
        raise _refused(
            f"{here}, and the hub can't be asked for a model of that name ({away})",
            f"{_FOLDER}, or put the hub's files into this machine's cache, where there is a network: "
            f"`hf download {name} {' '.join(_FILES)}`; with HF_HUB_OFFLINE=1 the hub is not looked for",
        )
    return _assemble(name, found, MAIN)


def _out_of_reach(name: str) -> str | None:
    """Why the hub can't be asked; None when it has the model. Raises ``InvalidInput`` when it has not."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import (
        GatedRepoError,
        OfflineModeIsEnabled,
        RemoteEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        get_hf_file_metadata(hf_hub_url(name, MAIN))
    except RemoteEntryNotFoundError as error:
        raise _refused(f"the hub's model {name!r} has no {MAIN}", _FOLDER) from error
    except GatedRepoError as error:
        hint = f"accept its terms there, and set HF_TOKEN for the server and its workers; or {_FOLDER}"
        raise _refused(f"the hub gives the model {name!r} only to those it knows", hint) from error
    except RepositoryNotFoundError as error:
        raise _refused(
            f"no folder {name!r} in {Path.cwd()}, and no model of that name on the hub",
            f"{_FOLDER}; one that is private needs HF_TOKEN",
        ) from error
    except OfflineModeIsEnabled:
        return "HF_HUB_OFFLINE is set"
    except Exception as error:  # of its HTTP library, which is its own affair
        return _said(error)
    return None


def _said(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:_REASON_CHARS]


def _assemble(name: str, found: dict[str, Path], file: str) -> TokenizerFiles:
    if file not in found:
        raise _refused(
            f"{name!r} has no {file}", "`tokenizer.save_pretrained(FOLDER)` of a fast tokenizer writes one"
        )
    settings: dict[str, Any] = {}
    try:
        if "tokenizer_config.json" in found:
            settings = json.loads(found["tokenizer_config.json"].read_text())
        template = settings.get("chat_template")
        if "chat_template.jinja" in found:
            template = found["chat_template.jinja"].read_text()
        tokenizer_json = found[file].read_text()
    except (ValueError, OSError) as error:
        raise _refused(f"can't read the tokenizer {name!r}: {error}") from error
    return TokenizerFiles(
        name=name,
        tokenizer_json=tokenizer_json,
        settings=settings,
        chat_template=_default_template(template),
    )


def _default_template(value: object) -> str | None:
    """Some settings hold several templates by name."""
    if isinstance(value, list):
        named = {t.get("name"): t.get("template") for t in value if isinstance(t, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None
