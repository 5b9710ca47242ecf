from tests.integration.conftest import (
    backend_url,
    engine,
    lasting_server,
    make_server,
    runtime,
    server,
    shared_server,
)

__all__ = ["backend_url", "engine", "lasting_server", "make_server", "runtime", "server", "shared_server"]
