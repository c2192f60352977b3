"""What can be known of a GPU without one: every kernel compiles for it and fits, and small tiles give the same."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import reference
from levattention import kernels
from levattention.kernels import (
    attention,
    attention_backward,
    common,
    gram_matrix,
    prefill_backward,
    running,
    scores,
    short,
)
from test_attention_kernels import BOUND, check, problem
from test_prefill_kernels import check as check_causal
from test_prefill_kernels import problem as causal_problem
from test_running_kernels import plain, spread

CAUSAL = {"prefix", "running", "prefill", "slot"}
TOOL = Path(__file__).parents[2] / "benchmarks" / "compiled.py"


@pytest.mark.parametrize("capability", [80, 89, 90])
def test_every_kernel_compiles_and_fits(capability, tmp_path):
    # In a process of its own: here Triton interprets.
    plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, TOOL, "--capability", str(capability), "--types", "bf16", "--shapes"]
    command += ["64x6x197x64x32", "1x16x65536x128x128", "2x8x1500x80x130"]
    ran = subprocess.run([*command, "--out", tmp_path / "rows.json"], env=plain, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert {"gram", "whiten", "short", "round", "forward", "key", "query", "scatter"} | CAUSAL <= {
        row["kernel"] for row in rows
    }
    assert all(row["programs"] >= 1 for row in rows)


@pytest.fixture
def tight(monkeypatch):
    """The tiles of a GPU with little shared memory."""
    for module in (attention, attention_backward, scores, short, running, prefill_backward):
        monkeypatch.setattr(module, "small", lambda tensor: True)


@pytest.mark.parametrize(
    ("d", "c", "dtype"),
    [(128, 90, torch.bfloat16), (256, 40, torch.bfloat16), (96, 40, torch.float32), (256, 20, torch.float32)],
)
def test_attention_in_small_tiles(d, c, dtype, tight, device):
    check(*problem(1, 2, 1, 50, 120, d, c, dtype, device), bound=BOUND[dtype])


def test_causal_attention_in_small_tiles(tight, device):
    keys = spread(1, 1, 300, 96, device=device)
    index, valid = kernels.running_top_k(keys, 7, chunk=150)
    assert index[0, 0, 1].tolist() == plain(keys, 7, chunk=150)[0][0][1]
    # Queries of their own: a key times itself gives logits of 40, whose fp32 logarithm alone costs the backward 3e-6.
    q, _, v, *_ = causal_problem(1, 1, 1, 300, 300, 96, 7, 150, device=device)
    check_causal(q, keys, v, index, valid, chunk=150, reach=9, scale=0.05, bound=BOUND[torch.float32])


@pytest.mark.parametrize("d", [96, 256])
def test_selection_in_small_tiles(d, tight, device):
    keys = torch.randn(2, 300, d, generator=torch.Generator().manual_seed(0)).to(device)
    index, found = kernels.ranked(keys, 20)
    exact = reference.leverage(keys)
    assert (found - exact).abs().max() <= 1e-4
    assert torch.equal(index.sort().values, reference.top_k(exact, 20).sort().values)


@pytest.mark.parametrize("masked", [False, True])
def test_precise_gram_where_triton_has_no_fp64_product(masked, monkeypatch, device):
    monkeypatch.setattr(gram_matrix, "multiplies_fp64", lambda tensor: False)
    monkeypatch.setattr(gram_matrix, "PLAIN_ROWS", 40)
    keys = torch.randn(2, 3, 130, 20, generator=torch.Generator().manual_seed(0)).to(device)
    mask = torch.arange(130, device=device).expand(2, 1, 130) % 3 > 0 if masked else None
    exact = reference.gram(keys, mask)
    if mask is not None:
        keys = keys.masked_fill(~mask.unsqueeze(-1), float("nan"))
    got = kernels.gram(keys, mask, precise=True)
    assert (got - exact).abs().max() <= 1e-13 * exact.abs().max()
    assert torch.equal(got, got.mT)


def test_stages_are_given_up_until_a_kernel_fits():
    from triton.runtime.errors import OutOfResources

    tried = []

    def run(*given, num_warps, num_stages):
        tried.append(num_stages)
        if num_stages > fits:
            raise OutOfResources(200_000, 100_000, "shared memory")
        return "compiled"

    fits = 2
    assert common._fitted(run, (), (), {}, warps=4, stages=4) == "compiled"
    assert tried == [4, 3, 2]
    fits = 0
    with pytest.raises(OutOfResources):
        common._fitted(run, (), (), {}, warps=4, stages=2)
