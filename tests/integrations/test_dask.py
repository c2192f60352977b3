"""Dask arrays and files on workers, one of which is killed in the middle."""

import os
import signal

import dask
import dask.array as da
import numpy as np
import pytest
import torch
from dask.distributed import Client, LocalCluster
from safetensors.torch import save_file

import levattention as la
from levattention.features import TensorPower
from levattention.integrations.dask import universal_set
from levattention.scorers.lift import Lift
from levattention.scorers.robust import Robust
from strategies import conditioned, heavy_tailed

EPS = 0.03


def members(u):
    return sorted(u.index[u.valid].tolist())


def expected(matrix, eps=EPS):
    return (la.leverage_scores(matrix) >= eps).nonzero().squeeze(-1).tolist()


@pytest.fixture(autouse=True)
def here():
    """In this process, unless a cluster is given."""
    with dask.config.set(scheduler="synchronous"):
        yield


@pytest.mark.parametrize("chunks", [(900, 6), (70, 2), ((1, 399, 500), 6)])
@pytest.mark.parametrize("name", ["heavy", "ill-conditioned"])
def test_arrays_equal_offline(name, chunks):
    matrix = heavy_tailed(900, 6) if name == "heavy" else conditioned(900, 6, 1e6) * heavy_tailed(900, 1).abs()
    u = universal_set(da.from_array(matrix.numpy(), chunks=chunks), eps=EPS)
    assert members(u) == expected(matrix)
    assert torch.equal(u.keys[u.valid], matrix[u.index[u.valid]])


@pytest.mark.parametrize("loss", [la.Power(4), la.Power(1), la.Huber(), la.Tukey()], ids=str)
def test_other_losses_do_not_depend_on_chunks(loss):
    matrix = heavy_tailed(900, 4)
    assert TensorPower(2).width(4) == 10
    sets = [universal_set(da.from_array(matrix.numpy(), chunks=(size, 4)), eps=EPS, loss=loss) for size in (900, 123)]
    assert members(sets[0]) == members(sets[1])
    torch.testing.assert_close(sets[0].scores, sets[1].scores, rtol=1e-8, atol=0)
    if loss != la.Power(1):
        scores = Lift(4)(matrix) if loss == la.Power(4) else Robust(loss).decide(matrix, EPS)
        sure, maybe = ({i for i, s in enumerate(scores.tolist()) if s >= EPS * f} for f in (1.005, 0.995))
        assert sure <= set(members(sets[0])) <= maybe


def test_files_of_every_kind(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    matrix = heavy_tailed(900, 6).float()
    np.save(tmp_path / "a.npy", matrix[:300].numpy())
    save_file({"k": matrix[300:500].contiguous()}, tmp_path / "b.safetensors")
    pq.write_table(pa.table({f"c{i}": matrix[500:, i].numpy() for i in range(6)}), tmp_path / "c.parquet")
    assert members(universal_set([tmp_path / "a.npy", tmp_path / "[bc].*"], eps=EPS)) == expected(matrix)


def test_errors_name_chunk_file_and_row(tmp_path):
    matrix = heavy_tailed(100, 3).numpy()
    matrix[57, 1] = np.nan
    np.save(tmp_path / "a.npy", matrix[:50])
    np.save(tmp_path / "b.npy", matrix[50:])
    np.save(tmp_path / "c.npy", np.ones((4, 2)))
    for keys, message in [
        (da.from_array(matrix, chunks=(30, 3)), "chunk 1: row 27 holds nan"),
        (str(tmp_path / "[ab].npy"), r"b.npy: row 7 holds nan"),
        (str(tmp_path / "[ac].npy"), r"c.npy: expected keys of shape \('n', 3\)"),
        (da.ones((4, 2), dtype=int), "expected float16, float32 or float64, got int64"),
        (da.ones(4), "got 1 dimensions"),
        ([], "at least one file"),
    ]:
        with pytest.raises(ValueError, match=message):
            universal_set(keys, eps=EPS)


class Deadly:
    """A chunk whose reading kills the worker, the first time."""

    def __init__(self, block, flag):
        self.block, self.flag = block, flag

    def __call__(self):
        try:
            os.close(os.open(self.flag, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return self.block
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_killed_in_the_middle_changes_nothing(tmp_path):
    matrix = heavy_tailed(1200, 5)
    blocks = [block.numpy() for block in matrix.split(100)]
    flag = tmp_path / "killed"
    lazy = [dask.delayed(Deadly(b, flag))() if i == 7 else dask.delayed(b) for i, b in enumerate(blocks)]
    array = da.concatenate([da.from_delayed(b, (100, 5), np.float64) for b in lazy])
    alone = universal_set(da.from_array(matrix.numpy(), chunks=(100, 5)), eps=EPS)
    cluster = LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None)
    with cluster, Client(cluster) as client:
        u = universal_set(array, eps=EPS, client=client)
    assert flag.exists()
    assert members(u) == expected(matrix)
    for name in ("index", "valid", "scores", "keys"):
        assert torch.equal(getattr(u, name), getattr(alone, name)), name
