"""Trainers and adapters for trainers. They see the service through ``rollserve.client`` alone."""
