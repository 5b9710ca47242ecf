"""What a worker makes of its settings."""

from __future__ import annotations

from rollserve.build.worker import image_bounds
from rollserve.config import GatewaySettings
from rollserve.gateway.images import ImageBounds


def test_bounds_of_images_are_in_bytes() -> None:
    settings = GatewaySettings(image_mb=1, request_images=2, session_images_mb=3)
    assert image_bounds(settings) == ImageBounds(image_bytes=1 << 20, request_images=2, session_bytes=3 << 20)
    assert image_bounds(GatewaySettings()) == ImageBounds()
