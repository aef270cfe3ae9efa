"""Gradients of experts divided over ranks, with the factor 1/expert and without (databricks/megablocks issue 86).

    python -m benchmarks.papers.gradient_scale [--meshes 1,1,2 1,1,4] [--csv FILE] [--plot FILE]

An expert sees the tokens of all ranks that share it, and nobody else averages its gradient: without a further 1/expert
it is `expert` times that of data parallelism. A dropless model of two layers trains three steps of AdamW in fp64 on
each mesh (gloo, CPU processes) and on one process. The table has the experts' gradient over one process's at the first
step, how far it is off, and how far losses, norms before clipping and weights are apart.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from torch import Tensor

from benchmarks.papers.table import finish, parser_of
from foundry_moe.commands.differences import difference
from foundry_moe.commands.parity import CASES, Case, run_case
from foundry_moe.config import MeshConfig
from foundry_moe.launch.processes import run_processes
from foundry_moe.parallel.gradients import LocalWeight
from foundry_moe.parallel.mesh import Mesh, parse_mesh

CASE = replace(CASES[0], max_norm=0.1)  # clipping carries a wrong scale of experts into all gradients
GRADIENT = "grad/0/w1_EFD/blocks.0.ffn.experts.w1_EFD"
COLUMNS = (
    "mesh",
    "factor",
    "experts' gradient over one process's",
    "off by",
    "loss",
    "norm",
    "experts' weights",
)


def train(mesh: Mesh, scaled: bool, case: Case) -> dict[str, Tensor]:
    """On each rank: what the run leaves, with experts' gradients divided by `expert` or not."""
    if not scaled:
        LocalWeight.__call__ = lambda self, weight: weight.to_local()  # type: ignore[method-assign]
    replicate, shard, expert = mesh
    return run_case(case, MeshConfig(replicate=replicate, shard=shard, expert=expert))


def apart(seen: dict[str, Tensor], expected: dict[str, Tensor], prefix: str) -> float:
    """The largest relative difference of all quantities of a kind."""
    return max(difference(seen.get(name), value) for name, value in expected.items() if name.startswith(prefix))


def rows_of(meshes: list[Mesh], case: Case = CASE) -> list[list[str]]:
    """The table."""
    expected = run_case(case, None)
    rows = []
    for mesh in meshes:
        for scaled in (True, False):
            seen = run_processes(train, mesh, scaled, case, world_size=mesh[0] * mesh[1] * mesh[2])
            ratio = (seen[GRADIENT].norm() / expected[GRADIENT].norm()).item()
            figures = [difference(seen[GRADIENT], expected[GRADIENT])]
            figures += [apart(seen, expected, prefix) for prefix in ("loss", "norm", "weight/w1_EFD")]
            factor = f"1/{mesh[2]}" if scaled else "none"
            rows.append([str(mesh), factor, f"{ratio:.4f}", *(f"{figure:.1e}" for figure in figures)])
    return rows


def plot(rows: list[list[str]], path: Path) -> None:
    """The gradient's scale by mesh, with the factor and without."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5, 3), layout="constrained")
    for label, of in (("with 1/expert", rows[0::2]), ("without", rows[1::2])):
        axes.plot([row[0] for row in of], [float(row[2]) for row in of], marker="o", label=label)
    axes.set(xlabel="mesh (replicate, shard, expert)", ylabel="experts' gradient over one process's")
    axes.legend()
    figure.savefig(path)


def main() -> None:
    """Runs from the command line; see the text at the top."""
    parser = parser_of(__doc__)
    parser.add_argument("--meshes", nargs="+", type=parse_mesh, default=[(1, 1, 2), (1, 1, 4), (1, 2, 2)])
    arguments = parser.parse_args()
    rows = rows_of(arguments.meshes)
    finish(COLUMNS, rows, plot, arguments)


if __name__ == "__main__":
    main()
