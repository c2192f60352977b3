"""The check of memory itself: that it sees what lies outside, by one element, on either side."""

import pytest
import torch
import triton
import triton.language as tl

from memcheck import Spans

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU this is compute-sanitizer's work")


@triton.jit
def _copy(source, target, start, into, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(target + into + at, tl.load(source + start + at, mask=at < n, other=0.0), mask=at < n)


def middle(n):
    """n elements in the middle of an allocation, so that a step outside would not crash."""
    return torch.zeros(3 * n)[n : 2 * n]


def test_what_is_inside_or_masked_off_passes():
    source, target = middle(10).copy_(torch.arange(10.0)), middle(10)
    _copy[1,](source, target, 0, 0, 10, BLOCK=16)
    assert torch.equal(source, target)


@pytest.mark.parametrize("step", [-1, 1])
@pytest.mark.parametrize("what", ["load", "store"])
def test_one_element_too_far_is_seen(what, step):
    start, into = (step, 0) if what == "load" else (0, step)
    with pytest.raises(Exception, match=f"{what} of 4 bytes outside the launch's tensors, 1 of 10"):
        _copy[1,](middle(10), middle(10), start, into, 10, BLOCK=16)


def test_a_slice_is_its_own_elements_alone():
    whole = torch.zeros(6, 4)
    start, end = Spans.of(whole[1:3, :2])
    assert (start - whole.data_ptr(), end - whole.data_ptr()) == (16, 16 + 6 * 4)
