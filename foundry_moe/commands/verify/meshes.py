"""The certificate of meshes: trains small dMoE models on meshes and on one process, and prints the differences.

Must not know how a model is placed or trained.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from foundry_moe.commands.verify.parity import CASES, HIDDEN, WIDTH, Case, run_case
from foundry_moe.commands.verify.rows import RATIO_TOLERANCE, difference, distance, ratio
from foundry_moe.config import MeshConfig, can_cut_rows
from foundry_moe.launch.processes import run_processes
from foundry_moe.parallel.mesh import Mesh, can_replicate, check_replicas, divisors, listed, plan_mesh

DEFAULT_MESHES: tuple[Mesh, ...] = (
    (1, 1, 1), (1, 1, 2), (1, 2, 1), (2, 1, 1), (1, 1, 4), (1, 2, 2), (2, 1, 2), (2, 2, 1), (2, 2, 2), (1, 1, 8),
)  # fmt: skip
# fp64: rounding over three steps of AdamW measures 3e-15. fp32: sums in another order measure 1e-6 on four H200s.
# bf16: a ratio, see `differences`.
TOLERANCE = {"fp64": 1e-10, "fp32": 1e-4, "bf16": RATIO_TOLERANCE}
_DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.float32}


def run_meshes(
    meshes: Sequence[Mesh],
    cases: Sequence[Case],
    precision: str,
    device_type: str,
    ranks_per_node: int | None,
    keys: Mapping[str, Any],
) -> dict[tuple[Mesh, str], dict[str, Tensor]]:
    """On each rank of a launch: every case on every mesh of its size. `keys`: others of `MeshConfig`."""
    os.environ.setdefault("FOUNDRY_MOE_COMPILE_AHEAD", "0")  # loads that three steps do not bring
    device = torch.device(device_type, torch.cuda.current_device()) if device_type == "cuda" else device_type
    results = {}
    for mesh in meshes:
        replicate, shard, expert = mesh
        config = MeshConfig(replicate=replicate, shard=shard, expert=expert, **keys)
        for case in cases:
            results[mesh, case.name] = run_case(
                case,
                config,
                dtype=_DTYPES[precision],
                compute_dtype=torch.bfloat16 if precision == "bf16" else None,
                device=device,
                ranks_per_node=ranks_per_node,
            )
    return results


def run_alone(
    cases: Sequence[Case], precision: str, device_type: str, ranks_per_node: int | None, keys: Mapping[str, Any]
) -> dict[str, dict[tuple[Mesh, str], dict[str, Tensor]]]:
    """On a launch of one GPU, every case: what meshes are compared with (`base`), and bf16's `own` distance from it."""
    wanted = {"base": "fp32", "own": "bf16"} if precision == "bf16" else {"base": precision}
    common = (device_type, ranks_per_node, keys)
    return {name: run_meshes([(1, 1, 1)], cases, used, *common) for name, used in wanted.items()}


def _row_of(key: str) -> str:
    quantity, *rest = key.split("/")
    if quantity == "grad":
        return f"gradient {rest[1]}"
    if quantity == "weight":
        return f"weights {rest[0]}"
    return "clipped norm" if quantity == "norm" else quantity


def compare(
    measured: dict[str, Tensor], expected: dict[str, Tensor], by: Callable[[Tensor, Tensor], float] = difference
) -> dict[str, float]:
    """Rows of the certificate: for each kind of quantity, the largest `by` of its tensors.

    A quantity that only one side has is an infinite difference: a gradient that is missing is not a zero.
    """
    rows: dict[str, float] = defaultdict(float)
    for key in measured.keys() | expected.keys():
        both = key in measured and key in expected
        gap = by(measured[key], expected[key]) if both else float("inf")
        row = _row_of(key)
        rows[row] = max(rows[row], gap)
    return dict(sorted(rows.items()))


def certify(
    meshes: Iterable[Mesh],
    *,
    cases: Sequence[Case] = CASES,
    precision: str = "fp64",
    device_type: str = "cpu",
    ranks_per_node: int | None = None,
    all_to_all: str = "auto",
    backend: str = "auto",
    timeout_s: float = 600.0,
    preload: Sequence[str] = ("foundry_moe.commands.verify.meshes",),
) -> dict[Mesh, dict[str, dict[str, float]]]:
    """{mesh: {case: {row: largest relative difference from one process}}}; one launch for each number of processes.

    In bf16, where rounding moves tokens to other experts, a ratio: see TOLERANCE.

    Args:
        precision: fp64 | fp32 | bf16 (weights and reductions in fp32).
        device_type: cpu (gloo) or cuda (NCCL).
        ranks_per_node: as if this were the number of GPUs of a node; None = all on one.
        all_to_all: of `MeshConfig`.
        backend: of the experts.
    """
    cases = [replace(case, moe={"backend": backend, **case.moe}) for case in cases]
    launch: dict[str, Any] = {
        "backend": "nccl" if device_type == "cuda" else "gloo",
        "timeout_s": timeout_s,
        "preload": preload,
    }
    alone: Mesh = (1, 1, 1)
    by_size: dict[int, list[Mesh]] = defaultdict(list)
    for mesh in meshes:
        by_size[mesh[0] * mesh[1] * mesh[2]].append(mesh)
    common: tuple[Any, ...] = (
        cases,
        precision,
        device_type,
        ranks_per_node,
        {"all_to_all": all_to_all},
    )
    if device_type == "cpu" and precision != "bf16":
        expected = {case.name: run_case(case, None, dtype=_DTYPES[precision]) for case in cases}
    else:
        single = run_processes(run_alone, *common, world_size=1, **launch)
        expected = {case.name: single["base"][alone, case.name] for case in cases}
    by = distance if precision == "bf16" else difference
    table: dict[Mesh, dict[str, dict[str, float]]] = {}
    for size, group in sorted(by_size.items()):
        results = run_processes(run_meshes, group, *common, world_size=size, **launch)
        for mesh in group:
            table[mesh] = {case.name: compare(results[mesh, case.name], expected[case.name], by) for case in cases}
    if precision == "bf16":
        own = {case.name: compare(single["own"][alone, case.name], expected[case.name], by) for case in cases}
        for rows in table.values():
            for case in cases:
                units = own_units(own, case.name)
                rows[case.name] = {r: ratio(d, units[r]) for r, d in rows[case.name].items()}
    return table


def own_units(own: Mapping[str, Mapping[str, float]], case: str) -> dict[str, float]:
    """What a distance in bf16 is divided by: one GPU's own, by row.

    One number may be right by chance, so those rows have fairer units: a norm is off by no more than the gradients
    are, and usually by less; losses of all cases are taken together. Where one GPU itself has no number to compare,
    nothing passes: that unit is 0.
    """
    units = dict(own[case])
    gradients = [distance for row, distance in units.items() if row.startswith("gradient")]
    units["clipped norm"] = max([units["clipped norm"], *gradients])
    units["loss"] = max(rows["loss"] for rows in own.values())
    return {row: unit if math.isfinite(unit) else 0.0 for row, unit in units.items()}


def format_table(table: dict[Mesh, dict[str, dict[str, float]]], tolerance: float) -> str:
    """The certificate as text, one line for each mesh, case and row."""
    lines = [f"{'mesh (replicate, shard, expert)':32}{'case':52}{'quantity':20}{'difference':>12}"]
    for mesh, cases in table.items():
        for case, rows in cases.items():
            for row, value in rows.items():
                verdict = "pass" if value < tolerance else "FAIL"
                lines.append(f"{mesh!s:32}{case:52}{row:20}{value:12.1e}  {verdict}")
    return "\n".join(lines)


def failing(
    table: dict[Mesh, dict[str, dict[str, float]]], tolerance: float
) -> dict[Mesh, dict[str, dict[str, float]]]:
    """The rows of a certificate that fail; meshes and cases of which none does are left empty."""
    return {
        mesh: {case: {row: d for row, d in rows.items() if not d < tolerance} for case, rows in cases.items()}
        for mesh, cases in table.items()
    }


def worst(table: dict[Mesh, dict[str, dict[str, float]]]) -> float:
    """The largest difference in a certificate."""
    return max(value for cases in table.values() for rows in cases.values() for value in rows.values())


def check_mesh(mesh: Mesh, cases: Sequence[Case], devices: int | None) -> None:
    """Checks that the cases' models fit a mesh, and the mesh this machine.

    Args:
        devices: GPUs that are here; None = processes on the CPU, of which there may be any number.

    Raises:
        ValueError: names the mesh and what would do.
    """
    replicate, shard, expert = mesh
    ranks = replicate * shard * expert
    if devices is not None and ranks > devices:
        raise ValueError(
            f"--mesh {replicate},{shard},{expert} needs {ranks} GPUs and {devices} are here: use --device cpu"
        )
    config = MeshConfig(replicate=replicate, shard=shard, expert=expert)
    check_replicas(replicate, "cpu" if devices is None else "cuda")
    for case in cases:
        plan_mesh(config, world_size=ranks, ranks_per_node=ranks, num_experts=int(case.moe["num_experts"]))
    rows = math.gcd(WIDTH, HIDDEN)
    if not can_cut_rows(rows, shard=shard, expert=expert):
        raise ValueError(
            f"--mesh {replicate},{shard},{expert}: shard ({shard}) must divide the rows of the experts' matrices "
            f"({WIDTH} and {HIDDEN}): use {listed(divisors(rows))}"
        )


def default_meshes(devices: int | None) -> list[Mesh]:
    """Those of `DEFAULT_MESHES` that fit the machine and the installed torch; `devices` as in `check_mesh`."""
    if devices is not None:
        return [mesh for mesh in DEFAULT_MESHES if math.prod(mesh) <= max(devices, 1)]
    return [mesh for mesh in DEFAULT_MESHES if mesh[0] == 1 or can_replicate("cpu")]


def verify_command(arguments: argparse.Namespace) -> int:
    """`foundry-moe verify`: prints the certificate; 0 if every row passes."""
    started = time.monotonic()
    precision = arguments.precision or ("fp64" if arguments.device == "cpu" else "fp32")
    devices = torch.cuda.device_count() if arguments.device == "cuda" else None
    meshes = arguments.mesh or default_meshes(devices)
    for mesh in meshes:
        check_mesh(mesh, CASES, devices)
    table = certify(
        meshes,
        precision=precision,
        device_type=arguments.device,
        ranks_per_node=arguments.gpus_per_node,
        all_to_all=arguments.all_to_all,
        backend=arguments.backend,
        timeout_s=arguments.timeout_s,
    )
    tolerance = TOLERANCE[precision] if arguments.tolerance is None else arguments.tolerance
    print(format_table(table, tolerance))
    largest = worst(table)
    passed = largest < tolerance
    if not passed:
        print("failing, again:", format_table(failing(table, tolerance), tolerance), sep="\n")
    print(
        f"{len(table)} meshes, {len(CASES)} cases, {precision} on {arguments.device}, {arguments.backend} experts: "
        f"largest difference {largest:.1e}, tolerance {tolerance:.0e}: {'pass' if passed else 'FAIL'} "
        f"({time.monotonic() - started:.0f} s)"
    )
    return 0 if passed else 1
