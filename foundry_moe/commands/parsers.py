"""Parsers of `foundry-moe verify` and `foundry-moe plan`. What a command runs is imported when it runs."""

from __future__ import annotations

import argparse
from typing import Any

from foundry_moe.commands.chips import CHIPS


def add_verify_parser(subparsers: Any) -> argparse.ArgumentParser:
    """`foundry-moe verify`: sets `run` to a function of the parsed arguments that returns an exit code."""
    from foundry_moe.config import BACKENDS
    from foundry_moe.parallel.mesh import parse_mesh

    parser = subparsers.add_parser(
        "verify",
        help="certify that training on meshes equals training on one process",
        description="Trains small dMoE models on each mesh and on one process, and prints the largest relative "
        "differences in loss, gradients, clipped norm, weights and checkpoint. Exit code 1 if any is too large.",
    )
    parser.add_argument(
        "--mesh",
        type=parse_mesh,
        nargs="+",
        metavar="R,S,E",
        help="replicate,shard,expert; several may follow (default: meshes of 1, 2, 4 and 8 processes)",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="gloo on cpu, NCCL on cuda")
    parser.add_argument("--precision", choices=("fp64", "fp32", "bf16"), help="default: fp64 on cpu, fp32 on cuda")
    parser.add_argument("--tolerance", type=float, help="default: 1e-10 in fp64, 1e-4 in fp32; in bf16 a ratio, 3")
    parser.add_argument("--gpus-per-node", type=int, help="pretend that so many ranks share a node (default: all)")
    parser.add_argument("--all-to-all", choices=("auto", "flat", "hierarchical"), default="auto")
    parser.add_argument("--chunks", type=int, default=1, help="parts in which a layer's tokens travel (default: 1)")
    parser.add_argument("--backend", choices=BACKENDS, default="auto", help="of the experts (default: auto)")
    parser.add_argument("--timeout-s", type=float, default=600.0, help="for each launch, compilation included")

    def run(arguments: argparse.Namespace) -> int:
        from foundry_moe.commands.verify import verify_command

        return verify_command(arguments)

    parser.set_defaults(run=run)
    return parser


def add_plan_parser(subparsers: Any) -> argparse.ArgumentParser:
    """`foundry-moe plan`: as `add_verify_parser`."""
    parser = subparsers.add_parser(
        "plan",
        help="what a run needs on a cluster: mesh, bytes per GPU, messages per step",
        description="Reads a run's YAML and prints, without starting anything, the mesh, parameters and bytes on "
        "each GPU, and messages per step; warns of what will not fit or will be slow. Exit code 1 if it will not fit.",
    )
    parser.add_argument("yaml", help="the run, as given to train.py")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--gpus", type=int, required=True)
    parser.add_argument("--gpus-per-node", type=int, default=8)
    parser.add_argument("--gpu-memory-gib", type=float, default=80.0, help="of one GPU (default: 80)")
    parser.add_argument("--chip", choices=CHIPS, default="h100", help="decides which kernels run (default: h100)")

    def run(arguments: argparse.Namespace) -> int:
        from foundry_moe.commands.plan import plan_command

        return plan_command(arguments)

    parser.set_defaults(run=run)
    return parser
