"""Every load and store of a kernel under Triton's interpreter, checked against the memory it was given.

What compute-sanitizer's memcheck does on a GPU: an address that is not masked off must lie in one of the launch's
tensors, between its first element and its last. Neighbours in one allocation are told apart where a gap lies between.
"""

import contextlib

import numpy as np


class Spans:
    """The memory of one launch.

    Args:
        tensors: what the launch was given; anything else among them is passed over.
    """

    def __init__(self, tensors):
        held = sorted(self.of(t) for t in tensors if hasattr(t, "data_ptr") and t.numel())
        merged = []
        for start, end in held:
            if merged and start <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], end)
            else:
                merged.append([start, end])
        self.starts, self.ends = np.array(merged, dtype=np.uint64).reshape(-1, 2).T

    @staticmethod
    def of(tensor):
        """From the first byte to behind the last."""
        last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()

    def check(self, what, pointers, mask):
        """Raise IndexError unless all that is not masked off lies inside."""
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        address = pointers.data[np.broadcast_to(mask.data.astype(bool), pointers.data.shape)]
        place = np.searchsorted(self.starts, address, side="right")
        inside = (place > 0) & (address + np.uint64(size) <= self.ends[np.maximum(place, 1) - 1])
        if not inside.all():
            raise IndexError(f"{what} of {size} bytes outside the launch's tensors, {(~inside).sum()} of {inside.size}")


@contextlib.contextmanager
def checked():
    """Inside, a kernel that reads or writes where it must not fails."""
    from triton.runtime import interpreter

    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    plain = builder.create_masked_load, builder.create_masked_store, executor._init_args_hst
    spans = Spans([])

    def arguments(self, args, kwargs):
        nonlocal spans
        args, kwargs = plain[2](self, args, kwargs)
        spans = Spans([*args, *kwargs.values()])
        return args, kwargs

    def load(self, ptrs, mask, *rest, **options):
        spans.check("load", ptrs, mask)
        return plain[0](self, ptrs, mask, *rest, **options)

    def store(self, ptrs, value, mask, *rest, **options):
        spans.check("store", ptrs, mask)
        return plain[1](self, ptrs, value, mask, *rest, **options)

    builder.create_masked_load, builder.create_masked_store, executor._init_args_hst = load, store, arguments
    try:
        yield
    finally:
        builder.create_masked_load, builder.create_masked_store, executor._init_args_hst = plain
