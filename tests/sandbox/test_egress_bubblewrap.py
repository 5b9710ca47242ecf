"""A real sandbox with a network: programs that heed the environment get out, as far as they may."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollserve.records.network import AllowedHosts
from rollserve.sandbox.base import SandboxSpec, exports
from rollserve.sandbox.bubblewrap import BubblewrapRuntime
from rollserve.sandbox.egress.addresses import AddressRules
from rollserve.sandbox.egress.proxy import Egress
from rollserve.testing.fake_internet import SITE, FakeInternet
from rollserve.testing.runtime_probes import OWNER, TTL_S, dial, greeting

pytestmark = pytest.mark.userns

FETCH = (
    "import sys, urllib.request, urllib.error\n"
    "try: print(urllib.request.urlopen(sys.argv[1], timeout=20).read().decode())\n"
    "except urllib.error.HTTPError as error: print(error.code, error.read().decode())\n"
)


async def test_programs_reach_what_is_allowed_and_their_own_loopback_address(tmp_path: Path) -> None:
    runtime = BubblewrapRuntime(data_dir=tmp_path)
    if not (report := runtime.report()).usable:
        pytest.skip(f"bubblewrap can't be used here: {report.detail}")
    net = FakeInternet({"site.test": [[SITE]]})
    log: list[str] = []
    egress = Egress(rules=AddressRules(), internet=net.internet)
    try:
        box = await runtime.create(SandboxSpec(files={"f.py": FETCH.encode()}), owner=OWNER, ttl_s=TTL_S)
        if (await box.exec("command -v python3 && command -v bash")).exit_code != 0:
            pytest.skip("the host has no python3")
        allowed = AllowedHosts(allow=["site.test"])
        async with egress.serve(allowed, await box.listen(), log=log.append) as env:
            await box.exec(exports(env))
            assert (await box.exec("python3 f.py http://site.test/a")).output == f"this is {SITE}:80\n\n"
            refused = (await box.exec("python3 f.py http://other.test/")).output
            assert refused.startswith("403 other.test:80 is refused: the task's network does not allow")
            consoles = await box.open_console()
            await consoles.begin("python3 f.py http://site.test/b", timeout_s=60)
            assert SITE in (await consoles.look(None)).output
            async with greeting(await box.listen()) as port:
                assert (await box.exec(dial(port))).output == "hello inside\n"
        assert (await box.exec("python3 f.py http://site.test/a")).exit_code != 0
        assert [line for line in log if "site.test" in line] == ["network: site.test:80 allowed"]
    finally:
        await runtime.close()
        await net.close()
