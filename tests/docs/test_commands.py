"""The commands of the how-to pages, as printed, on a tiny run whose checkpoints are on S3 (moto)."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from benchmarks.papers import dropping, make_text
from foundry_moe import MoEConfig, apply_dmoe
from foundry_moe.cli import parse
from foundry_moe.launch.run_config import load_run
from foundry_moe.models.families import family_of
from tests.helpers.demo import DEMO, ROOT
from tests.helpers.exporting import Wrapped, commit
from tests.helpers.families import small
from tests.helpers.pages import blocks, link_tree, run_block

PLANNED = "yamls/cluster/64x8gpu.yaml"
# other tests run the commands of these pages
ELSEWHERE = {
    "tutorials/own_text.md",
    "tutorials/hugging_face.md",
    "tutorials/cluster.md",
    "tutorials/instructions.md",
    "how-to/plain_pytorch.md",
}
HERE = {
    f"how-to/{name}.md" for name in ("checkpoints", "export", "lora", "mesh", "planning", "recipes", "transformers")
}
HERE |= {"explanation/recipe.md"}
README = (ROOT / "README.md").read_text()


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


def test_lora(folder):
    (block,) = blocks("how-to/lora.md", "bash")
    model = small("mixtral")
    experts = family_of("mixtral").read(model.config)
    apply_dmoe(model, MoEConfig(num_experts=experts.num_experts, top_k=experts.top_k, lora={"r": 4}))
    commit(Wrapped(model), folder / "runs" / "lora")
    run_block(block, folder)
    assert list((folder / "merged").glob("*.safetensors"))
    for name in ("adapter", "adapter_vllm"):
        assert (folder / name / "adapter_model.safetensors").is_file()


def test_mesh(folder):
    models, own, plan, nodes = [block for text in blocks("how-to/mesh.md", "bash") for block in split(text)]
    models = models.replace("--mesh 1,2,2 2,1,2", "--mesh 1,1,2").partition("#")[0]  # two processes in place of four
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


@pytest.mark.parametrize(
    "line", [*blocks("how-to/transformers.md", "bash"), *re.findall(r"^(?:uv )?pip install .*$", README, re.M)]
)
def test_installation(line):
    """Without other packages and without changes: the project with this extra, and the file of overrides, exist."""
    command = line.partition("#")[0].strip()
    only = "--no-deps" if command.startswith("uv") else "--no-deps --no-build-isolation --no-index --ignore-installed"
    output = run_block(f"{command} --dry-run {only}", ROOT)
    assert "foundry_moe" in output.replace("-", "_") and "does not" not in output, output


def test_recipe(monkeypatch, tmp_path):
    """All but the training of many hours."""
    (block,) = blocks("explanation/recipe.md", "bash")
    monkeypatch.chdir(tmp_path)
    texts, runs = split(block)

    class Read(Exception):
        pass

    def read(folder: Path) -> None:
        raise Read(folder)

    for line, module, reads in ((texts, make_text, "fetch_sources"), (runs, dropping, "read_tokens")):
        command = shlex.split(line, comments=True)
        assert command[:3] == ["python", "-m", module.__name__]
        monkeypatch.setattr("sys.argv", command[2:])
        monkeypatch.setattr(module, reads, read)
        with pytest.raises(Read):
            module.main()


def test_commands_in_tables_and_sentences(folder):
    """`check` and `plan` run as printed, others are parsed. N, FILE and the like stand for the user's values."""
    text = "\n".join(path.read_text() for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
    commands = {line.replace(" key=value ...", "") for line in re.findall(r"`foundry-moe ([^`]+)`", text)}
    fragments = re.compile(r"checkpoint 1|check --|export --")
    commands = {line.replace("--gpus N", "--gpus 8") for line in commands if " " in line and not fragments.match(line)}
    assert len(commands) > 8
    for line in commands:
        arguments = parse(line.split())
        if line.startswith(("check yamls", "plan yamls")):
            run_block(f"foundry-moe {line}", folder)
        elif line.startswith("check run.yaml"):
            run_block(f"foundry-moe {line} global_train_batch_size=8", folder)
        assert arguments.run
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
    assert set(re.findall(r"`make ([\w-]+)", text)) <= set(targets)


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
