"""Frozen facts, without I/O. Cold facts (configuration, states) are pydantic models, so that the
edge validates them with the field at fault; hot ones (calls, samples) are msgspec structs."""
