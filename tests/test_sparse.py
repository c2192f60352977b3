"""Sparse keys: the same answers as dense ones, at a cost that follows the non-zeros."""

import warnings

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import levattention as la
from levattention.scorers import Leverage, Lewis
from strategies import conditioned, deficient

warnings.filterwarnings("ignore", message="Sparse")


def sparse(n, d, density, seed=0):
    generator = torch.Generator().manual_seed(seed)
    kept = torch.rand(n, d, generator=generator) < density
    return (torch.randn(n, d, generator=generator, dtype=torch.float64) * kept).to_sparse_csr()


class LargestDense(TorchDispatchMode):
    """The size of the largest dense tensor that any operation returns, and the multiplications of dense products."""

    def __init__(self):
        super().__init__()
        self.elements = 0
        self.dense_products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
                self.elements = max(self.elements, tensor.numel())
        if func._schema.name in ("aten::mm", "aten::bmm", "aten::baddbmm_", "aten::addmm") and all(
            argument.layout is torch.strided for argument in args if isinstance(argument, torch.Tensor)
        ):
            left, right = args[-2:]
            self.dense_products += left.numel() * right.shape[-1]
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_leverage_equals_dense(dtype):
    keys = sparse(3000, 20, 0.2).to(dtype)
    dense = keys.to_dense()
    report = Leverage().report(keys)
    torch.testing.assert_close(report.scores, la.leverage_scores(dense), rtol=1e-9, atol=1e-14)
    assert report.route == "gram"
    torch.testing.assert_close(la.witness(keys, 5), la.witness(dense, 5), rtol=1e-8, atol=1e-14)


@pytest.mark.parametrize("p", [1, 1.5, 2, 4, 10])
def test_lewis_equals_dense(p):
    keys = sparse(2000, 12, 0.3)
    torch.testing.assert_close(la.lewis_weights(keys, p), la.lewis_weights(keys.to_dense(), p), rtol=1e-6, atol=1e-12)
    torch.testing.assert_close(Lewis(p)(keys), Lewis(p)(keys.to_dense()), rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("make", [lambda: conditioned(500, 10, 1e6), lambda: deficient(500, 10, 4)])
def test_ill_conditioned_sparse_keys_take_qr(make):
    dense = make()
    dense[::3] = 0
    report = Leverage().report(dense.to_sparse_csr())
    assert report.route == "qr"
    torch.testing.assert_close(report.scores, la.leverage_scores(dense), rtol=1e-7, atol=1e-13)
    torch.testing.assert_close(
        la.lewis_weights(dense.to_sparse_csr(), 3), la.lewis_weights(dense, 3), rtol=1e-5, atol=1e-12
    )


@pytest.mark.parametrize("loss", [la.Power(2), la.Power(1), la.Power(4)])
def test_universal_sets_equal_dense(loss):
    keys = sparse(4000, 10, 0.1)
    found = la.universal_set(keys, eps=0.005, loss=loss)
    exact = la.universal_set(keys.to_dense(), eps=0.005, loss=loss)
    assert torch.equal(found.mask(4000), exact.mask(4000))
    assert int(found.size) > 0
    torch.testing.assert_close(found.rows(keys)[0], keys.to_dense()[found.index[0]])
    assert la.universal_set(keys, k=7, loss=loss).index.shape == (7,)


@pytest.mark.parametrize(
    "score", [la.leverage_scores, lambda keys: la.lewis_weights(keys, 4), lambda keys: la.universal_set(keys, k=5)]
)
def test_work_on_99_percent_sparse_keys_follows_the_non_zeros(score, monkeypatch):
    """No dense tensor near n × d, and no dense product over the rows: what is left is sparse, O(nnz·d) a pass."""
    n, d = 20_000, 100
    keys = sparse(n, d, 0.01)
    monkeypatch.setattr("levattention.gram.CPU_TILE", 1 << 14)
    with LargestDense() as work:
        score(keys)
    assert keys.values().numel() < 0.011 * n * d
    assert 0 < work.elements <= max(n + 1, keys.values().numel()) < n * d / 50
    assert work.dense_products == 0
    with LargestDense() as work:
        score(keys.to_dense())
    assert work.dense_products >= 2 * n * d * d


def test_the_sparse_gram_multiplies_only_pairs_of_non_zeros():
    """Σ nnz(kᵢ)² products make the Gram of 0/1 keys: its entries count exactly them."""
    keys = sparse(5000, 50, 0.05)
    ones = torch.sparse_csr_tensor(keys.crow_indices(), keys.col_indices(), torch.ones_like(keys.values()), (5000, 50))
    in_row = keys.crow_indices().diff().double()
    assert la.Gram.of(ones).matrix.sum() == in_row.square().sum()
    assert in_row.square().sum() < keys.values().numel() * 50 / 10


def test_what_is_refused():
    with pytest.raises(ValueError, match=r"two-dimensional torch.sparse_csr one, got torch.sparse_coo"):
        la.leverage_scores(torch.eye(3).to_sparse_coo())
    with pytest.raises(ValueError, match=r"got torch.sparse_csr with shape \(2, 3, 3\)"):
        la.leverage_scores(torch.eye(3).expand(2, 3, 3).to_sparse_csr())
    bad = torch.eye(3)
    bad[1, 1] = float("nan")
    with pytest.raises(ValueError, match="row 1 holds nan"):
        la.leverage_scores(bad.to_sparse_csr())
    with pytest.raises(ValueError, match="overflow when squared"):
        la.leverage_scores((torch.eye(3, dtype=torch.float64) * 1e200).to_sparse_csr())
    with pytest.raises(ValueError, match="'svd' needs dense keys"):
        Leverage(route="svd")(torch.eye(3).to_sparse_csr())
    with pytest.raises(ValueError, match="needs dense keys"):
        la.universal_set(torch.eye(3).to_sparse_csr(), k=1, key_map=la.features.TensorPower(2))
