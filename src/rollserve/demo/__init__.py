"""The demo: server, inference server and trainer as separate processes that know each other by URL."""
