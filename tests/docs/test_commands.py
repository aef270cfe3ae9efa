"""The commands of the how-to pages, as printed, on a tiny run whose checkpoints are on S3 (moto)."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from foundry_moe.launch.run_config import load_run
from tests.helpers.demo import DEMO, ROOT
from tests.helpers.pages import blocks, link_tree, run_block

PLANNED = "yamls/cluster/64x8gpu.yaml"
# other tests run the commands of these pages
ELSEWHERE = {
    "tutorials/own_text.md",
    "tutorials/hugging_face.md",
    "tutorials/cluster.md",
    "tutorials/instructions.md",
    "how-to/plain_pytorch.md",
    "how-to/lora.md",  # tests/commands/test_export_adapter.py
    "explanation/recipe.md",  # hours on a GPU; tests/papers/test_dropping.py
    "how-to/transformers.md",  # an installation: make test-transformers
}
HERE = {f"how-to/{name}.md" for name in ("checkpoints", "export", "mesh", "planning", "recipes")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_arguments, moto) -> Path:
    """`run.yaml`, trained for two batches with its checkpoints in s3://bucket/run, and again in runs/demo."""
    folder = tmp_path_factory.mktemp("how-to")
    link_tree(folder)
    (folder / "foundry_moe_kernels").symlink_to(ROOT / "kernels")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", "http://{}:{}".format(*moto))
        yaml = OmegaConf.create(OmegaConf.to_yaml(load_run(str(DEMO), tiny_arguments(folder / "runs" / "demo"))))
        yaml.max_duration, yaml.eval_interval = "2ba", 0
        OmegaConf.save(yaml, folder / "run.yaml")
        address = "callbacks.elastic_checkpoint.folder=s3://bucket/run/checkpoints"
        run_block(f"foundry-moe train run.yaml -n 2 {address}", folder)
        yield folder


def test_every_page_with_commands_is_run():
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert {page for page in pages if blocks(page, "bash")} == ELSEWHERE | HERE


def test_checkpoints(folder):
    (block,) = blocks("how-to/checkpoints.md", "bash")
    output = run_block(block, folder)
    assert "using s3://bucket/run/checkpoints" in output and "every hash agrees" in output
    assert "meshes of 16" in output and "would remove nothing" in output
    assert "the checkpoint of step 0 in s3://bucket/new" in output
    assert list((folder / "weights").glob("*.safetensors")) and (folder / "state" / ".metadata").is_file()


def test_export(folder):
    (block,) = blocks("how-to/export.md", "bash")
    assert re.search(r"exported: step 2 as \w+", run_block(block, folder))
    assert json.loads((folder / "exported" / "config.json").read_text())["torch_dtype"] == "bfloat16"


@pytest.mark.timeout(1300)  # two blocks train certificates
def test_mesh(folder):
    models, own, plan, nodes = [block for text in blocks("how-to/mesh.md", "bash") for block in split(text)]
    assert "certificates on cpu: largest difference" in run_block(models, folder)
    assert "pass" in run_block(own, folder)
    assert "512 GPUs" in run_block(plan, folder)
    output = run_block(f"export DRY_RUN=1 NODE_RANK=3\n{nodes}", folder)
    assert "--nnodes\n56:64\n" in output and output.endswith("variables.data=DATA\n")


def test_planning(folder):
    (block,) = blocks("how-to/planning.md", "bash")
    *plans, calibration = split(block)
    for plan in plans:
        assert "tokens/s a GPU" in run_block(plan.replace("run.yaml", PLANNED), folder)
    assert "error: " in run_block(f"{calibration.partition('#')[0]} && exit 1 || test $? = 2", folder)  # needs a GPU


def split(block: str) -> list[str]:
    """The commands of a block."""
    return [line for line in block.replace("\\\n", " ").splitlines() if line.strip()]


def test_recipes(folder):
    data = folder / "data" / "instructions"
    data.mkdir(parents=True)
    rows = [{"prompt": f"Who speaks ({i})?", "response": " The President."} for i in range(80)]
    (data / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = [{"context": row["prompt"], "continuation": row["response"]} for row in rows[:4]]
    (data / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in tasks))
    block = next(text for text in blocks("how-to/recipes.md", "bash") if "make demo" in text)
    block = block.replace("make demo\n", "foundry-moe train run.yaml -n 2\n").replace(
        "-n 2\n", "-n 2 max_duration=2ba\n"
    )
    output = run_block(block, folder)
    assert "runs/instructions/exported: step 2 as Mixtral" in output and "answers" in output
