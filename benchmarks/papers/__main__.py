"""`make papers`: the claims that can be rerun, each with its command. What came of them is in docs/papers.md."""

CLAIMS = (
    ("MegaBlocks, figure 9: block-sparse products beside cuBLAS", "python -m benchmarks.papers.megablocks_products"),
    ("MegaBlocks, figure 4: block-sparse products over tile sizes", "python -m benchmarks.papers.megablocks_tiles"),
    ("MegaBlocks, section 5.1: transpose indices, topology", "python -m benchmarks.papers.megablocks_indices"),
    ("MegaBlocks, section 6.2: dropless beside token dropping", "python benchmarks/capacity.py data/demo/tokens.pt"),
    (
        "MegaBlocks, figures 7 and 8: speed at equal loss, over dense and token dropping",
        "python -m benchmarks.papers.dropping text.bin.xz",
    ),
    ("its text, from Debian's kernel source", "python -m benchmarks.papers.make_text text.bin.xz"),
    ("MegaBlocks issue 86: the scale of experts' gradients", "python -m benchmarks.papers.gradient_scale"),
    ("HetuMoE: the layer beside GShard's einsums and padding", "python -m benchmarks.papers.hetumoe_layer"),
    ("HetuMoE: shares of gate, top-k, layout and experts", "python -m benchmarks.papers.hetumoe_shares"),
    ("HetuMoE: top-k kernel and layout transform", "python -m benchmarks.papers.hetumoe_kernels"),
    ("HetuMoE: hierarchical all-to-all", "python -m benchmarks.papers.hetumoe_all_to_all"),
    ("The blog: MFU, scaling, checkpoints, resuming", "python -m benchmarks.papers.blog"),
)


def main() -> None:
    """Prints the list."""
    wide = max(len(claim) for claim, _ in CLAIMS)
    for claim, command in CLAIMS:
        print(f"{claim:{wide}}  {command}")


if __name__ == "__main__":
    main()
