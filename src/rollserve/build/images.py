"""The images of this machine: the cache as the settings have it, and the runtime that builds in it."""

from __future__ import annotations

from rollserve.config import Settings
from rollserve.sandbox.bubblewrap import BubblewrapRuntime
from rollserve.sandbox.images.reference import RegistryAccess
from rollserve.sandbox.images.shelf import ImageSettings


def image_settings(settings: Settings) -> ImageSettings:
    images = settings.images
    return ImageSettings(
        folder=settings.image_folder,
        max_bytes=int(images.max_gb * 1e9),
        prepare_s=images.prepare_s,
        step_s=images.step_s,
        access=RegistryAccess(
            auth_file=settings.registry_auth_file, insecure=tuple(images.insecure_registries)
        ),
    )


def image_runtime(settings: Settings) -> BubblewrapRuntime:
    """Its ``images`` are the cache's. Call it on the thread of an event loop; close it."""
    folder = settings.data_dir.absolute() / "runtimes"
    return BubblewrapRuntime(data_dir=folder, images=image_settings(settings))
