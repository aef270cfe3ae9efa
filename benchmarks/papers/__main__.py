"""`make papers` lists the claims of papers with their commands. Results: docs/explanation/papers.md."""

CLAIMS = (
    (
        "MegaBlocks, figure 9: block-sparse products against cuBLAS",
        "python benchmarks/matmul.py --cases XS,Small,Medium",
    ),
    (
        "the same on kernels for any topology, every transpose, random topologies, transposed access, over-launching",
        "python benchmarks/block_sparse.py",
    ),
    ("MegaBlocks, figure 4: tile sizes", "python benchmarks/sparse_tiles.py --cases XS,Small,Medium"),
    ("MegaBlocks, section 5.1: cost of the topology", "python -m benchmarks.papers.megablocks_indices"),
    (
        "MegaBlocks, figures 7 and 8: speed at equal loss",
        "python -m benchmarks.papers.dropping text",
    ),
    (
        "the same, with small experts: docs/explanation/recipe.md",
        "python -m benchmarks.papers.recipe text",
    ),
    ("its text, from Debian's packages of sources", "python -m benchmarks.papers.make_text text"),
    ("MegaBlocks issue 86: the scale of experts' gradients", "make verify"),
    ("HetuMoE: the layer against GShard's einsums", "python -m benchmarks.papers.hetumoe_layer"),
    ("HetuMoE: top-k and layout transform", "python benchmarks/routing.py"),
    (
        "HetuMoE: hierarchical all-to-all (root)",
        "python benchmarks/hierarchical.py --hosts 2 4 8 --mbit 50 --packet-bytes 1500",
    ),
)


def main() -> None:
    """Prints the list."""
    wide = max(len(claim) for claim, _ in CLAIMS)
    for claim, command in CLAIMS:
        print(f"{claim:{wide}}  {command}")


if __name__ == "__main__":
    main()
