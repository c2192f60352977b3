"""Fresh tensors that hold NaN or nonsense, so that an element no kernel wrote is seen."""

import contextlib

import torch

from levattention.kernels import replay

MAKERS = [(torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (torch.Tensor, "new_empty")]


def poison(tensor):
    # The filling is no part of a call that is being recorded.
    with replay.unheard():
        if tensor.dtype == torch.bool:
            return tensor
        return tensor.fill_(float("nan") if tensor.is_floating_point() else 177 if tensor.dtype == torch.uint8 else -77)


@contextlib.contextmanager
def poisoned():
    """Every fresh tensor is poisoned, scratch memory too."""
    plain = [getattr(owner, name) for owner, name in MAKERS]

    def poisoning(make):
        return lambda *args, **kwargs: poison(make(*args, **kwargs))

    for (owner, name), make in zip(MAKERS, plain, strict=True):
        setattr(owner, name, poisoning(make))
    try:
        yield
    finally:
        for (owner, name), make in zip(MAKERS, plain, strict=True):
            setattr(owner, name, make)
