"""LiveBytes: bytes of all tensors that exist, and their peak, counted by operation."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts tensors that operations of this thread make while it is active.

    Views count once. Memory that one operation takes and frees within is not seen. Tensors of
    other threads are `add`ed.
    """

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self._known = {}  # address of a storage object -> a reference that lives as long

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(found):
            if isinstance(leaf, torch.Tensor):
                self.add(leaf)
        return found

    def add(self, tensor):
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known or not storage.nbytes():
            return
        size = storage.nbytes()

        def end(_):
            del self._known[key]
            self.now -= size

        self._known[key] = weakref.ref(storage, end)
        self.now += size
        self.peak = max(self.peak, self.now)
