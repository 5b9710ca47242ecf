"""Policies, their versions, and their backends."""

from __future__ import annotations

from typing import Any

import msgspec
import sqlalchemy as sa
from pydantic import SecretStr

from rollserve.errors import Conflict, LeaseLost, StaleEpoch, VersionRegression
from rollserve.records.policy import (
    Backend,
    BackendInfo,
    BackendSpec,
    BackendState,
    Policy,
    PolicySpec,
    TemplateFinding,
)
from rollserve.records.update import Canary, WeightUpdate
from rollserve.store.ops.missing import no_policy, no_such
from rollserve.store.ops.pages import page
from rollserve.store.ops.tx import Tx, to_json
from rollserve.store.schema import backends, policies
from rollserve.store.values import Page

KEEP_LABELS = 1024
"""Labels of a policy's newest versions that are kept: tokens in flight are never older."""


def _policy(row: Any) -> Policy:
    return Policy(
        spec=PolicySpec.model_validate_json(row.spec),
        version=row.version,
        paused=row.paused,
        labels=msgspec.json.decode(row.labels),
        template=None if row.template is None else TemplateFinding.model_validate_json(row.template),
        weights=row.weights,
        update=None if row.weight_update is None else WeightUpdate.model_validate_json(row.weight_update),
        canary=None if row.canary is None else Canary.model_validate_json(row.canary),
    )


def get_policy(conn: sa.Connection, name: str) -> Policy:
    row = conn.execute(sa.select(policies).where(policies.c.name == name)).one_or_none()
    if row is None:
        raise no_policy(conn, name)
    return _policy(row)


def list_policies(conn: sa.Connection, cursor: str | None, limit: int) -> Page[Policy]:
    return page(conn, sa.select(policies), policies.c.name, _policy, cursor=cursor, limit=limit)


def create_policy(tx: Tx, policy: Policy) -> None:
    name = policy.spec.name
    known = tx.conn.execute(sa.select(policies.c.spec).where(policies.c.name == name)).one_or_none()
    if known is not None:
        if PolicySpec.model_validate_json(known.spec) != policy.spec:
            raise Conflict(f"policy {name!r} exists with another specification", field="name")
        return
    tx.conn.execute(
        sa.insert(policies).values(
            name=name,
            spec=policy.spec.model_dump_json(),
            version=policy.version,
            paused=policy.paused,
            labels=to_json(policy.labels),
            created_at=tx.now,
        )
    )
    tx.emit("policy.created", policy=name, data={"version": policy.version})


def check_version(policy: Policy, version: int, label: str) -> None:
    """Raises ``VersionRegression``; ``Conflict`` for a label that means another version."""
    name = policy.spec.name
    if version < policy.version:
        raise VersionRegression(
            f"policy {name!r} is at version {policy.version}",
            field="version",
            hint="rewind the run to a checkpoint to go back",
        )
    known = policy.labels.get(label)
    if known is not None and known != version:
        raise Conflict(f"label {label!r} already means version {known}", field="label")


def set_policy_version(tx: Tx, name: str, version: int, label: str) -> Policy:
    policy = get_policy(tx.conn, name)
    check_version(policy, version, label)
    if policy.update is not None and policy.update.open:
        raise Conflict(f"update {policy.update.id} of the weights is open", hint="commit or abort it")
    if policy.labels.get(label) == version == policy.version:
        return policy
    return _write_version(tx, policy, version, {**policy.labels, label: version}, {"label": label})


def rewind_policy(tx: Tx, name: str, version: int) -> None:
    """Back to ``version``; the labels of versions after it mean nothing any more."""
    policy = get_policy(tx.conn, name)
    labels = {label: known for label, known in policy.labels.items() if known <= version}
    _write_version(tx, policy, version, labels, {"rewound_from": policy.version})


def _write_version(
    tx: Tx, policy: Policy, version: int, labels: dict[str, int], data: dict[str, Any]
) -> Policy:
    name = policy.spec.name
    if len(labels) > KEEP_LABELS:
        labels = dict(sorted(labels.items(), key=lambda item: item[1])[-KEEP_LABELS:])
    weights = policy.weights + 1
    tx.conn.execute(
        sa.update(policies)
        .where(policies.c.name == name)
        .values(version=version, labels=to_json(labels), weights=weights)
    )
    tx.emit("policy.version", policy=name, data={"version": version, **data})
    return policy.model_copy(update={"version": version, "labels": labels, "weights": weights})


def set_policy_update(tx: Tx, name: str, update: WeightUpdate) -> Policy:
    """Begin an update, or change the one that is known. Raises ``Conflict`` while another is open,
    ``LeaseLost`` where the same one is over."""
    policy = get_policy(tx.conn, name)
    known = policy.update
    if known is not None and known.id != update.id and known.open:
        raise Conflict(f"update {known.id} of {name!r} is open", hint="commit or abort it, or wait for it")
    if known is not None and known.id == update.id and not known.open and known.state is not update.state:
        raise LeaseLost(f"update {known.id} is {known.state.value}: {known.detail or 'it is over'}")
    _write_update(tx, name, update)
    if known is None or known.id != update.id or known.state is not update.state:
        _update_event(tx, update)
    return policy.model_copy(update={"update": update})


def commit_policy_update(tx: Tx, name: str, update: WeightUpdate, canary: Canary | None) -> Policy:
    """End the open update with its version and label, which are the policy's from now on. Raises
    ``LeaseLost`` when it is not open, ``StaleEpoch`` after a rewind, and as ``check_version`` does."""
    policy = get_policy(tx.conn, name)
    known, version, label = policy.update, update.version or 0, update.label or ""
    if known is None or known.id != update.id or not known.open:
        raise LeaseLost(f"update {update.id} is over")
    if policy.weights != update.weights:
        raise StaleEpoch(f"policy {name!r} was rewound since update {update.id} was begun")
    check_version(policy, version, label)
    policy = _write_version(tx, policy, version, {**policy.labels, label: version}, {"label": label})
    _write_update(tx, name, update)
    _update_event(tx, update)
    if canary is not None:
        set_policy_canary(tx, name, canary)
    return policy.model_copy(update={"update": update, "canary": canary or policy.canary})


def set_policy_canary(tx: Tx, name: str, canary: Canary) -> None:
    found = sa.update(policies).where(policies.c.name == name).values(canary=canary.model_dump_json())
    tx.conn.execute(found)
    data = {
        "version": canary.version,
        "verdict": canary.verdict,
        "detail": canary.detail,
        "backends": {backend_id: finding.verdict for backend_id, finding in canary.backends.items()},
    }
    tx.emit("policy.canary", policy=name, data=data)


def _write_update(tx: Tx, name: str, update: WeightUpdate) -> None:
    values = {"weight_update": update.model_dump_json()}
    tx.conn.execute(sa.update(policies).where(policies.c.name == name).values(**values))


def _update_event(tx: Tx, update: WeightUpdate) -> None:
    data = {
        "update_id": update.id,
        "mode": update.mode.value,
        "from_version": update.from_version,
        "version": update.version,
        "detail": update.detail,
    }
    tx.emit(f"policy.update_{update.state.value}", policy=update.policy, data=data)


def set_policy_paused(tx: Tx, name: str, paused: bool) -> Policy:
    policy = get_policy(tx.conn, name)
    if policy.paused == paused:
        return policy
    tx.conn.execute(sa.update(policies).where(policies.c.name == name).values(paused=paused))
    tx.emit("policy.paused" if paused else "policy.resumed", policy=name)
    return policy.model_copy(update={"paused": paused})


def set_policy_template(tx: Tx, name: str, finding: TemplateFinding) -> Policy:
    policy = get_policy(tx.conn, name)
    tx.conn.execute(
        sa.update(policies).where(policies.c.name == name).values(template=finding.model_dump_json())
    )
    verdicts = {"keep": finding.keep.verdict, "strip": finding.strip.verdict}
    tx.emit("policy.template", policy=name, data=verdicts)
    return policy.model_copy(update={"template": finding})


def _backend(row: Any) -> Backend:
    spec = BackendSpec.model_validate_json(row.spec)
    if row.api_key is not None:
        spec = spec.model_copy(update={"api_key": SecretStr(row.api_key)})
    return Backend(
        id=row.id,
        policy=row.policy,
        spec=spec,
        info=BackendInfo.model_validate_json(row.info),
        state=row.state,
        error=row.error,
    )


def put_backend(tx: Tx, backend: Backend) -> None:
    """Insert or replace. Raises ``NotFound`` without its policy."""
    get_policy(tx.conn, backend.policy)
    secret = backend.spec.api_key
    values = {
        "policy": backend.policy,
        "spec": backend.spec.model_dump_json(exclude={"api_key"}),
        "api_key": None if secret is None else secret.get_secret_value(),
        "info": backend.info.model_dump_json(),
        "state": backend.state.value,
        "error": backend.error,
    }
    old = tx.conn.execute(sa.select(backends.c.state).where(backends.c.id == backend.id)).one_or_none()
    if old is None:
        tx.conn.execute(sa.insert(backends).values(id=backend.id, **values))
        _backend_event(tx, "backend.registered", backend)
        return
    tx.conn.execute(sa.update(backends).where(backends.c.id == backend.id).values(**values))
    if BackendState(old.state) is not backend.state:
        _backend_event(tx, f"backend.{backend.state.value}", backend)


def _backend_event(tx: Tx, event_type: str, backend: Backend) -> None:
    data = {"backend_id": backend.id, "state": backend.state.value, "error": backend.error}
    tx.emit(event_type, policy=backend.policy, data=data)


def get_backend(conn: sa.Connection, backend_id: str) -> Backend:
    row = conn.execute(sa.select(backends).where(backends.c.id == backend_id)).one_or_none()
    if row is None:
        raise no_such(conn, "backend", backend_id)
    return _backend(row)


def list_backends(conn: sa.Connection, policy: str | None, cursor: str | None, limit: int) -> Page[Backend]:
    query = sa.select(backends)
    if policy is not None:
        query = query.where(backends.c.policy == policy)
    return page(conn, query, backends.c.seq, _backend, cursor=cursor, limit=limit)


def delete_backend(tx: Tx, backend_id: str) -> None:
    backend = get_backend(tx.conn, backend_id)
    tx.conn.execute(sa.delete(backends).where(backends.c.id == backend_id))
    _backend_event(tx, "backend.removed", backend)
