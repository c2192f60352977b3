"""A call that was recorded gives, replayed on other tensors, what it gives when it runs as it is written."""

import pytest
import torch

from levattention import kernels
from levattention.kernels import replay

SHAPES = [(2, 3, 70, 32, 9), (1, 2, 1100, 16, 20)]


@pytest.fixture(autouse=True)
def no_plans(monkeypatch):
    monkeypatch.setattr(replay, "_plans", {})


@pytest.fixture
def written(monkeypatch):
    """The call as it is written, without recording or replay."""

    def run(call):
        with monkeypatch.context() as patch:
            patch.setattr(replay, "_kind", lambda function, args: None)
            return call()

    return run


def heads(device, b, h, n, d, seed, dtype=torch.float32):
    """q, k and v as a fused projection gives them: views of one tensor, heads not contiguous."""
    generator = torch.Generator().manual_seed(seed)
    fused = torch.randn(b, n, 3, h, d, generator=generator).to(device, dtype)
    return [part.transpose(1, 2) for part in fused.unbind(2)]


def attended(q, k, v, top_k, mask=None):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, index = kernels.top_k_attention(*leaves, top_k, scale=0.2, key_mask=mask)
    seed = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(out)
    return [out.detach(), index, *torch.autograd.grad(out, leaves, seed)]


def same(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype
        assert a.stride() == b.stride()
        assert torch.equal(a, b)


def kept():
    return [plan for plan in replay._plans.values() if plan is not None]


@pytest.mark.parametrize("shape", SHAPES)
def test_other_tensors_of_the_same_kind(shape, device, written):
    *sizes, top_k = shape
    first = attended(*heads(device, *sizes, seed=0), top_k)
    assert len(kept()) == len(replay._plans) == 3  # select, attention and its backward
    copies = [x.clone() for x in first]
    for seed in (1, 2):
        q, k, v = heads(device, *sizes, seed=seed)
        # Scratch memory and results start as NaN: what is not written is seen.
        same(attended(q, k, v, top_k), written(lambda x=(q, k, v): attended(*x, top_k)))
    # Results are tensors of their own, which a later call leaves alone.
    same(first, copies)
    assert len(replay._plans) == 3


def test_padding_and_half_precision(device, written):
    *sizes, top_k = SHAPES[0]
    for seed in range(3):
        q, k, v = heads(device, *sizes, seed=seed, dtype=torch.float16)
        mask = torch.rand(2, 1, 70, generator=torch.Generator().manual_seed(seed)).to(device) < 0.7
        mask = mask.expand(k.shape[:-1]).contiguous()
        same(attended(q, k, v, top_k, mask), written(lambda x=(q, k, v, top_k, mask): attended(*x)))
    assert kept()


def test_one_tensor_as_queries_keys_and_values(device, written):
    q, _, _ = heads(device, 1, 2, 70, 32, seed=0)
    index = kernels.select(q, 9)
    for _ in range(2):
        ours = kernels.gathered_attention(q, q, q, index, scale=0.2)
        same(ours, written(lambda: kernels.gathered_attention(q, q, q, index, scale=0.2)))


def test_a_start_that_is_not_aligned(device, written):
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(1 + 2 * 70 * 32, generator=generator).to(device)[1:].view(2, 70, 32)
    for _ in range(2):
        assert torch.equal(kernels.select(keys, 9), written(lambda: kernels.select(keys, 9)))
    assert not replay._plans


def test_what_is_no_launch_is_not_kept(device, written):
    # Above 128 columns the factor comes from an eigendecomposition.
    for seed in range(2):
        keys = torch.randn(1, 300, 130, generator=torch.Generator().manual_seed(seed)).to(device)
        assert torch.equal(kernels.select(keys, 7), written(lambda keys=keys: kernels.select(keys, 7)))
    assert not kept()
    assert replay._plans


def test_other_numbers_are_another_kind(device):
    q, k, v = heads(device, 1, 2, 70, 32, seed=0)
    index = kernels.select(k, 9)
    sharp, _ = kernels.gathered_attention(q, k, v, index, scale=2.0)
    for _ in range(2):
        assert torch.equal(kernels.gathered_attention(q, k, v, index, scale=2.0)[0], sharp)
        assert not torch.equal(kernels.gathered_attention(q, k, v, index, scale=0.1)[0], sharp)
    assert kernels.select(k, 5).shape[-1] == 5


def test_an_error_while_recording_leaves_nothing_behind(device, monkeypatch):
    _, k, _ = heads(device, 1, 2, 70, 32, seed=0)
    with monkeypatch.context() as patch:
        patch.setattr("levattention.kernels.fused.ranked", lambda *x: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            kernels.select(k, 9)
    assert replay._local.recording is None
    assert kernels.select(k, 9).shape == (1, 2, 9)


def test_the_number_of_plans_is_bounded(device, monkeypatch):
    monkeypatch.setattr(replay, "MOST", 3)
    keys = torch.randn(1, 60, 16, generator=torch.Generator().manual_seed(0)).to(device)
    for k in range(1, 9):
        kernels.select(keys, k)
        assert len(replay._plans) <= 3
