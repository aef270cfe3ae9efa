"""The README.md of an exported folder: the run's key figures, as Hugging Face's hub shows them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from foundry_moe import __version__
from foundry_moe.commands.export_certificate import FILE, Certificate, Exported


def write_model_card(exported: Exported, certificate: Certificate, folder: Path, *, has_tokenizer: bool) -> None:
    """Figures come from the checkpoint alone: what it does not say is left out."""
    commit, info = exported.found.commit, exported.found.manifest.info
    blocks, summary = exported.native.blocks, commit.summary
    total = sum(target.count for target in exported.targets)
    per_expert = 3 * blocks.d_model * blocks.expert_hidden_size
    active = total - len(blocks.layers) * (blocks.num_experts - blocks.top_k) * per_expert
    rows: list[tuple[str, Any]] = [
        ("family", f"{exported.native.family.name} (`{exported.native.config.model_type}`)"),
        ("parameters", f"{_count(total)}, {_count(active)} of them active for a token"),
        (
            "experts",
            f"{blocks.num_experts} of width {blocks.expert_hidden_size} in {len(blocks.layers)} of {blocks.num_layers} "
            f"layers, {blocks.top_k} for a token",
        ),
        ("dtype", exported.native.config.torch_dtype),
        ("run", info.get("run_name")),
        ("step", commit.step),
        ("tokens", f"{summary['token']:,}" if isinstance(summary.get("token"), int) and summary["token"] else None),
        ("samples", f"{summary['sample']:,}" if isinstance(summary.get("sample"), int) else None),
        ("training loss at that step", f"{summary['loss']:.4f}" if isinstance(summary.get("loss"), float) else None),
        ("saved", summary.get("saved")),
        ("mesh", _mesh(info.get("mesh"))),
        ("trained with", f"foundry_moe {info.get('foundry_moe', '?')}, torch {info.get('torch', '?')}"),
        ("exported with", f"foundry_moe {__version__}"),
    ]
    table = "\n".join(f"| {name} | {value} |" for name, value in rows if value is not None)
    logits = certificate.logits
    compared = (
        f"Its logits in plain transformers differ from the trained model's by at most "
        f"{logits['largest_difference']:.1e} of their standard deviation, in fp32."
        if logits.get("compared")
        else f"Its logits were not compared: {logits.get('why')}."
    )
    tokenizer = "" if has_tokenizer else "\nIt has no tokenizer.\n"
    (folder / "README.md").write_text(
        f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [moe, mixture-of-experts, foundry_moe]
---

# {info.get("run_name") or "A mixture of experts"}

| | |
|---|---|
{table}

```python
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(".")
```
{tokenizer}
Each tensor is, bit for bit, that of the checkpoint; `{FILE}` has their hashes. {compared}
"""
    )


def _count(number: float) -> str:
    for unit in ("", " thousand", " M", " B"):
        if number < 1000 or unit == " B":
            return f"{number:.4g}{unit}"
        number /= 1000
    raise AssertionError


def _mesh(mesh: Any) -> str | None:
    return " x ".join(f"{name} {size}" for name, size in mesh.items()) if isinstance(mesh, dict) else None
