"""`levattention find` on many files and on standard input: one answer, and what faults leave behind."""

import io
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import levattention as la
from levattention.cli import main
from levattention.stream import KeyStream
from strategies import heavy_tailed

EPS = 0.01
SHARDS = 8


@pytest.fixture(scope="module")
def matrix():
    return heavy_tailed(4000, 6).float()


@pytest.fixture
def folder(matrix, tmp_path, monkeypatch):
    """Eight uneven shards of one matrix, and the place to run in."""
    monkeypatch.chdir(tmp_path)
    cuts = [0, 100, 900, 901, 1500, 2200, 3000, 3700, 4000]
    for i in range(SHARDS):
        np.save(tmp_path / f"shard{i}.npy", matrix[cuts[i] : cuts[i + 1]].numpy())
    return tmp_path


@pytest.fixture
def find(monkeypatch, capsys):
    """The command in this process: (exit code, standard output, standard error)."""

    def run(*arguments, stdin=b""):
        monkeypatch.setattr(sys, "argv", ["levattention", "find", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        threads = torch.get_num_threads()
        try:
            main()
            code = 0
        except SystemExit as ending:
            code = ending.code or 0
        finally:
            torch.set_num_threads(threads)
        out, err = capsys.readouterr()
        return code, out, err

    return run


def started(*arguments, prelude="", **options):
    """The command in a process of its own."""
    script = f"{prelude}\nfrom levattention.cli import main\nmain()"
    command = [sys.executable, "-c", script, "find", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.PIPE, **options)


def arrays(matrix, size):
    """One .npy array after another."""
    buffer = io.BytesIO()
    for block in matrix.split(size):
        np.save(buffer, block.numpy())
    return buffer.getvalue()


def expected(matrix):
    u = la.universal_set(matrix, eps=EPS)
    return sorted(u.index[u.valid].tolist())


def index(out):
    return sorted(json.loads(out)["index"])


@pytest.mark.parametrize("workers", [1, 3])
def test_many_files_are_one_matrix(workers, folder, matrix, find):
    code, out, _ = find("shard*.npy", "--eps", EPS, "--workers", workers, "--json", "--out", "U.npz")
    answer = json.loads(out)
    assert code == 0
    assert sorted(answer["index"]) == expected(matrix)
    assert (answer["n"], answer["d"], answer["rank"]) == (4000, 6, 6)
    assert np.load("U.npz")["index"].tolist() == answer["index"]


def test_pieces_are_cut_alike_for_any_number_of_workers(folder, matrix, find, monkeypatch):
    monkeypatch.setattr("levattention.shards.PIECE", 6 * 128)
    saved = []
    for workers in (1, 4):
        find("shard*.npy", "--eps", EPS, "--workers", workers, "--out", "U.npz")
        with np.load("U.npz") as found:
            saved.append({name: found[name] for name in found})
    assert sorted(saved[0]["index"].tolist()) == expected(matrix)
    for name in saved[0]:
        np.testing.assert_array_equal(saved[0][name], saved[1][name])


def test_files_of_other_kinds(folder, matrix, find):
    import pyarrow as pa
    import pyarrow.parquet as pq

    flat = pa.array(matrix[:1000].numpy().ravel())
    pq.write_table(pa.table({"k": pa.FixedSizeListArray.from_arrays(flat, 6)}), "a.parquet")
    pq.write_table(pa.table({f"c{i}": matrix[1000:2500, i].numpy() for i in range(6)}), "b.parquet")
    save_file({"k": matrix[2500:].contiguous()}, "c.safetensors")
    code, out, _ = find("a.parquet", "b.parquet", "c.safetensors", "--eps", EPS, "--json")
    assert code == 0
    assert index(out) == expected(matrix)
    pq.write_table(pa.table({"k": pa.FixedSizeListArray.from_arrays(flat, 6), "name": ["a"] * 1000}), "two.parquet")
    pq.write_table(pa.table({"k": ["a"], "l": ["b"]}), "words.parquet")
    pq.write_table(pa.table({"k": [1.0, None], "l": [2.0, 3.0]}), "holed.parquet")
    for arguments, message in [
        (["two.parquet"], "give --tensor NAME"),
        (["two.parquet", "--tensor", "x"], "there is no column 'x'; it holds k, name"),
        (["words.parquet"], "expected float16, float32 or float64, got string"),
        (["holed.parquet"], "got missing values"),
    ]:
        code, _, err = find(*arguments, "--workers", 1, "--eps", EPS)
        assert code == 2
        assert message in err
    _, out, _ = find("two.parquet", "--tensor", "k", "--eps", EPS, "--json")
    assert index(out) == expected(matrix[:1000])


def test_heads_in_shards(folder, find):
    heads = heavy_tailed(600, 6, 4).reshape(600, 2, 3).transpose(0, 1)
    np.save("h0.npy", heads[:, :200].numpy())
    np.save("h1.npy", heads[:, 200:].numpy())
    _, out, _ = find("h0.npy", "h1.npy", "--eps", 0.05, "--json")
    scores = la.leverage_scores(heads)
    for head in range(2):
        assert sorted(json.loads(out)["index"][head]) == (scores[head] >= 0.05).nonzero().squeeze(-1).tolist()


def test_standard_input(folder, matrix, find):
    for size in (4000, 333):
        code, out, _ = find("-", "--eps", EPS, "--json", stdin=arrays(matrix, size))
        assert code == 0
        assert index(out) == expected(matrix)


def bad_shards(folder, matrix):
    """Arguments, and what the one line must say."""
    np.save("wide.npy", np.ones((5, 7), np.float32))
    holed = matrix[:50].clone()
    holed[31, 2] = torch.nan
    np.save("holed.npy", holed.numpy())
    whole = (folder / "shard1.npy").read_bytes()
    (folder / "short.npy").write_bytes(whole[:-8])
    (folder / "junk.npy").write_bytes(b"junk" * 100)
    (folder / "junk.parquet").write_bytes(b"junk" * 100)
    stream = arrays(matrix, 1000)
    return {
        "width": (["shard0.npy", "wide.npy"], b"", "wide.npy: expected keys of shape ('n', 6) as in shard0.npy"),
        "nan": (["shard0.npy", "holed.npy", "shard1.npy"], b"", "holed.npy: row 31 holds nan"),
        "short": (["shard0.npy", "short.npy"], b"", "short.npy: not a readable .npy array"),
        "junk": (["shard0.npy", "junk.npy"], b"", "junk.npy: not a readable .npy array"),
        "parquet": (["shard0.npy", "junk.parquet"], b"", "junk.parquet: not a readable .parquet file"),
        "no match": (["nothing*.npy"], b"", "nothing*.npy: no file matches"),
        "missing": (["shard0.npy", "missing.npy"], b"", "missing.npy: no such file"),
        "top": (["shard*.npy", "--top", "5"], b"", "--top needs a single file"),
        "workers": (["shard*.npy", "--workers", "0"], b"", "--workers: expected at least 1"),
        "resume": (["shard*.npy", "--resume"], b"", "--resume needs --checkpoint"),
        "mixed": (["-", "shard0.npy"], stream, "standard input cannot be mixed"),
        "cut": (["-"], stream[: len(stream) - 30], "standard input: ends in the middle of row 3998"),
        "no magic": (["-"], stream + b"hello", "the array that starts at row 4000: not a .npy array"),
        "nothing": (["-"], b"", "expected a .npy array, got nothing"),
        "wide input": (["-"], stream + arrays(torch.ones(2, 3), 2), "expected 6 columns, got 3 in the array"),
        "nan input": (["-"], arrays(holed, 50), "standard input: row 31 holds nan"),
    }


def test_bad_input_is_one_line_that_names_file_and_row(folder, matrix, find):
    (folder / "U.npz").write_bytes(b"precious")
    for name, (arguments, stdin, message) in bad_shards(folder, matrix).items():
        before = sorted(folder.iterdir())
        threshold = [] if "--top" in arguments else ["--eps", EPS]
        code, _, err = find(*arguments, *threshold, "--out", "U.npz", stdin=stdin)
        assert code == 2, name
        assert message in err, name
        assert len(err.strip().splitlines()) == 1, name
        assert sorted(folder.iterdir()) == before, name
        assert (folder / "U.npz").read_bytes() == b"precious"


def test_a_bad_row_leaves_a_checkpoint_of_all_before_it(folder, matrix, find):
    whole = np.load("shard5.npy")
    holed = whole.copy()
    holed[7] = np.inf
    np.save("shard5.npy", holed)
    run = ["shard*.npy", "--eps", EPS, "--checkpoint", "state.lev", "--json"]
    code, _, err = find(*run, "--workers", 2)
    assert code == 2
    assert "shard5.npy: row 7 holds inf" in err
    assert KeyStream.load("state.lev").end == 2200
    np.save("shard5.npy", whole)
    code, out, err = find(*run, "--resume")
    assert code == 0
    assert "resumed at row 2,200" in err
    assert index(out) == expected(matrix)
    # More shards may follow what is done.
    np.save("shard8.npy", matrix[:500].numpy())
    code, out, err = find(*run, "--resume")
    assert "resumed at row 4,000" in err
    assert index(out) == expected(torch.cat([matrix, matrix[:500]]))


def test_checkpoints_of_something_else_are_refused(folder, find):
    run = ["shard*.npy", "--checkpoint", "state.lev"]
    assert find(*run, "--resume", "--eps", EPS)[0] == 0  # no checkpoint yet: starts afresh
    old = (folder / "state.lev").read_bytes()
    code, _, err = find(*run, "--resume", "--eps", 0.5)
    assert code == 2
    assert "got a checkpoint of (6, 0.01, ())" in err
    (folder / "shard0.npy").rename("unread.npy")
    code, _, err = find(*run, "--resume", "--eps", EPS)
    assert code == 2
    assert "start afresh without --resume" in err
    assert (folder / "state.lev").read_bytes() == old
    (folder / "state.lev").write_bytes(old[:-9])
    assert "not a readable levattention stream" in find(*run, "--resume", "--eps", EPS)[2]
    assert find("shard*.npy", "--checkpoint", "nowhere/s.lev", "--eps", EPS)[0] == 2


def wait_for_rows(path, count, process):
    """Until the checkpoint holds that many rows."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert process.poll() is None, process.stderr.read()
        if path.exists() and KeyStream.load(path).end >= count:
            return
        time.sleep(0.01)
    raise AssertionError("no checkpoint")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_killed_or_interrupted_in_the_middle_then_resumed(how, folder, matrix, find):
    run = ["-", "--eps", EPS, "--workers", 2, "--out", "U.npz"]
    find(*run, stdin=arrays(matrix, 250))
    with np.load("U.npz") as found:
        whole = {name: found[name] for name in found}
    os.remove("U.npz")
    half = arrays(matrix[:2000], 250)
    process = started(*run, "--checkpoint", "state.lev", "--every", 0)
    process.stdin.write(half)
    process.stdin.flush()
    wait_for_rows(folder / "state.lev", 1000, process)
    process.send_signal(how)
    _, err = process.communicate(timeout=60)
    assert not os.path.exists("U.npz")
    assert 1000 <= KeyStream.load("state.lev").end <= 2000
    if how is signal.SIGINT:
        assert process.returncode == 130
        assert b"go on with --resume" in err
        assert b"Traceback" not in err
    else:
        assert process.returncode == -signal.SIGKILL
    code, _, err = find(*run, "--checkpoint", "state.lev", "--resume", stdin=arrays(matrix, 250))
    assert code == 0
    assert "resumed at row" in err
    with np.load("U.npz") as found:
        for name, values in whole.items():
            np.testing.assert_array_equal(found[name], values)


def test_a_full_disk_leaves_the_old_checkpoint(folder, matrix, find):
    find("shard0.npy", "shard1.npy", "--eps", EPS, "--checkpoint", "state.lev")
    old = (folder / "state.lev").read_bytes()
    before = sorted(folder.iterdir())
    # A limit on the size of files fails a write in the middle, as a full disk does.
    prelude = (
        "import resource, signal\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))\n"
    )
    run = ["shard0.npy", "shard1.npy", "shard2.npy", "--eps", EPS, "--checkpoint", "state.lev", "--resume", "--json"]
    process = started(*run, prelude=prelude)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert b"checkpoint not saved, the older one stays" in err
    assert index(out) == expected(matrix[:901])
    assert (folder / "state.lev").read_bytes() == old
    assert sorted(folder.iterdir()) == before


def test_progress_tells_rows_a_second_and_candidates():
    from levattention.cli.once import progress_of

    stream = KeyStream(4, eps=0.1)
    stream.update(torch.eye(4))
    stream.settle()
    with progress_of(stream, 100) as (advance, halted):
        advance(60)
        halted.set()
        with pytest.raises(InterruptedError):
            advance(1)
