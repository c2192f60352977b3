"""One answer on 1, 2 and 4 gloo processes, what it sends, and what the others are told when a rank fails."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import levattention as la
from levattention.scorers.lift import Lift
from levattention.scorers.robust import Robust
from oracles import leverage_by_svd
from ranks import CUTS, EPS, LOSSES, SCENARIOS, keys, shard
from strategies import heavy_tailed


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What every rank of every scenario left behind; None where it left nothing."""
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, Path(__file__).with_name("ranks.py"), folder]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr

    def left(path):
        return torch.load(path, weights_only=False) if path.exists() else None

    return {name: [left(folder / name / f"{rank}.pt") for rank in range(size)] for name, (size, _) in SCENARIOS.items()}


@pytest.fixture
def ranks(runs):
    assert None not in runs["equal"]
    return runs["equal"]


def members(u):
    return sorted(u["index"][u["valid"]].tolist())


def offline(matrix, loss):
    """Scores by another route than that of the streams."""
    if loss == "x2":
        return la.leverage_scores(matrix)
    if loss == "x4":
        return Lift(4)(matrix)
    return Robust(LOSSES[loss]).decide(matrix, EPS)


SUMMED = [(name, loss) for name in keys() for loss in ("x2", "x4")]
WEIGHED = [(name, loss) for name in ("heavy tails", "growing") for loss in ("x1", "x3", "Huber", "Tukey")]


@pytest.mark.parametrize(("name", "loss"), SUMMED)
def test_x2_and_even_p_equal_offline_in_either_protocol(ranks, name, loss):
    matrix = keys()[name]
    scores = offline(matrix, loss)
    assert ((scores - EPS).abs() > 1e-8).all()
    expected = (scores >= EPS).nonzero().squeeze(-1).tolist()
    for size in CUTS:
        for protocol in (None, "one-round", "two-round"):
            u = ranks[0][size, name, loss, protocol]
            assert members(u) == expected, (size, protocol)
            kappa = float(la.scorers.Leverage().report(matrix).condition)
            # R instead of the Gram from κ = 1e3 on. The lift squares what is left of κ after whitening.
            tolerance = 1e-8 if loss == "x4" else max(1e-12, 1e-15 * kappa * min(kappa, 10))
            torch.testing.assert_close(
                u["scores"][u["valid"]], scores[u["index"][u["valid"]]], rtol=tolerance, atol=1e-12
            )


@pytest.mark.parametrize(("name", "loss"), WEIGHED)
def test_weights_by_repeated_rounds_do_not_depend_on_the_ranks(ranks, name, loss):
    matrix = keys()[name]
    alone = ranks[0][1, name, loss, None]
    for size in (2, 4):
        u = ranks[0][size, name, loss, None]
        assert members(u) == members(alone)
        torch.testing.assert_close(u["scores"], alone["scores"], rtol=1e-8, atol=0)
    if loss in ("Huber", "Tukey"):
        scores = offline(matrix, loss).tolist()
        sure, maybe = ({i for i, s in enumerate(scores) if s >= EPS * factor} for factor in (1.005, 0.995))
        assert sure <= set(members(alone)) <= maybe
    for size in CUTS:
        for protocol in ("one-round", "two-round"):
            u = ranks[0][size, name, loss, protocol]
            assert u["route"] == "online weights"
            assert len(members(u)) < 600


def test_every_rank_has_the_same_bits(ranks):
    for case, first in ranks[0].items():
        for rank in range(1, 4):
            if case not in ranks[rank]:
                continue
            other = ranks[rank][case]
            for name in ("index", "valid", "scores", "eps", "keys", "rank"):
                assert torch.equal(first[name], other[name]), (case, rank, name)


def test_the_keys_of_the_set_are_delivered(ranks):
    for case, u in ranks[3].items():
        if isinstance(case, tuple):
            assert torch.equal(u["keys"][u["valid"]], keys()[case[1]][u["index"][u["valid"]]]), case


def test_payload_is_what_the_protocols_promise(ranks):
    matrix, d = keys()["heavy tails"], 5
    in_set = (leverage_by_svd(matrix, 1e-12) >= EPS).nonzero().squeeze(-1)
    for size, cuts in CUTS.items():
        for rank in range(size):
            rows = shard(matrix, rank, size)
            # A shard with fewer rows than columns keeps them all; otherwise its candidates are its own heavy rows.
            candidates = int((leverage_by_svd(rows, 1e-12) >= EPS).sum()) if len(rows) else 0
            one = ranks[rank][size, "heavy tails", "x2", "one-round"]
            assert one["traffic"]["words"] == d * d + candidates * d
            inside = int(((in_set >= cuts[rank]) & (in_set < cuts[rank + 1])).sum())
            two = ranks[rank][size, "heavy tails", "x2", "two-round"]
            # An empty shard has no Gram to send, but is told the sum.
            assert two["traffic"]["words"] == (2 if len(rows) else 1) * d * d + inside * d
            assert (one["traffic"]["rounds"], two["traffic"]["rounds"]) == (1, 2)
            if rank:
                # What really left the process: fp64 words, then positions, flags, counts and names.
                assert 8 * one["traffic"]["words"] <= one["sent"] <= 8 * one["traffic"]["words"] + 9 * candidates + 1500


def test_a_lift_pays_for_its_gram_and_its_map(ranks):
    for rank in range(4):
        u = ranks[rank][4, "heavy tails", "x4", "one-round"]
        rows = shard(keys()["heavy tails"], rank, 4)
        # The lifted Gram, that of the keys, and the map.
        wide = 15 * 15 + 2 * 25
        assert (u["traffic"]["words"] - wide) % 5 == 0
        assert wide <= u["traffic"]["words"] <= wide + 5 * len(rows)


def test_a_mesh_and_heads(ranks):
    scores = la.leverage_scores(keys()["fp32"])
    assert members(ranks[2]["mesh"]) == (scores >= EPS).nonzero().squeeze(-1).tolist()
    heads = la.leverage_scores(heavy_tailed(600, 6, 4).reshape(600, 2, 3).transpose(0, 1))
    u = ranks[1]["heads"]
    for head in range(2):
        mine = u["index"][head][u["valid"][head]].sort().values
        assert mine.tolist() == (heads[head] >= EPS).nonzero().squeeze(-1).tolist()


def test_what_is_bad_on_one_rank_is_everybodys_error(runs):
    results = runs["errors"]
    for name, own, others in [
        ("nan", "ValueError: block at position 0: row 7 holds nan", "ValueError: rank 1: block at position 0: row 7"),
        (
            "nan at the first",
            "ValueError: block at position 0: row 7",
            "ValueError: rank 0: block at position 0: row 7",
        ),
    ]:
        bad = 0 if "first" in name else 1
        assert results[bad][name].startswith(own)
        assert results[1 - bad][name].startswith(others)
    for name, message in [
        ("width", "expected a stream with (d, eps, loss, batch)"),
        ("width, two rounds", "expected 5 columns everywhere, got 4"),
        ("flat", "local_keys: expected shape (*batch, m, d), got (5,)"),
        ("eps", "expected the same eps, loss and protocol on every rank"),
        ("protocol", "expected the same eps, loss and protocol on every rank"),
        ("empty", "expected at least one row"),
        ("empty, two rounds", "expected at least one block"),
        ("no such protocol", "expected 'one-round', 'two-round' or None, got 'three'"),
        ("mesh", "expected a mesh with one dimension"),
    ]:
        for rank in range(2):
            assert message in results[rank][name], (name, rank)
            assert results[rank][name].startswith("ValueError") or name == "mesh"
    matrix = torch.cat([heavy_tailed(300, 5, 0), heavy_tailed(300, 5, 1)])
    expected = (la.leverage_scores(matrix) >= EPS).nonzero().squeeze(-1).tolist()
    assert members(results[0]["after"]) == expected


@pytest.mark.parametrize(("scenario", "gone"), [("killed", 2), ("first killed", 0), ("hung", 1)])
def test_a_rank_that_is_gone_ends_the_others_in_time(scenario, gone, runs):
    results = runs[scenario]
    assert results[gone] is None
    for rank in {0, 1, 2} - {gone}:
        assert results[rank]["told"].startswith("ConnectionError: rank "), results[rank]
        assert "is gone or did not answer in time" in results[rank]["told"]
        # Its own wait, and at most the first rank's before it.
        assert results[rank]["seconds"] < 12


def test_without_a_group_it_says_so():
    with pytest.raises(ValueError, match="init_process_group"):
        la.distributed.universal_set(torch.eye(3), eps=0.5)
