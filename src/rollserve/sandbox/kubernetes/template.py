"""The operator's template of a pod, laid under ours.

Objects are merged, containers by name (``sandbox`` is the sandbox's), other lists are joined, and where both
say something ours wins.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollserve.errors import ConfigError

_JOINED = frozenset({"volumes", "volumeMounts", "tolerations", "imagePullSecrets"})


def read_template(path: Path | None) -> dict[str, Any]:
    """Blocking. Raises ``ConfigError``."""
    if path is None:
        return {}
    import msgspec
    import yaml
    from lightkube.resources.core_v1 import Pod

    try:
        read = yaml.safe_load(path.read_text())
        if not isinstance(read, dict):
            raise ConfigError(f"{path} holds no pod", field="kubernetes.pod_template")
        spec = read.get("spec") or {}
        whole = {**read, "spec": {"containers": [], **spec} if isinstance(spec, dict) else spec}
        _check(read, Pod.from_dict(whole).to_dict())
    except (OSError, UnicodeDecodeError, yaml.YAMLError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path}: {error}", field="kubernetes.pod_template") from error
    return read


def _check(given: Any, understood: Any, place: str = "pod_template") -> None:
    """Everything in ``given`` must be in ``understood``, which is the pod as its types have it. Raises
    ``ConfigError`` for a name that Kubernetes would pass over."""
    if isinstance(given, Mapping) and isinstance(understood, Mapping):
        for name, value in given.items():
            if value is not None and name not in understood:
                raise ConfigError(f"a pod has no {place}.{name}", field="kubernetes.pod_template")
            _check(value, understood.get(name), f"{place}.{name}")
    elif isinstance(given, list) and isinstance(understood, list):
        for number, (one, other) in enumerate(zip(given, understood, strict=True)):
            _check(one, other, f"{place}[{number}]")


def merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    both = dict(under)
    for name, value in over.items():
        below = both.get(name)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            both[name] = merged(below, value)
        elif isinstance(below, list) and name == "containers":
            both[name] = _by_name(below, value)
        elif isinstance(below, list) and name in _JOINED:
            both[name] = [*below, *value]
        else:
            both[name] = value
    return both


def _by_name(under: list[Any], over: list[Any]) -> list[Any]:
    """What comes first is what tools take for the pod's own."""
    (ours,) = over
    same: Mapping[str, Any] = next((each for each in under if each.get("name") == ours["name"]), {})
    return [merged(same, ours), *(each for each in under if each is not same)]
