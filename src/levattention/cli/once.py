"""Keys read once: piece by piece, merged in order, with a checkpoint from which an interrupted run goes on."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from levattention import shards
from levattention.cli.app import notices
from levattention.gram import Advance
from levattention.shards import Shard
from levattention.statefile import load_state, save_state
from levattention.stream import KeyStream

STDIN = "standard input"


@runtime_checkable
class Source(Protocol):
    """What bytes are read from."""

    def read(self, size: int = -1, /) -> bytes:
        """So many bytes, or fewer at the end."""
        ...


Job = Callable[[Advance], KeyStream]
"""Reads one piece."""


@dataclass
class Checkpoint:
    """Where the state is saved, how often, and what it was read from."""

    path: Path | None
    every: float
    origin: list[dict[str, Any]] = field(default_factory=list)
    saved: float = field(default_factory=time.monotonic)

    def load(self) -> KeyStream | None:
        """The stream of an earlier run, or nothing.

        Raises:
            ValueError: a file that is no checkpoint, or one of other keys.
        """
        if self.path is None or not self.path.exists():
            return None
        tensors, config = load_state(self.path, "stream")
        stream = KeyStream.of_state(tensors, config, "cpu")
        read = [shard for shard in config.get("origin", []) if shard["start"] < stream.end]
        for then, now in zip(read, [*self.origin, *[{}] * len(read)], strict=False):
            if then != now:
                there = f"{now['path']} with {now['rows']} rows" if now else "nothing"
                raise ValueError(
                    f"{self.path}: was made from {then['path']} with {then['rows']} rows at position {then['start']}, "
                    f"where there is {there} now; start afresh without --resume"
                )
        return stream

    def save(self, stream: KeyStream, *, due: bool = True) -> None:
        """Save, if asked for; a failure is told, and the older checkpoint survives it."""
        if self.path is None or (not due and time.monotonic() - self.saved < self.every):
            return
        tensors, config = stream.state()
        try:
            save_state(self.path, "stream", tensors, config | {"origin": self.origin})
        except OSError as error:
            notices.print(f"checkpoint not saved, the older one stays: {error}", style="yellow", soft_wrap=True)
        self.saved = time.monotonic()


def read_once(
    names: list[str], eps: float, tensor: str | None, workers: int, checkpoint: Checkpoint, resume: bool
) -> KeyStream:
    """The stream of all keys. Bad keys and Ctrl-C leave a checkpoint of all pieces before.

    Raises:
        ValueError: bad files, a bad row, or a checkpoint of other keys.
    """
    if checkpoint.path is not None and not checkpoint.path.parent.is_dir():
        raise ValueError(f"{checkpoint.path}: the folder {checkpoint.path.parent} does not exist")
    incoming: Iterator[Tensor] | None = None
    if "-" in names:
        if len(names) > 1:
            raise ValueError(f"-: standard input cannot be mixed with files, got {', '.join(names)}")
        incoming, d = npy_stream(sys.stdin.buffer)
        batch: tuple[int, ...] = ()
        checkpoint.origin = [{"path": STDIN, "rows": -1, "start": 0}]
    else:
        files = shards.survey(names, tensor)
        d, batch = files[0].d, files[0].batch
        checkpoint.origin = [{"path": os.path.abspath(f.path), "rows": f.rows, "start": f.start} for f in files]
    stream = KeyStream(d, eps=eps, start=0, batch=batch)
    earlier = checkpoint.load() if resume else None
    if earlier is not None:
        mine, theirs = (stream.d, stream.eps, stream.batch), (earlier.d, earlier.eps, earlier.batch)
        if mine != theirs:
            raise ValueError(f"{checkpoint.path}: expected (d, eps, batch) = {mine}, got a checkpoint of {theirs}")
        stream = earlier
        notices.print(f"resumed at row {stream.end:,}")
    if incoming is not None:
        jobs, total = jobs_of_stream(incoming, stream), None
    else:
        jobs, total = jobs_of_files(files, stream), sum(f.rows for f in files)
    # The workers share the cores: torch's own threads would only get in each other's way.
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))

    def merge(piece: KeyStream) -> None:
        with interrupts.held():
            stream.merge(piece)
            checkpoint.save(stream, due=False)

    with progress_of(stream, total) as (advance, halted), Interrupts() as interrupts:
        try:
            merge_in_order(jobs, workers, merge, advance)
        except KeyboardInterrupt:
            halted.set()
            checkpoint.save(stream)
            kept = f"; {checkpoint.path} holds the state, go on with --resume" if checkpoint.path else ""
            notices.print(f"stopped at row {stream.end:,}{kept}", soft_wrap=True)
            raise SystemExit(130) from None
        except Exception:
            halted.set()
            checkpoint.save(stream)
            raise
    checkpoint.save(stream)
    return stream


class Interrupts:
    """Ctrl-C, kept waiting while the state is changed or saved."""

    def __enter__(self) -> Interrupts:
        self.waits = self.came = False
        self.before = signal.signal(signal.SIGINT, self._come)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self.before)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Nothing is interrupted here; what came meanwhile is raised at the end."""
        self.waits = True
        try:
            yield
        finally:
            self.waits = False
        if self.came:
            raise KeyboardInterrupt

    def _come(self, *_: object) -> None:
        # The second time nobody waits for a checkpoint that is being written: the older one survives.
        if not self.waits or self.came:
            self.waits = self.came = True
            raise KeyboardInterrupt
        self.came = True


def merge_in_order(jobs: Iterator[Job], workers: int, merge: Callable[[KeyStream], None], advance: Advance) -> None:
    """Run the jobs, so many at a time, and merge what they read in the order they came."""
    pending: deque[Future[KeyStream]] = deque()
    pool = ThreadPoolExecutor(workers)
    try:
        for job in jobs:
            pending.append(pool.submit(job, advance))
            if len(pending) > workers:
                merge(pending.popleft().result())
        while pending:
            merge(pending.popleft().result())
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def jobs_of_files(files: list[Shard], stream: KeyStream) -> Iterator[Job]:
    """A job for each piece that the stream has not seen."""

    def job(piece: shards.Piece) -> Job:
        return lambda advance: shards.stream_of(
            shards.blocks_of(piece), piece.start, d=stream.d, eps=stream.eps, batch=stream.batch, advance=advance
        )

    seen = stream.end
    return (job(piece) for piece in shards.pieces(files) if piece.start >= seen)


def jobs_of_stream(incoming: Iterator[Tensor], stream: KeyStream) -> Iterator[Job]:
    """A job for each piece that comes after what the stream has seen."""

    def job(keys: Tensor, start: int) -> Job:
        blocks = shards.checked(keys, STDIN, start)
        return lambda advance: shards.stream_of(blocks, start, d=stream.d, eps=stream.eps, advance=advance)

    seen, start = stream.end, 0
    for keys in incoming:
        if start >= seen:
            yield job(keys, start)
        start += len(keys)


def npy_stream(source: Source) -> tuple[Iterator[Tensor], int]:
    """(pieces, d) of one .npy array after another, until the input ends.

    Raises:
        ValueError: not .npy, not keys (n, d), arrays of different d, or an end in the middle of a row.
    """
    first = npy_header(source, 0)
    if first is None:
        raise ValueError(f"{STDIN}: expected a .npy array, got nothing")
    d = first[0][1]

    def read() -> Iterator[Tensor]:
        position = 0
        header: Header | None = first
        step = max(1, shards.PIECE // d)
        while header is not None:
            (rows, width), dtype = header
            if width != d:
                raise ValueError(
                    f"{STDIN}: expected {d} columns, got {width} in the array that starts at row {position}"
                )
            for at in range(0, rows, step):
                count = min(step, rows - at)
                body = source.read(count * d * dtype.itemsize)
                if len(body) < count * d * dtype.itemsize:
                    row = position + at + len(body) // (d * dtype.itemsize)
                    raise ValueError(f"{STDIN}: ends in the middle of row {row}; expected {rows - at} more rows here")
                array = np.frombuffer(bytearray(body), dtype).reshape(count, d)
                yield torch.from_numpy(array)
            position += rows
            header = npy_header(source, position)

    return read(), d


Header = tuple[tuple[int, int], np.dtype]


def npy_header(source: Source, position: int) -> Header | None:
    """((rows, columns), dtype) of the array that starts here, or nothing where the input ends."""
    magic = source.read(np.lib.format.MAGIC_LEN)
    if not magic:
        return None
    where = f"{STDIN}: the array that starts at row {position}"
    if len(magic) < np.lib.format.MAGIC_LEN or not magic.startswith(np.lib.format.MAGIC_PREFIX):
        raise ValueError(f"{where}: not a .npy array")
    try:
        one = magic[-2] == 1
        read = np.lib.format.read_array_header_1_0 if one else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(source)
    except ValueError as error:
        raise ValueError(f"{where}: not a .npy array ({error})") from None
    if fortran or len(shape) != 2 or 0 in shape:
        raise ValueError(f"{where}: expected shape (n, d) in C order, got {shape}{' in Fortran order' * fortran}")
    if dtype not in (np.float16, np.float32, np.float64):
        raise ValueError(f"{where}: expected float16, float32 or float64, got {dtype}")
    return (shape[0], shape[1]), dtype


@contextmanager
def progress_of(stream: KeyStream, total: int | None) -> Iterator[tuple[Advance, threading.Event]]:
    """Rows read, rows a second and candidates on stderr, gone when done; and an event that stops the readers."""
    halted, lock = threading.Event(), threading.Lock()
    begun, before, done = time.monotonic(), stream.count, 0
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]} rows/s, {task.fields[kept]} candidates"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=notices, transient=True) as progress:
        task = progress.add_task("rows read", total=total, completed=before, rate="0", kept="0")

        def advance(count: int) -> None:
            nonlocal done
            if halted.is_set():
                raise InterruptedError("stopped")
            with lock:
                done += count
                rate = done / max(1e-9, time.monotonic() - begun)
            progress.update(task, advance=count, rate=f"{rate:,.0f}", kept=str(stream.size))

        yield advance, halted
