"""The most memory that lives at once during a call, counted tensor by tensor on any device."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Peak(TorchDispatchMode):
    """Bytes of the storages made inside that are alive together; those below `at_least` bytes are not counted."""

    def __init__(self, at_least=0):
        super().__init__()
        self.bytes, self.live, self.seen, self.at_least = 0, 0, set(), at_least

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.count(leaf.untyped_storage())
        return out

    def count(self, storage):
        key, size = storage._cdata, storage.nbytes()
        if key in self.seen or size < self.at_least:
            return
        self.seen.add(key)
        self.live += size
        self.bytes = max(self.bytes, self.live)
        weakref.finalize(storage, self.drop, key, size)

    def drop(self, key, size):
        self.seen.discard(key)
        self.live -= size
