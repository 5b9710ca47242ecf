from tests.integration.conftest import backend_url, engine, make_server, runtime, server

__all__ = ["backend_url", "engine", "make_server", "runtime", "server"]
