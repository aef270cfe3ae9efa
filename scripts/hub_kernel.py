"""Writes the experts of transformers 5 models as a kernel of the Hugging Face `kernels` hub.

    python scripts/hub_kernel.py FOLDER

    experts = kernels.get_local_kernel(Path("FOLDER"))    # or get_kernel, once FOLDER was uploaded
    experts.register()

A kernel is one package that may not import others by their names: sources are copied and their imports made relative.
Its operators have its own name, so that an installed foundry_moe can be beside it.
"""

import argparse
import hashlib
import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
NAME = "foundry-moe-experts"
# folders of this tree, and of the kernel
FOLDERS = {"foundry_moe/ops": "ops", "foundry_moe/integrations": "integrations", "kernels": "foundry_moe_kernels"}
INIT = '''"""The experts of transformers 5 models: foundry_moe.integrations.transformers."""

from .integrations.transformers import experts_forward, register

__all__ = ["experts_forward", "register"]
'''


def relative(source: str) -> str:
    """The source of a module one folder below the kernel's."""
    source = re.sub(r"^(\s*)from foundry_moe_kernels(?=[. ])", r"\1from ..foundry_moe_kernels", source, flags=re.M)
    return re.sub(r"^(\s*)from foundry_moe\.", r"\1from ..", source, flags=re.M)


def write(folder: Path) -> Path:
    """Returns the folder of the one variant, which every chip and version of torch loads."""
    files = {
        f"{target}/{file.name}": file.read_text()
        for source, target in FOLDERS.items()
        for file in sorted((ROOT / source).iterdir())
        if file.suffix in (".py", ".json") and file.stem not in ("transformers_parallel", "transformers_trainer")
    }
    files["schema.py"] = (ROOT / "foundry_moe/schema.py").read_text()  # the errors that the operators raise
    digest = hashlib.sha256(json.dumps(files).encode()).hexdigest()[:8]
    kernel = f"{NAME.replace('-', '_')}_{digest}"
    variant = folder / "build" / "torch-universal"
    for name, text in {"__init__.py": INIT, **files}.items():
        (variant / name).parent.mkdir(parents=True, exist_ok=True)
        (variant / name).write_text(relative(text) if name.endswith(".py") else text)
    metadata = {
        "id": kernel, "name": NAME, "version": 1, "license": "Apache-2.0", "python-depends": [],
        "backend": {"type": "cuda"},
    }  # fmt: skip
    (variant / "metadata.json").write_text(json.dumps(metadata, indent=2))
    return variant


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    print(write(parser.parse_args().folder))
