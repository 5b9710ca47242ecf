"""Building a recipe: each RUN in a sandbox of what there is so far, each COPY straight into a layer; a step
that was done before on the same image is taken from the cache."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rollserve.errors import InvalidInput
from rollserve.sandbox.images import context as contexts
from rollserve.sandbox.images.base import Image, ImageConfig, Job, Layer, bad_image
from rollserve.sandbox.images.bench import Bench, BenchWork, in_thread, writing
from rollserve.sandbox.images.importing import Importer
from rollserve.sandbox.images.layer import LayerWriter
from rollserve.sandbox.images.recipe import MAX_RECIPE_BYTES, Copy, Recipe, Run, parse_recipe
from rollserve.sandbox.images.reference import Kind, Reference, parse, registry_place
from rollserve.sandbox.images.store import ImageStore, short

SCRATCH = "scratch"


@dataclass(frozen=True)
class BuildPlan:
    """``recipe`` is the file, ``context`` the folder COPY takes from (the file's own by default).
    ``network`` gives the RUN steps the machine's network; ``step_s`` is the time-out of one."""

    recipe: Path
    context: Path | None = None
    arguments: Mapping[str, str] = field(default_factory=dict)
    network: bool = False
    step_s: float = 1800.0


def read_recipe(path: Path) -> str:
    """Raises ``InvalidInput``."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_RECIPE_BYTES + 1)
        if len(data) > MAX_RECIPE_BYTES:
            raise InvalidInput(f"{path} is larger than {MAX_RECIPE_BYTES} bytes", field="image")
        return data.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{path} can't be read: {error}", field="image") from error


class Builder:
    def __init__(self, store: ImageStore, importer: Importer, bench: Bench) -> None:
        self._store = store
        self._importer = importer
        self._bench = bench

    async def build(self, plan: BuildPlan, job: Job) -> Image:
        """Raises ``InvalidInput`` for the recipe, ``SandboxError`` for a step that fails."""
        text = await asyncio.to_thread(read_recipe, plan.recipe)
        base = await self._base(parse_recipe(text, plan.arguments).base.image, job)
        recipe = parse_recipe(text, plan.arguments, base_env=base.config.env)
        async with in_thread(self._store.adding(f"recipe:{plan.recipe}", job), job):
            made = await self._steps(plan, recipe, base, job)
            config = _final_config(base, recipe)
            names = [layer.name for layer in made.layers]
            document = [base.id, names, config.env, config.workdir, config.user]
            return await asyncio.to_thread(
                self._store.keep,
                short(json.dumps(["recipe", *document])),
                made.layers,
                config=config,
                source=str(plan.recipe),
                base=base.base,
                job=job,
            )

    async def _base(self, text: str, job: Job) -> Image:
        if text == SCRATCH:
            return Image(id=short(SCRATCH), source=SCRATCH)
        stored = await asyncio.to_thread(self._store.stored, text.removeprefix("sha256:"))
        if stored is not None:
            return stored
        reference = await asyncio.to_thread(_base_reference, text)
        if reference.kind is Kind.RECIPE:
            raise InvalidInput(f"FROM {text}: a recipe can't start from a recipe", field="image")
        return await asyncio.to_thread(self._importer.add, reference, job)

    async def _steps(self, plan: BuildPlan, recipe: Recipe, base: Image, job: Job) -> Image:
        context = await asyncio.to_thread(contexts.Context, plan.context or plan.recipe.parent)
        image, key = base, base.id
        for number, step in enumerate(recipe.steps, 1):
            what = f"step {number} of {len(recipe.steps)} (line {step.line})"
            job.tell(what)
            if isinstance(step, Copy):
                layer, key = await asyncio.to_thread(self._copy, context, step, image, key, job)
            else:
                layer, key = await self._run(step, image, key, plan, what, job)
            image = _with_layers(image, (*image.layers, layer))
        return image

    async def _run(
        self, step: Run, image: Image, key: str, plan: BuildPlan, what: str, job: Job
    ) -> tuple[Layer, str]:
        base = image.config
        config = ImageConfig(
            env={**base.env, **step.env},
            workdir=step.workdir or base.workdir,
            user=step.user or base.user,
        )
        document = ["run", key, step.command, config.env, dict(step.arguments), config.workdir, config.user]
        key = short(json.dumps([*document, plan.network]))
        found = await asyncio.to_thread(self._store.stored_layer, key)
        if found is not None:
            return found, key
        work = BenchWork(
            image=Image(id=key, layers=image.layers, base=image.base, config=config, source=image.source),
            commands=(step.command,),
            timeout_s=plan.step_s,
            env=dict(step.arguments),
            on_output=lambda data: job.tell(f"{what}: {_last_line(data)}"),
            what=f"line {step.line}: RUN",
        )
        async with writing(self._store, job, network=plan.network) as writes:
            await self._bench.work(work, writes)
            return await asyncio.to_thread(self._store.adopt, key, writes.upper), key

    def _copy(
        self, context: contexts.Context, step: Copy, image: Image, key: str, job: Job
    ) -> tuple[Layer, str]:
        if image.base:
            raise bad_image(f"line {step.line}: COPY onto {image.base} is not supported", hint="RUN works")
        below = self._store.stack(image.layers)
        copied = context.select(step, below)
        key = short(json.dumps(["copy", key, contexts.digest_of(copied, job)]))

        def fill(folder: Path) -> int:
            budget = self._store.max_bytes
            with LayerWriter(folder, owner=self._store.owner, lower=below, budget_bytes=budget) as writer:
                contexts.write(copied, writer, job)
                return writer.size_bytes

        return self._store.layer(key, fill, job), key


def _with_layers(image: Image, layers: tuple[Layer, ...]) -> Image:
    return Image(id=image.id, layers=layers, base=image.base, config=image.config, source=image.source)


def _final_config(base: Image, recipe: Recipe) -> ImageConfig:
    said = base.config
    return ImageConfig(
        env={**said.env, **recipe.env},
        workdir=recipe.workdir or said.workdir,
        user=recipe.user or said.user,
    )


def _base_reference(text: str) -> Reference:
    """A bare name is one of a registry, as everywhere in recipes."""
    if text == "host" or text.startswith(("/", "docker://", "sha256:")):
        return parse(text)
    return Reference(Kind.REGISTRY, f"docker://{text}", place=registry_place(text))


def _last_line(data: bytes) -> str:
    lines = data.decode(errors="replace").strip().splitlines()
    return lines[-1][:100] if lines else ""
