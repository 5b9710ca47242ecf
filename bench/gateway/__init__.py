"""The parts of ``gateway_http``."""
