"""What every kernel shares: shapes, launch sizes, and a matrix product that also runs under the interpreter."""

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from .replay import eager, note, unheard

__all__ = ["eager"]

INTERPRET = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """a @ b + acc in fp32. The interpreter keeps bf16 as raw bits, which numpy cannot multiply, so it upcasts."""
    if INTERPRET:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)


def precision(dtype):
    """How tl.dot treats fp32 operands: three tf32 products carry about 22 bits. Other types ignore it."""
    return "tf32x3" if dtype == torch.float32 else "tf32"


def as_heads(tensor, trailing):
    """`tensor` viewed as (B, H, *trailing dimensions), without a copy for up to two batch dimensions.

    Args:
        tensor: (*batch, ...) with `trailing` dimensions after the batch.
        trailing: how many dimensions follow the batch.
    """
    batch = tensor.ndim - trailing
    if batch == 2:
        return tensor
    if batch == 1:
        return tensor.unsqueeze(1)
    if batch == 0:
        return tensor[None, None]
    return tensor.flatten(0, batch - 2)


def next_power(x):
    """The smallest power of two that is at least x. Triton's own costs microseconds a call on the host."""
    return 1 << (x - 1).bit_length()


def cdiv(a, b):
    """a / b, rounded up."""
    return -(-a // b)


def padded_dim(d):
    """The power of two, at least 16 (the smallest tl.dot), in which a head of d columns is held."""
    return max(16, next_power(d))


@functools.lru_cache
def _multiprocessors(index):
    return torch.cuda.get_device_properties(index).multi_processor_count


def multiprocessors(tensor):
    """How many programs run at once on the tensor's device."""
    return _multiprocessors(tensor.device.index) if tensor.is_cuda else 4


@functools.lru_cache
def _small(index):
    return torch.cuda.get_device_properties(index).shared_memory_per_block_optin < 128 * 1024


def small(tensor):
    """Whether the tensor's device gives a program 99 KiB of shared memory (RTX, L4), where others give 163 or more."""
    return tensor.is_cuda and _small(tensor.device.index)


@functools.lru_cache
def _blackwell(index):
    return torch.cuda.get_device_capability(index)[0] == 10


def multiplies_fp64(tensor):
    """Whether tl.dot takes fp64 on the tensor's device: Triton 3.6 fails to compile it for compute capability 10.x."""
    return not (tensor.is_cuda and _blackwell(tensor.device.index))


_compiled: dict[tuple[Any, ...], tuple[Any, list[Any]]] = {}


def launch(kernel, grid, tensors, scalars, constants, *, warps, stages=1):
    """Launch `kernel` with tensors, then scalars, then compile-time constants, in the order of its parameters.

    Triton works out what a call is specialised on anew each time, which for thirty arguments costs more than a small
    kernel takes. The compiled kernel is therefore kept under all that can change it: scalars, constants, types and
    device, for pointers aligned to 16 bytes. Other pointers take Triton's own way.

    `stages` is how many tiles are on their way at once, or fewer where the device has no room for them.
    """
    if not tensors[0].is_cuda:
        run = functools.partial(kernel[grid], **constants)
        with unheard():
            run(*tensors, *scalars)
        note(run, tensors, scalars)
        return
    pointers = [t.data_ptr() for t in tensors]
    device = tensors[0].get_device()
    aligned = True
    for pointer, tensor in zip(pointers, tensors, strict=True):
        # Triton looks at a tensor's device; a bare pointer to another one's memory would end the process.
        aligned = aligned and not pointer & 15 and tensor.get_device() == device
    if device != torch.cuda.current_device() or not aligned:
        with torch.cuda.device(device):
            _fitted(kernel[grid], tensors, scalars, constants, warps, stages)
        note(None, tensors, scalars)
        return
    key = (kernel.fn, device, warps, stages, *scalars, *constants.values(), *[t.dtype for t in tensors])
    found = _compiled.get(key)
    if found is None:
        if len(_compiled) >= 4096:
            _compiled.clear()
        handle = _fitted(kernel[grid], tensors, scalars, constants, warps, stages)
        named = [constants[name] for name in kernel.arg_names[len(tensors) + len(scalars) :]]
        _compiled[key] = handle, named
        run = handle[(*grid, 1, 1)[:3]]
    else:
        handle, named = found
        run = handle[(*grid, 1, 1)[:3]]
        run(*pointers, *scalars, *named)
    note(run, tensors, (*scalars, *named))


def _fitted(run, tensors, scalars, constants, warps, stages):
    """Launch with as many stages as fit; the compiled kernel."""
    while True:
        try:
            with unheard():
                return run(*tensors, *scalars, **constants, num_warps=warps, num_stages=stages)
        except triton.runtime.errors.OutOfResources:
            if stages == 1:
                raise
            stages -= 1


def row_splits(n, heads, tile, device_tensor, programs_per_sm=1):
    """(splits, rows in each): enough programs to fill the device once, each a whole number of tiles.

    The order of a two-stage sum follows from this, so it depends on the shape and the device alone.
    """
    tiles = cdiv(n, tile)
    wanted = max(1, multiprocessors(device_tensor) * programs_per_sm // heads)
    per_split = cdiv(tiles, min(tiles, wanted))
    return cdiv(tiles, per_split), per_split * tile
