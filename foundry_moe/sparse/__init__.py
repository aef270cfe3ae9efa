"""Block-sparse matrices of any topology and their products with dense ones, with gradients.

The format and the products are those of MegaBlocks (Gale et al. 2022, section 5): see `Matrix`, `sdd`, `dsd` and `dds`.
Needs no Composer and no experts.
"""

from foundry_moe.sparse.matrix import BlockIndex, Matrix
from foundry_moe.sparse.products import dds, dsd, sdd

__all__ = ["BlockIndex", "Matrix", "dds", "dsd", "sdd"]
