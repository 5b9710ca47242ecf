"""Fakes and a conformance suite per contract: shipped, so that others can test theirs."""
