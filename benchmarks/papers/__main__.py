"""`make papers`: the claims that can be rerun, each with its command. What came of them is in docs/papers.md."""

CLAIMS = (
    (
        "MegaBlocks, figure 9: block-sparse products beside cuBLAS",
        "python benchmarks/matmul.py --cases XS,Small,Medium",
    ),
    ("MegaBlocks, figure 4: block-sparse products over tile sizes", "python benchmarks/sparse_tiles.py"),
    ("MegaBlocks, section 6.2: dropless beside token dropping", "python benchmarks/capacity.py data/demo/tokens.pt"),
    ("MegaBlocks issue 86: the scale of experts' gradients", "python -m benchmarks.papers.gradient_scale"),
    ("HetuMoE, top-k kernel and layout transform", "python benchmarks/routing.py"),
    ("HetuMoE, hierarchical all-to-all", "python benchmarks/hierarchical.py --mbit 50 --packet-bytes 1500"),
)


def main() -> None:
    """Prints the list."""
    wide = max(len(claim) for claim, _ in CLAIMS)
    for claim, command in CLAIMS:
        print(f"{claim:{wide}}  {command}")


if __name__ == "__main__":
    main()
