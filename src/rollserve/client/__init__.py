"""The client of a rollserve server: async and typed, with a plain synchronous wrapper.

>>> async with Client("http://127.0.0.1:8700") as client:
...     run = await client.open_run(OpenRun(policy="qwen"))
...     await run.submit([task], num_rollouts=8)
...     async for group in run.groups():
...         train(group.samples)
"""

from rollserve.client.delivery import FinishedGroup, FinishedRollout
from rollserve.client.http import RemoteError
from rollserve.client.runs import Client, RunHandle
from rollserve.client.sync import SyncClient, SyncRun
from rollserve.client.updates import UpdateHandle, Updates

__all__ = [
    "Client",
    "FinishedGroup",
    "FinishedRollout",
    "RemoteError",
    "RunHandle",
    "SyncClient",
    "SyncRun",
    "UpdateHandle",
    "Updates",
]
