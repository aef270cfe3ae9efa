"""The commands of the how-to pages, as printed, on a tiny run whose checkpoints are on S3 (moto)."""

from __future__ import annotations

import argparse
import json
import re
import runpy
import shlex
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from benchmarks.papers import dropping, make_text, recipe
from foundry_moe import MoEConfig, apply_dmoe
from foundry_moe.cli import main
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
    "how-to/block_sparse.md",
    "how-to/certify.md",
    "how-to/plain_pytorch.md",
    "how-to/transformers_parallel.md",
    "how-to/router_replay.md",
}
HERE = {
    f"how-to/{name}.md" for name in ("checkpoints", "export", "lora", "mesh", "planning", "recipes", "transformers")
}
HERE |= {"explanation/recipe.md"}
README_PATH = ROOT / "README.md"
PAGES = [README_PATH, *(ROOT / "docs").rglob("*.md")]
PROGRAMS = (
    r"bash|buildah|composer|docker|docker/\S+|kubectl|llmfoundry|make|mcli|pip|pytest|python|sbatch|sh|torchrun|uv"
)
# `foundry-moe plan` alone is a name, not a command; the file format of checkpoints has its own word
COMMAND = re.compile(rf"(?:[A-Z_]+=\S+ )*(?:(?:{PROGRAMS}) \S|foundry-moe \w+ (?!1$)\S)")
DRY = "--dry-run --no-deps --no-build-isolation --no-index --ignore-installed"
S3 = "callbacks.elastic_checkpoint.folder=s3://bucket/run/checkpoints"
README = README_PATH.read_text()
# commands in tables and sentences, and what is run in the place of each; None: as printed
RUN = {
    "composer -n 8 foundry_moe/train.py run.yaml ...": f"composer -n 2 foundry_moe/train.py run.yaml {S3}",
    "foundry-moe check run.yaml --gpus 8": "foundry-moe check run.yaml --gpus 8 global_train_batch_size=8",
    "foundry-moe check run.yaml --gpus N": "foundry-moe check run.yaml --gpus 2",
    "foundry-moe checkpoints import FOLDER SOURCE": (
        "foundry-moe checkpoints export s3://bucket/run source && foundry-moe checkpoints import imported source"
    ),
    "foundry-moe checkpoints ls FOLDER": "foundry-moe checkpoints ls s3://bucket/run",
    "foundry-moe checkpoints release FOLDER": "foundry-moe checkpoints release s3://bucket/run",
    "foundry-moe checkpoints show s3://BUCKET/RUN --gpus 448": "foundry-moe checkpoints show s3://bucket/run --gpus 8",
    "foundry-moe checkpoints show s3://bucket/run --gpus 448": None,
    "foundry-moe export RUN OUT": "foundry-moe export s3://bucket/run out",
    "foundry-moe loads FILE.jsonl --html OUT": "foundry-moe loads runs/demo/expert_load.jsonl --html loads.html",
    "foundry-moe plan run.yaml --gpus 512 --chip h200": f"foundry-moe plan {PLANNED} --gpus 512 --chip h200",
    "foundry-moe plan run.yaml --gpus N --search": "foundry-moe plan run.yaml --gpus 2 --search",
    "foundry-moe plan yamls/cluster/64x8gpu.yaml --gpus 3072 --search global_train_batch_size=12288": None,
    "foundry-moe plan yamls/cluster/64x8gpu.yaml --gpus 512 --search": None,
    "llmfoundry registry find callbacks NAME": "llmfoundry registry find callbacks elastic_checkpoint",
    "make papers": "python -m benchmarks.papers",
    "pip install '.[azure]'": f"pip install '{ROOT}[azure]' {DRY}",
    "pip install '.[gcs]'": f"pip install '{ROOT}[gcs]' {DRY}",
    "pip install .": f"pip install {ROOT} {DRY}",
    "python -m compileall": "python -m compileall -q foundry_moe/loads",
    "python -m tests.chaos.fuzz_manifests --cases 10000": "python -m tests.chaos.fuzz_manifests --cases 10",
    "python -m benchmarks.checkpoint_planners": "python -m benchmarks.checkpoint_planners --mesh 1 2 2 --layers 1",
    "python benchmarks/hierarchical.py --hosts 2 4 8": (
        f"python {ROOT}/benchmarks/hierarchical.py --hosts 2 --mbit 0 --rows 1 --rounds 1"  # no namespaces
    ),
    "python scripts/hub_kernel.py FOLDER": f"python {ROOT}/scripts/hub_kernel.py hub",
}
# the test that runs a command, and a word of it
RUN_ELSEWHERE = {
    "composer -n 2 examples/composer_script.py": "examples/test_examples.py::composer_script.py",
    "composer -n 8 foundry_moe/train.py run.yaml key=value ...": "launch/test_ending.py::COMPOSER",
    "docker/entrypoint.sh run.yaml ...": "docs/test_tutorials.py::docker/entrypoint.sh",
    "docker/entrypoint.sh store": "launch/test_store.py::store",
    'docker/hosts.sh "host0 host1" IMAGE yamls/...': "docker/test_docker.py::hosts.sh",
    "foundry-moe export --certify": "docs/test_tutorials.py::as Mixtral",
    "foundry-moe export adapter pairs --adapter --format per-expert --base FOLDER": "docs/test_commands.py::pairs",
    "foundry-moe train run.yaml -n 8": "docs/test_commands.py::foundry-moe train run.yaml -n 2",
    "foundry-moe train run.yaml -n 8 key=value ...": "docs/test_commands.py::foundry-moe train run.yaml -n 2",
    "llmfoundry eval yamls/eval/exported.yaml": "docs/test_commands.py::test_recipes",
    "llmfoundry train": "end_to_end/test_yaml.py::llmfoundry",
    "llmfoundry train run.yaml": "end_to_end/test_yaml.py::llmfoundry",
    "pip install '.[foundry]'": "docs/test_commands.py::test_installation",
    "pip install examples/own_gate": "examples/test_examples.py::own_gate",
    "python -m foundry_moe.launch.torchrun": "launch/test_ending.py::foundry_moe.launch.torchrun",
    "python -m tests.chaos.engine_kills": "chaos/test_engine_kills.py::tests.chaos.engine_kills",
    "python -m tests.chaos.hostile_answers": "chaos/test_fuzz_manifests.py::tests.chaos.hostile_answers",
    "python -m benchmarks.papers.megablocks_indices": "papers/test_megablocks.py::megablocks_indices",
    "python -m benchmarks.plot_recipes": "test_readme.py::plot_recipes",
    "python examples/composer_script.py": "examples/test_examples.py::composer_script.py",
    "python examples/convert_hugging_face.py": "examples/test_examples.py::convert_hugging_face.py",
    "python examples/train_tokenizer.py FOLDER OUT": "docs/test_tutorials.py::train_tokenizer",
    "torchrun --max-restarts": "chaos/test_torchrun_restarts.py::--max-restarts",
    "torchrun --nproc-per-node 4 examples/fsdp2_checkpoint.py FOLDER": "checkpoint/test_dcp.py::fsdp2_checkpoint.py",
    "torchrun --nproc-per-node 4 examples/plain_pytorch.py FOLDER STEPS": "docs/test_plain_pytorch.py::examples",
    "torchrun --nproc-per-node 2 examples/transformers_parallel.py FOLDER": "integrations/test_programs.py::plain_loop",
    "uv pip install --override requirements/modern.txt '.[foundry]'": "docs/test_commands.py::test_installation",
}
GPU, CI, IMAGE = "needs a GPU", "CI runs it", "needs an image or a cluster"
NOT_RUN = {  # and why; their arguments are parsed
    "MIN_NODES=56 IMAGE=... DATA=... sbatch --nodes=56-64 docker/slurm.sbatch yamls/cluster/64x8gpu.yaml "
    "variables.data=/data/mds variables.run=s3://BUCKET/RUN": "needs Slurm: `pytest --slow tests/docker/test_slurm.py`",
    "composer -n 1 benchmarks/train_step.py YAML": GPU,
    "docker build -f docker/Dockerfile -t REGISTRY/foundry-moe:0.1.0 .": IMAGE,
    "docker build -f docker/Dockerfile .": IMAGE,
    "foundry-moe train yamls/own_text/1gpu.yaml -n 1": GPU,
    "kubectl apply -f docker/kubernetes.yaml": IMAGE,
    "make chaos": "takes an hour",
    "make chaos-ceph": "needs Ceph",
    "make check-exports": CI,
    'make demo DEMO="max_duration=400ba"': CI,
    "make docs": CI,
    "make env": CI,
    "make serve-exports": "installs 6 GB",
    "make serve-exports FOLDERS=exported": "installs 6 GB",
    "make test": CI,
    "make test-peft": "needs an environment with transformers 5",
    "make test-transformers": CI,
    "make verify": "takes minutes; tests/distributed compares the same meshes",
    "mcli run -f docker/mcli.yaml": IMAGE,
    "pytest --slow tests/chaos/test_lost_node.py": "takes minutes",
    "pytest --slow tests/docker/test_slurm.py": "needs Slurm",
    "python -m benchmarks.papers.dropping TEXT": GPU,
    "python -m benchmarks.papers.hetumoe_layer": GPU,
    "python -m tests.helpers.transformers_experts": "needs transformers 5",
    "python benchmarks/block_sparse.py --parts launches": GPU,
    "python benchmarks/block_sparse.py --parts problems": GPU,
    "python benchmarks/block_sparse.py --parts tiles": GPU,
    "python benchmarks/block_sparse.py --parts transposed": GPU,
    "python benchmarks/calibrate.py > constants.json": GPU,
    "python benchmarks/certify.py": GPU,
    "python benchmarks/layer.py": GPU,
    "python benchmarks/matmul.py --cases XS,Small,Medium": GPU,
    "python benchmarks/sparse_tiles.py --cases XS,Small,Medium": GPU,
    "python scripts/stk_tests.py FOLDER": "needs a copy of stk",
    "sbatch docker/slurm.sbatch": "needs Slurm",
    "torchrun --nproc-per-node 8 benchmarks/calibrate.py > constants.json": GPU,
}


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
    small("mixtral").save_pretrained(folder / "base")
    run_block(f"{block}foundry-moe export adapter pairs --adapter --format per-expert --base base", folder)
    assert list((folder / "merged").glob("*.safetensors"))
    for name in ("adapter", "adapter_vllm", "pairs"):
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
    plan, search = split(block.replace("run.yaml", PLANNED))
    assert "tokens/s per GPU" in (output := run_block(plan, folder)) and "best first" not in output
    assert "meshes of 512 GPUs (8 per node), best first" in run_block(search, folder)


@pytest.mark.parametrize(
    "line", [*blocks("how-to/transformers.md", "bash"), *re.findall(r"^(?:uv )?pip install .*$", README, re.M)]
)
def test_installation(line):
    """Without other packages and without changes: the project with this extra, and the file of overrides, exist."""
    command = line.partition("#")[0].strip()
    output = run_block(f"{command} {'--dry-run --no-deps' if command.startswith('uv') else DRY}", ROOT)
    assert "foundry_moe" in output.replace("-", "_") and "does not" not in output, output


def test_recipe(monkeypatch, tmp_path):
    """All but the training of many hours."""
    lines = [line.partition("   #")[0] for block in blocks("explanation/recipe.md", "bash") for line in split(block)]
    monkeypatch.chdir(tmp_path)

    class Read(Exception):
        pass

    def read(folder: Path) -> None:
        raise Read(folder)

    monkeypatch.setattr(make_text, "fetch_sources", read)
    monkeypatch.setattr(dropping, "read_tokens", read)
    for line, module in zip(lines, (make_text, recipe), strict=True):
        command = run_block(f"printf '%s\\n' {line}", ROOT).splitlines()  # the shell expands {a,b}
        assert command[:3] == ["python", "-m", module.__name__]
        monkeypatch.setattr("sys.argv", command[2:])
        with pytest.raises(Read):
            module.main()


@pytest.mark.parametrize("command", RUN)
def test_a_command_in_a_table_or_a_sentence_runs(command, folder, monkeypatch, capfd):
    """As printed, but for the words of the user's and sizes that `RUN` replaces."""
    words = RUN[command] or command
    if not words.startswith("foundry-moe "):
        run_block(words, folder)
        return
    monkeypatch.chdir(folder)
    for line in words.split(" && "):  # in this process, which has imported everything
        with pytest.raises(SystemExit) as ended:
            main(shlex.split(line)[1:])
        assert not ended.value.code, capfd.readouterr().err


@pytest.mark.parametrize("command", NOT_RUN)
def test_a_command_that_is_not_run_has_valid_arguments_and_names_files_that_exist(command, monkeypatch):
    class Parsed(Exception):
        pass

    def parse_and_stop(parser: argparse.ArgumentParser, *arguments: Any) -> None:
        _, unknown = parse(parser, *arguments)
        assert not unknown
        raise Parsed

    parse = argparse.ArgumentParser.parse_known_args
    words = shlex.split(command.partition(" #")[0].partition(" > ")[0])
    for word in words:
        if re.match(r"(benchmarks|docker|tests|yamls|foundry_moe)/[\w./]+$", word):
            assert (ROOT / word).exists()
    if words[0] == "make":
        run_block(shlex.join(["make", "-n", *words[1:]]), ROOT)
    if words[0] == "foundry-moe":
        words = ["python", "-m", "foundry_moe.cli", *words[1:]]
    at = next((at for at, word in enumerate(words) if word == "-m" or word.endswith(".py")), None)
    if at is None or words[0] not in ("python", "composer"):
        return
    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", parse_and_stop)
    module = words[at].removesuffix(".py").replace("/", ".") if words[at] != "-m" else words[at := at + 1]
    monkeypatch.setattr("sys.argv", words[at:])
    with pytest.raises(Parsed):
        runpy.run_module(module, run_name="__main__", alter_sys=True)


def test_every_command_of_every_page_is_run_or_has_a_reason():
    """A command is a line of a block or code in a sentence that begins with a program and has arguments."""
    found = {command for page in PAGES for command in commands_of(page)}
    assert found - set(RUN) - set(RUN_ELSEWHERE) - set(NOT_RUN) == set()
    assert {*RUN, *RUN_ELSEWHERE, *NOT_RUN} - found == set(), "commands that no page has any more"
    for where in RUN_ELSEWHERE.values():
        path, _, name = where.partition("::")
        assert name in (ROOT / "tests" / path).read_text()


def commands_of(page: Path) -> set[str]:
    """The commands of a page that stand in sentences and tables, and in blocks that `run_block` does not run."""
    text = page.read_text()
    blocks_run = page != README_PATH
    found = set()
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", text, re.M | re.S):
        if language in ("", "bash") and not (language and blocks_run):
            found |= {line.partition("   #")[0].strip() for line in split(block)}
            found |= set(re.findall(r"# or: (.*)", block))
    found |= set(re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)))
    printed = {
        line.partition("   #")[0].strip() for page in HERE | ELSEWHERE for line in split("".join(blocks(page, "bash")))
    }
    return {line for line in found - printed if COMMAND.match(line)}


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
