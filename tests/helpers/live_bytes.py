"""The most bytes that tensors held at once, on any device: for tests of memory."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Within, follows the storage of each tensor that an operation makes; `peak` is the most bytes at once."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self._known = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = {
            leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
        }
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._follow(leaf.untyped_storage(), before)
        return result

    def _follow(self, storage, before):
        address = storage._cdata
        if address in self._known or address in before:
            return
        self._known.add(address)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, address, storage.nbytes())

    def _free(self, address, size):
        self._known.discard(address)
        self.now -= size
