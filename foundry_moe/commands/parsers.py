"""Arguments of the commands of `foundry-moe`.

A command's modules are imported when it runs, so that `--help` and `check` start in half a second.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from foundry_moe.commands.plan.constants import CHIPS
from foundry_moe.parallel.mesh import parse_mesh

TRUST = "if you trust whoever made it, add --trust-pickle, which lets it run code"
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}  # as torch names them


def _number(kind: type, is_valid: Callable[[Any], bool], words: str) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        value = kind(text)
        if not is_valid(value):
            raise argparse.ArgumentTypeError(f"{text} must be {words}")
        return value

    read.__name__ = kind.__name__  # argparse names it if the text is not a number
    return read


positive = _number(float, lambda value: 0 < value < float("inf"), "a finite number above 0")
positive_int = _number(int, lambda value: value >= 1, "1 or more")


def add_command(
    commands: Any, name: str, run: str, help: str, description: str = "", *, example: str
) -> argparse.ArgumentParser:
    """Adds a command to those of `foundry-moe` or of `foundry-moe checkpoints`.

    Args:
        run: `module:function` of this package, from the parsed arguments to an exit code.
        description: default: `help` as a sentence.
        example: the arguments of an example.
    """
    parser = commands.add_parser(name, help=help, description=description or f"{help[0].upper()}{help[1:]}.")
    parser.epilog = f"example: {parser.prog} {example}"
    module, _, function = run.partition(":")
    parser.set_defaults(run=lambda arguments: getattr(import_module(f"foundry_moe.{module}"), function)(arguments))
    return parser


def add_store_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the store that holds a run's checkpoints."""
    parser.add_argument("--endpoint-url", help="address of the S3 server (default: AWS)")
    parser.add_argument("--profile", help="profile of the AWS configuration files (default: the environment's)")
    parser.add_argument("--region", help="region of the bucket (default: that of the profile or the environment)")


def local_path(text: str) -> Path:
    """A path of this host, as an argument's type. An address would create folders named `s3:`."""
    if "://" in text:
        raise argparse.ArgumentTypeError(
            f"{text} must be a path of this host: write to a local path and copy the result"
        )
    return Path(text)


def add_overrides(parser: argparse.ArgumentParser, help: str | None = None) -> None:
    """Keys of a run after its YAML, or none. Without the default argparse lists them among required arguments."""
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help=help)


def add_check_parser(subparsers: Any) -> None:
    parser = add_command(
        subparsers,
        "check",
        "commands.check:check_command",
        help="validate a run's YAML",
        description="Reads a run's YAML as the training command does and prints a line for each mistake (exit code "
        "2), or a description of the run (exit code 0), with notes on missing data. Starts no training. --gpus, or a "
        "launcher's WORLD_SIZE, also checks that the mesh and the batch fit.",
        example="run.yaml --gpus 64 max_duration=100ba",
    )
    parser.add_argument("yaml", help="the run, as given to train.py")
    add_overrides(parser)
    parser.add_argument("--gpus", type=positive_int, help="check that the mesh and the batch fit this many GPUs")
    parser.add_argument("--data", action="store_true", help="treat missing data as an error")
    parser.add_argument("--gpus-per-node", type=positive_int, default=8, help="GPUs of one node (default: 8)")


def add_train_parser(subparsers: Any) -> None:
    parser = add_command(
        subparsers,
        "train",
        "train:train_command",
        help="train a run on this machine",
        description="Checks the run, then starts one process per GPU, and waits for the last save when it is stopped "
        "(SIGTERM, Ctrl-C). The same command resumes the run.",
        example="run.yaml -n 8 max_duration=100ba",
    )
    parser.add_argument("yaml", help="the run")
    add_overrides(parser, "keys of the run, as in max_duration=100ba")
    parser.add_argument("-n", "--nproc", type=positive_int, help="processes (default: the GPUs of this machine, or 1)")


def add_verify_parser(subparsers: Any) -> None:
    parser = add_command(
        subparsers,
        "verify",
        "commands.verify.certify:verify_command",
        help="certify that training on meshes equals training on one process",
        description="Trains a shrunk copy of the run, or five small models without a run, on a mesh and on one process "
        "with LLM Foundry's trainer, and prints the largest relative differences of losses, gradients, weights, "
        "checkpoints, and layers from their formulas. Exit code 1 if any difference exceeds its tolerance.",
        example="run.yaml --mesh 1,2,2 2,1,2",
    )
    parser.add_argument("yaml", nargs="?", help="the run's YAML, as for train.py")
    add_overrides(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object per line, for each mesh and run")
    parser.add_argument(
        "--mesh",
        type=parse_mesh,
        nargs="+",
        metavar="R,S,E",
        help="replicate,shard,expert; several may follow (default: the run's; without one, ten of 1 to 8 processes)",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="gloo on cpu, NCCL on cuda")
    parser.add_argument(
        "--precision",
        choices=("fp64", "fp32"),
        help="tolerances are 1e-10 and 1e-4 (default: fp32; without a run, fp64 on cpu)",
    )
    parser.add_argument("--timeout-s", type=positive, default=600.0, help="limit of each launch, including compilation")


def add_certify_parser(subparsers: Any) -> None:
    parser = add_command(
        subparsers,
        "certify",
        "commands.certify:certify_command",
        help="compare two records of any PyTorch trainer's steps",
        description="Compares the records that foundry_moe.certify.Recorder wrote for two runs that should be the "
        "same, such as one process and many, or a run and its resumption. Prints the first step and tensors that "
        "differ by more than rounding, and a diagnosis. With --checkpoint, compares the weights and optimizer states "
        "of a checkpoint with the record of the run that saved it. Exit code 1 if they differ.",
        example="records/one_rank records/two_ranks",
    )
    parser.add_argument("a", metavar="A", help="the folder of the reference's record")
    parser.add_argument("b", metavar="B", nargs="?", help="the folder of the other record")
    parser.add_argument(
        "--checkpoint",
        metavar="FOLDER",
        help="in place of B: a folder or s3://, gs://, az:// address of elastic checkpoints, or a folder of "
        "torch.distributed.checkpoint or safetensors",
    )
    parser.add_argument(
        "--step", type=positive_int, help="of the checkpoint (default: the newest elastic checkpoint, or A's last step)"
    )
    parser.add_argument(
        "--trust-pickle", action="store_true", help="read the index of torch.distributed.checkpoint, which can run code"
    )
    parser.add_argument(
        "--tolerance", type=positive, help="relative, of the first step (default: by the types of the parameters)"
    )
    parser.add_argument(
        "--names", nargs="+", default=[], metavar="OLD=NEW", help="replace OLD by NEW in B's parameter names, in order"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_store_arguments(parser)


def add_plan_parser(subparsers: Any) -> None:
    parser = add_command(
        subparsers,
        "plan",
        "commands.plan.command:plan_command",
        help="estimate mesh, memory, messages and step time of a run",
        description="Reads a run's YAML and prints the mesh, the parameters, the memory of each GPU, and the messages "
        "and time of a step. Starts no training. Warns if the run does not fit or is slow. Exit code 1 if the run does "
        "not fit.",
        example="run.yaml --gpus 64 --chip h100 --search",
    )
    parser.add_argument("yaml", help="the run's YAML, as for train.py")
    add_overrides(parser)
    parser.add_argument("--gpus", type=positive_int, required=True, help="GPUs of the run")
    parser.add_argument("--gpus-per-node", type=positive_int, default=8, help="GPUs of one node (default: 8)")
    parser.add_argument("--gpu-memory-gib", type=positive, help="memory of one GPU (default: that of --chip)")
    parser.add_argument(
        "--chip", choices=CHIPS, default="h100", help="decides memory, kernels and times (default: h100)"
    )
    parser.add_argument(
        "--search", action="store_true", help="also list every mesh of these GPUs, fastest first, with reasons"
    )
    parser.add_argument("--constants", type=Path, help="file of benchmarks/calibrate.py (default: that of --chip)")
    parser.add_argument("--json", action="store_true", help="print all numbers as one JSON object")


def add_loads_parser(subparsers: Any) -> None:
    parser = add_command(
        subparsers,
        "loads",
        "loads.page:loads_command",
        help="draw the experts' loads of a run as an HTML page",
        description="Reads the JSON lines of callbacks.expert_load.file, also during the run, and writes one HTML file "
        "that opens in any browser without a server or a network.",
        example="runs/demo/expert_load.jsonl --html loads.html",
    )
    parser.add_argument("file", type=Path, help="the path in callbacks.expert_load.file")
    parser.add_argument("--html", type=Path, metavar="OUT", help="the page (default: beside the file)")


def add_export_parser(subparsers: Any) -> None:
    parser = add_command(
        subparsers,
        "export",
        "commands.export:export_command",
        help="a trained model as a Hugging Face folder, for transformers, vLLM and SGLang",
        description="Writes a checkpoint's model in the names, layouts and configuration of its Hugging Face family, a "
        "block in memory at a time, and compares it with the checkpoint: each tensor's hash, and the logits of plain "
        "transformers. OUT is created once all of this is done, or not at all.",
        example="s3://bucket/run exported --dtype bf16",
    )
    parser.add_argument(
        "run_folder",
        metavar="RUN",
        help="the checkpoints of a run: s3://, gs:// or az://, or a path; with --adapter also a PEFT folder",
    )
    parser.add_argument("out", metavar="OUT", type=local_path, help="a new folder")
    parser.add_argument("--step", type=int, help="default: the newest checkpoint that is good")
    parser.add_argument("--dtype", choices=DTYPES, help="of the tensors (default: as they were trained)")
    parser.add_argument(
        "--certify",
        action=argparse.BooleanOptionalAction,
        help="compare logits too (default: where the model fits into free memory); hashes are compared always",
    )
    parser.add_argument("--tokenizer", help="its folder or name, or none (default: the run's)")
    lora = parser.add_mutually_exclusive_group()
    lora.add_argument("--merge", action="store_true", help="add LoRA adapters to the experts' weights")
    parser.add_argument(
        "--base",
        metavar="FOLDER",
        help="the Hugging Face model that the run began with (default: the one that the checkpoint records): with "
        "--merge, for checkpoints that leave out the frozen weights; with --adapter, for adapter_config.json",
    )
    lora.add_argument("--adapter", action="store_true", help="write LoRA adapters alone, as a PEFT folder")
    parser.add_argument(
        "--format",
        choices=("peft", "per-expert"),
        default="peft",
        help="format of --adapter: peft (default), fused tensors for transformers 5, or per-expert, one pair for each "
        "expert's matrix, for vLLM and SGLang",
    )
    parser.add_argument("--file-gb", type=positive, default=5.0, help="size of one file in GB (default: 5)")
    add_store_arguments(parser)


def add_checkpoints_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("checkpoints", help="list, check, clean, export and import checkpoints")
    commands = parser.add_subparsers(dest="checkpoints_command", required=True)

    def command(name: str, help_text: str, example: str) -> argparse.ArgumentParser:
        sub = add_command(commands, name, f"commands.checkpoints:run_{name}", help_text, example=example)
        sub.add_argument("folder", help="s3://, gs:// or az://, or a path; for a run's folder its checkpoints/ is used")
        add_store_arguments(sub)
        return sub

    command("ls", "one line for each checkpoint, newest first", "runs/demo")
    what = "what a checkpoint holds, who wrote it, and which meshes can read it"
    show = command("show", what, "s3://bucket/run --gpus 64")
    show.add_argument("--step", type=int, help="default: the newest")
    show.add_argument(
        "--gpus", type=positive_int, action="append", help="list the meshes of this many GPUs; may be repeated"
    )
    verify = command("verify", "read everything and compare hashes", "s3://bucket/run --step 4000")
    verify.add_argument("--step", type=int, help="default: all")
    what = "remove objects of no checkpoint, and old checkpoints with --keep"
    gc = command("gc", what, "s3://bucket/run --keep 3 --dry-run")
    what = "remove unfinished checkpoints that are at least this old (default: 6h)"
    gc.add_argument("--older-than", default="6h", help=what)
    gc.add_argument(
        "--keep",
        type=positive_int,
        help="keep this many of the newest checkpoints, and milestones, and remove the others; the newest is read and "
        "verified first (default: remove no checkpoint)",
    )
    gc.add_argument("--dry-run", action="store_true", help="remove nothing; print what would be removed")
    command("release", "allow another run to continue in this folder", "s3://bucket/run")
    what = "a checkpoint in formats that others read"
    export = command("export", what, "s3://bucket/run weights --format safetensors")
    export.add_argument("out", type=local_path, help="a new folder, or a new file for torch")
    export.add_argument(
        "--format",
        choices=("safetensors", "dcp", "torch"),
        default="safetensors",
        help="safetensors: the model in files with an index (default) | dcp: all of the state as a folder of "
        "torch.distributed.checkpoint | torch: the same as one file of torch.save; memory holds the state once for dcp "
        "and torch",
    )
    export.add_argument("--step", type=int, help="default: the newest that is good")
    export.add_argument("--file-gb", type=positive, default=5.0, help="size of one file in GB (default: 5)")
    what = "make a folder's first checkpoint from weights of another format"
    importing = command("import", what, "s3://bucket/new-run weights.safetensors")
    importing.add_argument(
        "source",
        help="a safetensors file or folder, a .pt with a state dict, or, with --trust-pickle, Composer's single-file "
        "or sharded checkpoint; a folder of a supported Hugging Face family gets the names of a run of hf_causal_lm",
    )
    importing.add_argument("--prefix", default="", help="put this before each name, for example model.")
    importing.add_argument(
        "--trust-pickle", action="store_true", help="unpickle without restrictions: a malicious file can run code"
    )
