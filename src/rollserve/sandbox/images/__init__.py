"""Images: what a sandbox starts from, and the cache on disk that holds them unpacked."""
