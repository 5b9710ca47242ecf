"""The composition root: settings in, wired objects out. The only place that sees contracts and
implementations together."""
