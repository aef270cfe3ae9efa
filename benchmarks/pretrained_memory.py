"""Peak host memory of processes that read a pretrained model on a mesh: python benchmarks/pretrained_memory.py FOLDER

Writes a random Mixtral of about 2 GB (fp32) to FOLDER unless one is there, reads it on a mesh of (1, 2, 2), and prints
for each rank what its memory rose by at most: anonymous memory, and with the pages of the files that it has mapped.
"""

from __future__ import annotations

import argparse
import json
import threading
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import MixtralConfig

from foundry_moe.launch.processes import run_processes
from foundry_moe.models.families import family_of
from tests.distributed import pretrained_worker
from tests.distributed.launching import PRELOAD

MESH = {"replicate": 1, "shard": 2, "expert": 2}
SHAPE: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 2304,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 8192,
}


def write(folder: Path) -> None:
    """A file a layer, so that the model is nowhere whole."""
    config = MixtralConfig(**SHAPE, architectures=["MixtralForCausalLM"])
    folder.mkdir(parents=True)
    config.save_pretrained(folder)
    family, d_model, kv = family_of(config), config.hidden_size, 512
    ends = {
        "model.embed_tokens.weight": (8192, d_model),
        "lm_head.weight": (8192, d_model),
        "model.norm.weight": (d_model,),
    }
    groups: list[dict[str, tuple[int, ...]]] = [ends]
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}"
        shapes = {
            f"{family.block_name(layer)}.{part.theirs}": part.their_shape for part in family.parts(family.read(config))
        }
        rows = {"q_proj": d_model, "k_proj": kv, "v_proj": kv}
        shapes |= {f"{prefix}.self_attn.{name}.weight": (size, d_model) for name, size in rows.items()}
        shapes[f"{prefix}.self_attn.o_proj.weight"] = (d_model, d_model)
        shapes |= {f"{prefix}.{name}.weight": (d_model,) for name in ("input_layernorm", "post_attention_layernorm")}
        groups.append(shapes)
    names: dict[str, str] = {}
    for number, group in enumerate(groups, 1):
        name = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        save_file({key: torch.randn(shape) * 0.02 for key, shape in group.items()}, folder / name, {"format": "pt"})
        names |= dict.fromkeys(group, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))


def memory() -> dict[str, int]:
    """Bytes: anonymous, and all that is resident."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {name: int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "VmRSS")}


def measure(folder: str) -> list[dict[str, float]]:
    """On each rank; returns all ranks' peaks."""
    import torch.distributed as dist

    before, peak = memory(), dict(memory())
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.005):
            for name, size in memory().items():
                peak[name] = max(peak[name], size)

    thread = threading.Thread(target=watch)
    thread.start()
    trainer = pretrained_worker.build(folder, {"num_experts": 8, "top_k": 2}, MESH)
    done.set()
    thread.join()
    held = sum(p.to_local().nbytes for p in trainer.state.model.parameters())
    mine = {name: (peak[name] - before[name]) / 1e9 for name in peak} | {
        "held": held / 1e9,
        "before": before["VmRSS"] / 1e9,
    }
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    if not folder.exists():
        write(folder)
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors")) / 1e9
    print(f"model: {size:.2f} GB in {len(list(folder.glob('*.safetensors')))} files, mesh (1, 2, 2)")
    for rank, found in enumerate(run_processes(measure, str(folder), world_size=4, preload=PRELOAD, timeout_s=900)):
        print(
            f"rank {rank}: parameters {found['held']:.2f} GB; peak above the start ({found['before']:.2f} GB): "
            f"anonymous {found['RssAnon']:.2f} GB, resident {found['VmRSS']:.2f} GB"
        )


if __name__ == "__main__":
    main()
