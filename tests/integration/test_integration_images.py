"""Episodes in images of the cache, through the service."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rollserve.records.rollout import RolloutState
from rollserve.testing.image_files import Member, make_image, small_root, tar_of
from rollserve.tiny_tokenizer import TinyTokenizer
from rollserve.wire import OpenRun
from tests.integration.conftest import Server, add_policy, finished, play, shell_task


@pytest.fixture
def archive(open_dir: Path) -> Path:
    root = tar_of(small_root(("sh", "cat", "head", "mkdir", "echo")))
    change = tar_of([Member("etc/note", b"from the image")])
    settings = {"WorkingDir": "/srv", "Env": ["PATH=/bin"]}
    return make_image([root, change], settings=settings).write_archive(open_dir / "i.tar")


@pytest.mark.userns
async def test_a_task_runs_in_its_prepared_image(
    make_server: Callable[..., Server], runtime: str, backend_url: str, open_dir: Path, archive: Path
) -> None:
    if runtime != "bubblewrap":
        pytest.skip("bubblewrap can't be used here")
    server = make_server(f"images.dir={open_dir}/images", "workers.count=2")
    await server.start()
    prepare = ["cat /etc/note > note; echo and 42 >> note"]
    async with server.client() as client:
        await add_policy(client, backend_url)
        run = await client.open_run(OpenRun(policy="tiny"))
        task = shell_task(image=str(archive), prepare=prepare, files={})
        await run.submit([task], num_rollouts=4)
        (group,) = await finished(run, 1)
        assert [one.rollout.state for one in group.rollouts] == [RolloutState.COMPLETED] * 4
        assert [one.reward for one in group.rollouts] == [1.0] * 4
        text = TinyTokenizer().decode([int(i) for i in group.rollouts[0].samples[0].ids])
        assert text.count("<tool_response>\nfrom the imageand 42\n/srv\n</tool_response>") == 2
        broken = await play(client, image=str(archive), prepare=["echo it broke; exit 7"], files={})
        (rollout,) = broken.rollouts
        assert rollout.rollout.state is RolloutState.FAILED
        assert rollout.reward is None
        status = await client.rollout(rollout.rollout.id)
        assert r"ended with code 7:\nit broke" in status.model_dump_json()
    (user,) = (open_dir / "images").iterdir()
    assert len(list((user / "layers").iterdir())) == 3
    assert list((user / "tmp").iterdir()) == []
