"""rollserve: multi-turn LLM agent episodes as a service, token-exact and durable."""

__version__ = "0.1.0"
