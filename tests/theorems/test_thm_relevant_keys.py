"""Theorem relevant-K: ⟨q, Kⱼ⟩ ≥ (11/4)δ1‖Kⱼ‖² on S(q), and at most (5/4)δ1‖Kⱼ‖² elsewhere.

For a fixed S(q) the query is linear in its weights and its noise and every assumption is a linear inequality, so the
worst query is the answer of a linear program, which HiGHS finds: the theorem is attacked with the best possible query.
"""

import numpy as np
import pytest
import torch
from scipy.optimize import linprog

from levattention.planted import check, generate, near_orthogonal, queries, recover


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def worst_query(keys, relevant, target, delta1, sign):
    """The query that makes sign·⟨q, K_target⟩/‖K_target‖² smallest, and that value."""
    K = keys.double().numpy()
    squares = np.square(K).sum(-1)
    r, d = len(relevant), K.shape[1]
    # Variables: w, then z in units of δ1.
    cost = np.concatenate([K[relevant] @ K[target], delta1 * K[target]]) * sign / squares[target]
    bound = np.hstack([np.zeros((len(K), r)), K / squares[:, None]])
    total = np.concatenate([np.ones(r), np.zeros(d)])[None]
    answer = linprog(
        cost,
        A_ub=np.vstack([total, bound, -bound]),
        b_ub=np.concatenate([[1.0], np.full(2 * len(K), 0.25)]),
        bounds=[(4 * delta1, 1.0)] * r + [(None, None)] * d,
        method="highs",
    )
    assert answer.status == 0, answer.message
    q = answer.x[:r] @ K[relevant] + delta1 * answer.x[r:]
    return torch.from_numpy(q), sign * answer.fun


def most_dangerous(model, relevant, count):
    """Keys outside S(q) that are most like it, from S and from the rest."""
    K = model.keys.double()
    likeness = (K @ K[relevant].sum(0)).abs() / K.square().sum(-1)
    likeness[relevant] = 0
    inside = torch.zeros(len(K), dtype=torch.bool)
    inside[model.standout] = True
    near = likeness.where(inside, 0).topk(min(count, len(model.standout) - len(relevant))).indices
    far = likeness.where(~inside, 0).topk(count).indices
    return torch.cat([near, far]).tolist()


@pytest.mark.parametrize(
    ("make", "n", "d", "k", "size", "eps1", "extra"),
    [
        (near_orthogonal, 120, 32, 8, 8, 1e-5, {"noise": 0.02}),
        (near_orthogonal, 120, 32, 8, 8, 1e-3, {"noise": 0.15, "rotate": True}),
        (near_orthogonal, 300, 64, 16, 16, 1e-4, {"noise": 0.1, "rotate": True}),
        (near_orthogonal, 300, 64, 16, 5, 1e-6, {"noise": 0.02, "rotate": True}),
        (near_orthogonal, 60, 96, 24, 20, 1e-5, {"noise": 0.05}),
        (generate, 150, 512, 128, 4, 1e-4, {"rotate": True}),
        (generate, 150, 640, 160, 8, 1e-3, {}),
    ],
)
def test_the_worst_query_keeps_both_bounds(make, n, d, k, size, eps1, extra):
    model = make(n, d, k, size / n, eps1, seeded(n + size), **extra)
    found = model.assumptions
    assert found.holds, found.problems
    recovery = recover(model.keys, delta1=found.delta1, rho=found.rho)
    most = min(size - 1, found.max_relevant)
    for r in sorted({1, (1 + most) // 2, most}):
        relevant = model.standout[torch.randperm(size, generator=seeded(r))[:r]].sort().values
        attacks = [(j, 1) for j in relevant[:2].tolist()]
        attacks += [(j, sign) for j in most_dangerous(model, relevant, 2) for sign in (-1, 1)]
        for target, sign in attacks:
            q, score = worst_query(model.keys, relevant.numpy(), target, found.delta1, sign)
            if target in relevant.tolist():
                assert score >= 2.75 * found.delta1 * (1 - 1e-6)
            else:
                assert abs(score) <= 1.25 * found.delta1 * (1 + 1e-6)
            assert recovery.relevant_keys(q).equal(relevant)


@pytest.mark.parametrize("delta", [0.02, 0.1, 0.25])
def test_how_tight_the_bounds_are(delta):
    """Keys at cosine +δ attain 5/4; at cosine −δ the lower bound is 11/4 + 4δ, since other weights sum to 1 − 4δ."""
    size = min(4, int(1 / (4 * delta)) + 1)
    eye = torch.eye(size, dtype=torch.float64)
    close = torch.linalg.cholesky((1 - delta) * eye + delta)
    apart = torch.linalg.cholesky((1 + delta) * eye - delta)
    _, highest = worst_query(close, np.arange(size - 1), size - 1, delta, -1)
    assert highest == pytest.approx(1.25 * delta, rel=1e-6)
    if 4 * delta * size <= 1:
        _, lowest = worst_query(apart, np.arange(size), 0, delta, 1)
        assert lowest == pytest.approx((2.75 + 4 * delta) * delta, rel=1e-6)


@pytest.fixture
def model():
    return near_orthogonal(500, 64, 16, 16 / 500, 1e-5, seeded(), rotate=True)


def test_a_weight_under_the_bound_hides_its_key(model):
    found = model.assumptions
    recovery = recover(model.keys, delta1=found.delta1, rho=found.rho)
    K = model.keys[model.standout].double()
    faint = 0.5 * K[0] + 1.5 * found.delta1 * K[1]
    assert recovery.relevant_keys(faint).tolist() == model.standout[:1].tolist()
    assert not recovery.consistent(faint)
    with pytest.raises(ValueError, match="expected each ≥ 4δ1"):
        model.queries([model.standout[:2]], weights=[[0.5, 1.5 * found.delta1]])


def test_noise_over_the_bound_adds_a_false_key(model):
    found = model.assumptions
    recovery = recover(model.keys, delta1=found.delta1, rho=found.rho)
    K = model.keys[model.standout].double()
    loud = 2.2 * found.delta1 * K[3]
    q = 0.5 * K[0] + loud
    assert recovery.relevant_keys(q).tolist() == model.standout[[0, 3]].tolist()
    assert not recovery.consistent(q)
    with pytest.raises(ValueError, match="noise: expected"):
        model.queries([model.standout[:1]], weights=[[0.5]], noise=loud.unsqueeze(0))


def test_a_key_too_like_a_stand_out_key_is_taken_for_it(model):
    """(delta2) broken: a near copy of a stand-out key outside S."""
    keys = model.keys.clone()
    copy = next(i for i in range(500) if i not in model.standout.tolist())
    keys[copy] = keys[model.standout[0]] * 0.9
    broken = check(keys, model.standout)
    assert not broken.holds
    assert broken.delta2 > 1
    assert any("δ2" in reason for reason in broken.problems)
    delta1 = model.assumptions.delta1
    recovery = recover(keys, delta1=delta1, rho=broken.rho)
    made = queries(keys, model.standout, [model.standout[:1]], delta1=delta1, generator=seeded())
    assert copy in recovery.relevant_keys(made.vectors[0]).tolist()


def test_stand_out_keys_too_like_each_other_confuse(model):
    """(delta1) broken: two stand-out keys at cosine 0.6."""
    keys = model.keys.double().clone()
    a, b = model.standout[:2].tolist()
    keys[b] = 0.6 * keys[a] + 0.8 * keys[b]
    broken = check(keys, model.standout)
    assert not broken.holds
    assert broken.max_relevant == 0
    delta1 = model.assumptions.delta1
    made = queries(keys, model.standout, [[a]], delta1=delta1, weights=[[1.0]], generator=seeded())
    assert recover(keys, delta1=delta1, rho=broken.rho).relevant_keys(made.vectors[0]).tolist() == sorted([a, b])
