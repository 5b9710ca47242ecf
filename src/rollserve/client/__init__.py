"""The client of a rollserve server: async and typed, with a plain synchronous wrapper.

>>> async with Client("http://127.0.0.1:8700") as client:
...     run = await client.open_run(OpenRun(policy="qwen"))
...     await run.submit([task], num_rollouts=8)
...     async for group in run.groups():
...         train(group.samples)
"""

from rollserve.client.callbacks import Callback
from rollserve.client.client import Client
from rollserve.client.delivery import ExportedGroup, FinishedGroup, FinishedRollout
from rollserve.client.http import RemoteError, Unreachable
from rollserve.client.runs import RunHandle
from rollserve.client.sync import SyncClient, SyncRun
from rollserve.client.updates import UpdateHandle, Updates
from rollserve.webhooks import new_secret
from rollserve.webhooks import verify as verify_callback

__all__ = [
    "Callback",
    "Client",
    "ExportedGroup",
    "FinishedGroup",
    "FinishedRollout",
    "RemoteError",
    "RunHandle",
    "SyncClient",
    "SyncRun",
    "Unreachable",
    "UpdateHandle",
    "Updates",
    "new_secret",
    "verify_callback",
]
