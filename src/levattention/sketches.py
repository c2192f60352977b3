"""Sketches Π: a distribution and an explicit generator give an operator, and ΠK is a few rows that stand for all of K.

An operator is applied block by block to dense and to sparse keys, and no block size, device or order of blocks changes
its entries: they are functions of a seed and of the position of a row. Two probabilities describe a distribution:

- `failure(d, n, delta)`: that ‖ΠKq‖² leaves (1 ± δ)‖Kq‖² for *some* query q;
- `overshoot(n, delta)`: that ‖Πz‖² exceeds (1 + δ)‖z‖² for *one* vector z that does not depend on Π.

Both are proved (docs/heavy.md). Where the proof asks for far more rows than practice does, `measured` is a
probability that experiments stayed under and no proof covers.
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from levattention._shapes import Float64
from levattention.checks import require_keys
from levattention.counters import draw_seed, hashed
from levattention.csr import csr_rows, is_csr
from levattention.tails import BETAS, chernoff_exponent, chi_square_tail, gaussian_failure, second_moment_failure

# Rows of one block. Part of the definition of an operator (a block of Gaussian columns has a seed of its own).
BLOCK = 1 << 12

# Elements of fp64 that a block of several heads may have.
TILE = 1 << 22

# By how much OSNAP's distortion exceeded the Gaussian one in the measurements, and the nonzeros that this took.
SPARSE_EXCESS = 1.15
SPARSE_NONZEROS = 8


class Operator(ABC):
    """One drawn Π, m × n, applied by `operator @ keys`.

    Attributes:
        m: rows of Π.
        n: columns of Π.
    """

    def __init__(self, m: int, n: int) -> None:
        self.m, self.n = m, n

    def __matmul__(self, keys: Tensor) -> Float64[Tensor, "*batch m d"]:
        """ΠK in fp64, the same Π for every batch element; keys are (*batch, n, d), or sparse rows (n, d)."""
        require_keys(keys)
        n, d = keys.shape[-2:]
        if n != self.n:
            raise ValueError(f"keys: expected {self.n} rows, got {n}")
        flat = keys if is_csr(keys) else keys.reshape(-1, n, d)
        heads = 1 if is_csr(keys) else len(flat)
        out = torch.zeros((heads, self.m, d), dtype=torch.float64, device=keys.device)
        group = max(1, TILE // (BLOCK * d))
        for start in range(0, n, BLOCK):
            span = slice(start, min(start + BLOCK, n))
            if is_csr(keys):
                self.add_sparse(out[0], csr_rows(keys, span), start)
                continue
            for first in range(0, heads, group):
                self.add(out[first : first + group], flat[first : first + group, span].double(), start)
        return out.reshape(*keys.shape[:-2], self.m, d)

    @abstractmethod
    def add(self, out: Tensor, block: Tensor, start: int) -> None:
        """Add what rows (h, b, d) from position `start` contribute to ΠK, (h, m, d)."""

    def add_sparse(self, out: Tensor, block: Tensor, start: int) -> None:
        """The same for a block of sparse rows, (b, d), and (m, d)."""
        self.add(out.unsqueeze(0), block.to_dense().unsqueeze(0), start)


@runtime_checkable
class Sketch(Protocol):
    """A distribution over operators with m rows."""

    m: int

    def operator(self, n: int, generator: torch.Generator) -> Operator:
        """One draw, for n keys."""
        ...

    def failure(self, d: int, n: int, delta: float) -> float:
        """Bound on the probability that some query's ‖ΠKq‖² leaves (1 ± δ)‖Kq‖²."""
        ...

    def measured(self, d: int, delta: float) -> float:
        """The same probability as experiments suggest it; 1 where none do."""
        ...

    def overshoot(self, n: int, delta: float) -> float:
        """Bound on the probability that ‖Πz‖² > (1 + δ)‖z‖² for one z that does not depend on Π."""
        ...


@dataclass(frozen=True)
class Gaussian:
    """Independent normal entries of variance 1/m: the sharpest guarantees, at O(n·m·d).

    Attributes:
        m: rows.

    Example:
        >>> operator = Gaussian(8).operator(1000, torch.Generator().manual_seed(0))
        >>> (operator @ torch.ones(1000, 3)).shape
        torch.Size([8, 3])
    """

    m: int

    def __post_init__(self) -> None:
        _require_rows(self.m)

    def operator(self, n: int, generator: torch.Generator) -> Operator:
        """One draw."""
        return _GaussianOperator(self.m, n, draw_seed(generator))

    def failure(self, d: int, n: int, delta: float) -> float:
        """2·exp(−t²/2) with t = √m(√(1+δ) − 1) − √d (Davidson and Szarek)."""
        return gaussian_failure(self.m, d, delta)

    def measured(self, d: int, delta: float) -> float:
        """What is proved."""
        return gaussian_failure(self.m, d, delta)

    def overshoot(self, n: int, delta: float) -> float:
        """The tail of χ²_m/m."""
        return chi_square_tail(self.m, delta)


class _GaussianOperator(Operator):
    def __init__(self, m: int, n: int, seed: int) -> None:
        super().__init__(m, n)
        self.seed = seed

    def add(self, out: Tensor, block: Tensor, start: int) -> None:
        seed = int(hashed(torch.tensor(start // BLOCK), self.seed))
        columns = torch.randn(self.m, BLOCK, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        columns = columns[:, : block.shape[1]].to(block.device) / math.sqrt(self.m)
        out += columns @ block


@dataclass(frozen=True)
class SRHT:
    """Subsampled randomised Hadamard transform √(N/m)·P·H·D, in O(n·d·log m) and one block of memory.

    H_N = H_(N/B) ⊗ H_B, so a block of B rows is transformed by itself, and only the sampled rows are carried on.

    Attributes:
        m: rows, at most the number of keys rounded up to a power of two.

    Example:
        >>> operator = SRHT(4).operator(4, torch.Generator().manual_seed(0))
        >>> ((operator @ torch.eye(4)).mT @ (operator @ torch.eye(4))).diagonal()
        tensor([1., 1., 1., 1.], dtype=torch.float64)
    """

    m: int

    def __post_init__(self) -> None:
        _require_rows(self.m)

    def operator(self, n: int, generator: torch.Generator) -> Operator:
        """One draw.

        Raises:
            ValueError: more rows than the padded transform has.
        """
        size = padded(n)
        if self.m > size:
            raise ValueError(
                f"m: {n} keys are padded to {size} rows, of which SRHT can sample at most that; got {self.m}"
            )
        return _HadamardOperator(self.m, n, draw_seed(generator))

    def failure(self, d: int, n: int, delta: float) -> float:
        """Tropp's bounds: rows of H·D·Q are short with probability 1 − β, then matrix Chernoff; the best β is taken."""
        rows = [(beta, (math.sqrt(d) + math.sqrt(8 * math.log(padded(n) / beta))) ** 2) for beta in BETAS]
        up, down = chernoff_exponent(delta), chernoff_exponent(-delta)
        bounds = (b + d * (math.exp(-self.m / size * up) + math.exp(-self.m / size * down)) for b, size in rows)
        return min(1.0, *bounds)

    def measured(self, d: int, delta: float) -> float:
        """Matrix Chernoff as if all rows of H·D·Q had the same length, which d spikes side by side come close to."""
        up, down = (math.exp(-self.m / d * chernoff_exponent(sign * delta)) for sign in (1, -1))
        return min(1.0, d * (up + down))

    def overshoot(self, n: int, delta: float) -> float:
        """Entries of √N·H·D·z are at most √(2·ln(2N/β)) with probability 1 − β (Hoeffding), then Chernoff."""
        up, size = chernoff_exponent(delta), padded(n)
        return min(1.0, *(b + math.exp(-self.m / (2 * math.log(2 * size / b)) * up) for b in BETAS))


class _HadamardOperator(Operator):
    def __init__(self, m: int, n: int, seed: int) -> None:
        super().__init__(m, n)
        self.seed = seed
        size = padded(n)
        self.length = min(size, BLOCK)
        # Without replacement, and without a permutation of all N positions.
        self.sample = torch.tensor(sorted(random.Random(seed).sample(range(size), m)))

    def add(self, out: Tensor, block: Tensor, start: int) -> None:
        position = torch.arange(start, start + block.shape[1], device=block.device)
        signed = block * signs(hashed(position, self.seed)).unsqueeze(-1)
        if signed.shape[1] < self.length:
            signed = torch.nn.functional.pad(signed, (0, 0, 0, self.length - signed.shape[1]))
        sample = self.sample.to(block.device)
        low, high = sample % self.length, sample // self.length
        parity = signs(parities(high & (start // BLOCK)))
        out += walsh(signed)[:, low] * (parity / math.sqrt(self.m)).unsqueeze(-1)


@dataclass(frozen=True)
class OSNAP:
    """s nonzeros ±1/√s in every column, one in each of s bands of m/s rows: O(s·nnz(K)).

    Attributes:
        m: rows, a multiple of s.
        s: nonzeros a column; prefer 8. With one or two a spike in the keys can vanish.

    Example:
        >>> operator = OSNAP(64, 4).operator(3, torch.Generator().manual_seed(0))
        >>> (operator @ torch.eye(3)).square().sum(0)
        tensor([1., 1., 1.], dtype=torch.float64)
    """

    m: int
    s: int = 8

    def __post_init__(self) -> None:
        _require_rows(self.m)
        if isinstance(self.s, bool) or not isinstance(self.s, int) or self.s < 1 or self.m % self.s:
            raise ValueError(f"s: expected a divisor of m = {self.m}, got {self.s!r}")

    def operator(self, n: int, generator: torch.Generator) -> Operator:
        """One draw."""
        return _SparseOperator(self.m, n, self.s, draw_seed(generator))

    def failure(self, d: int, n: int, delta: float) -> float:
        """d(d+1)/(m·δ²), from the second moment alone."""
        return second_moment_failure(self.m, d, delta)

    def measured(self, d: int, delta: float) -> float:
        """As a Gaussian of as many rows whose distortion is 15 % less."""
        return gaussian_failure(self.m, d, delta / SPARSE_EXCESS) if self.s >= SPARSE_NONZEROS else 1.0

    def overshoot(self, n: int, delta: float) -> float:
        """The smaller of Cantelli's bound for variance 2/m and the tail of χ²_s/s, which dominates ‖Πz‖²."""
        return min(2 / (2 + self.m * delta**2), chi_square_tail(self.s, delta))


@dataclass(frozen=True)
class CountSketch:
    """One nonzero ±1 in every column: O(nnz(K)), and d²/(δ²·failure) rows before anything can be promised.

    Attributes:
        m: rows.
    """

    m: int

    def __post_init__(self) -> None:
        _require_rows(self.m)

    def operator(self, n: int, generator: torch.Generator) -> Operator:
        """One draw."""
        return _SparseOperator(self.m, n, 1, draw_seed(generator))

    def failure(self, d: int, n: int, delta: float) -> float:
        """d(d+1)/(m·δ²)."""
        return second_moment_failure(self.m, d, delta)

    def measured(self, d: int, delta: float) -> float:
        """1: on keys with spikes it lost a direction even with m = d²."""
        return 1.0

    def overshoot(self, n: int, delta: float) -> float:
        """As `OSNAP` with s = 1."""
        return OSNAP(self.m, 1).overshoot(n, delta)

    def require(self, d: int, delta: float, failure: float) -> None:
        """Nothing, if m ≥ d²/(δ²·failure).

        Raises:
            ValueError: too few rows; the message has the number.
        """
        least = d**2 / (delta**2 * failure)
        if self.m < least * (1 - 1e-12):
            raise ValueError(
                f"sketch: CountSketch needs m >= d²/(δ²·failure) = {math.ceil(least):,} rows for d = {d}, "
                f"delta = {delta:g} and failure = {failure:g}, got {self.m:,}; OSNAP needs far fewer"
            )


class _SparseOperator(Operator):
    def __init__(self, m: int, n: int, s: int, seed: int) -> None:
        super().__init__(m, n)
        self.s, self.seed = s, seed

    def place(self, start: int, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """(rows, values) of the nonzeros of `count` columns, (count, s) each."""
        position = torch.arange(start, start + count, device=device).unsqueeze(-1)
        band = torch.arange(self.s, device=device)
        bits = hashed(position * self.s + band, self.seed)
        width = self.m // self.s
        rows = band * width + ((bits >> 1) & ((1 << 62) - 1)) % width
        return rows, signs(bits) / math.sqrt(self.s)

    def add(self, out: Tensor, block: Tensor, start: int) -> None:
        rows, values = self.place(start, block.shape[1], block.device)
        for band in range(self.s):
            out.index_add_(1, rows[:, band], block * values[:, band].unsqueeze(-1))

    def add_sparse(self, out: Tensor, block: Tensor, start: int) -> None:
        entries = block.to_sparse_coo()
        (key, column), values = entries.indices(), entries.values()
        rows, scales = self.place(start, block.shape[0], block.device)
        for band in range(self.s):
            place = rows[key, band] * out.shape[-1] + column
            out.view(-1).index_add_(0, place, values * scales[key, band])


@dataclass(frozen=True)
class TensorSketch:
    """S of the k-th tensor power, with E⟨Sx^⊗k, Sy^⊗k⟩ = ⟨x, y⟩^k, in m columns and O(k·m·log m) a row (Pham and Pagh).

    It works on features, not on rows of K: S(x) is a row (n, m) for every key. The variance is at most
    (2 + 3^k)/m·‖x‖^(2k)‖y‖^(2k), for any two tensors.

    Attributes:
        m: columns.
        k: the power, at least 2.
    """

    m: int
    k: int

    def __post_init__(self) -> None:
        _require_rows(self.m)
        if isinstance(self.k, bool) or not isinstance(self.k, int) or self.k < 2:
            raise ValueError(f"k: expected an integer >= 2, got {self.k!r}")

    def operator(self, d: int, generator: torch.Generator) -> TensorMap:
        """One draw, for rows of d entries."""
        return TensorMap(self, d, draw_seed(generator))

    @property
    def variance(self) -> float:
        """The variance of ⟨Su, Sv⟩ for unit tensors u and v is at most this."""
        return (2 + 3**self.k) / self.m


class TensorMap:
    """One drawn TensorSketch: the product of k CountSketches under the discrete Fourier transform."""

    def __init__(self, sketch: TensorSketch, d: int, seed: int) -> None:
        self.sketch, self.d, self.seed = sketch, d, seed
        bits = hashed(torch.arange(sketch.k * d), seed).reshape(sketch.k, d)
        self.columns, self.signs = ((bits >> 1) & ((1 << 62) - 1)) % sketch.m, signs(bits)

    def __call__(self, rows: Tensor) -> Float64[Tensor, "*batch n m"]:
        """S(x^⊗k) of every row, (*batch, n, d) -> (*batch, n, m), in fp64."""
        if not rows.numel():
            return rows.new_zeros((*rows.shape[:-1], self.sketch.m), dtype=torch.float64)
        product: Tensor | None = None
        for columns, scales in zip(self.columns.to(rows.device), self.signs.to(rows.device), strict=True):
            counted = rows.new_zeros((*rows.shape[:-1], self.sketch.m), dtype=torch.float64)
            counted.index_add_(-1, columns, rows.double() * scales)
            spectrum = torch.fft.rfft(counted)
            product = spectrum if product is None else product * spectrum
        assert product is not None  # k is at least 2
        return torch.fft.irfft(product, n=self.sketch.m)


def padded(n: int) -> int:
    """The power of two at or above n."""
    return 1 << max(0, (n - 1).bit_length())


def signs(bits: Tensor) -> Float64[Tensor, "*shape"]:
    """+1 where the lowest bit is 0, −1 where it is 1."""
    return 1.0 - 2.0 * (bits & 1).double()


def parities(bits: Tensor) -> Tensor:
    """The parity of the number of ones, for integers from 0 to 2⁶² − 1."""
    for by in (32, 16, 8, 4, 2, 1):
        bits = bits ^ (bits >> by)
    return bits & 1


def walsh(rows: Tensor) -> Tensor:
    """H·rows for each (b, d) of a batch, b a power of two; entries of H are ±1."""
    heads, length, d = rows.shape
    step = 1
    while step < length:
        first, second = rows.reshape(heads, length // (2 * step), 2, step, d).unbind(2)
        rows = torch.stack([first + second, first - second], 2).reshape(heads, length, d)
        step *= 2
    return rows


def _require_rows(m: int) -> None:
    if isinstance(m, bool) or not isinstance(m, int) or m < 1:
        raise ValueError(f"m: expected an integer >= 1, got {m!r}")


def require_sketch(sketch: object) -> None:
    """Nothing, if it is a distribution over operators.

    Raises:
        ValueError: something else.
    """
    if isinstance(sketch, type) or not isinstance(sketch, Sketch):
        raise ValueError(f"sketch: expected Gaussian, SRHT, OSNAP or CountSketch, got {sketch!r}")
