"""A sketched normaliser for p = 2: ‖R̂q‖² with R̂ from ΠK."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from levattention.losses import Loss, Power
from levattention.normaliser.rows import Guarantee, WeightedRows, require_rates
from levattention.sketches import CountSketch, Sketch, require_sketch

# The largest number of rows that a message suggests.
MOST_ROWS = 1 << 40


@dataclass(frozen=True)
class Sketched:
    """Z(q) ≈ ‖ΠKq‖² for f(x) = x², for all queries at once: one cheap pass over the keys instead of O(n·d²).

    Attributes:
        sketch: a distribution of `levattention.sketches`; the guarantee is the stronger, the more rows it has.
        delta: δ in (0, 1).
        failure: the probability, for each head, that some query's Z is farther off.
        seed: of the sketch.
    """

    sketch: Sketch
    delta: float = 0.5
    failure: float = 1e-3
    seed: int = 0

    def __post_init__(self) -> None:
        require_sketch(self.sketch)
        require_rates(delta=self.delta, failure=self.failure)

    def __call__(self, keys: Tensor, loss: Loss) -> WeightedRows:
        """The fitted normaliser.

        Raises:
            ValueError: another loss, or a sketch with too few rows for δ and the failure probability.
        """
        if loss != Power(2):
            raise ValueError(f"normaliser: Sketched is for f(x) = x², got loss={loss}")
        n, d = keys.shape[-2:]
        guarantee = self.guarantee(d, n)
        generator = torch.Generator().manual_seed(self.seed)
        short = self.sketch.operator(n, generator) @ keys
        return WeightedRows(loss, torch.linalg.qr(short, mode="r").R, guarantee)

    def guarantee(self, d: int, n: int) -> Guarantee:
        """What the sketch promises for n keys of d columns."""
        how = f"{self.sketch} of {n:,} keys"
        proved = self.sketch.failure(d, n, self.delta)
        if isinstance(self.sketch, CountSketch):
            self.sketch.require(d, self.delta, self.failure)
            return Guarantee(self.delta, proved, True, True, how)
        if proved <= self.failure:
            return Guarantee(self.delta, self.failure, True, True, how)
        if self.sketch.measured(d, self.delta) <= self.failure:
            return Guarantee(
                self.delta, self.failure, True, False, f"{how}; the proof asks for {self._least(d, n, True)}"
            )
        raise ValueError(
            f"sketch: {self.sketch} does not hold {d} columns within 1 ± {self.delta:g} with failure {self.failure:g}: "
            f"by measurements that takes about {self._least(d, n, False)}, by proof {self._least(d, n, True)}"
        )

    def _least(self, d: int, n: int, proof: bool) -> str:
        """The least power-of-two multiple of m that would do, as text."""
        sketch = self.sketch
        while sketch.m <= MOST_ROWS:
            found = sketch.failure(d, n, self.delta) if proof else sketch.measured(d, self.delta)
            if found <= self.failure:
                return f"m = {sketch.m:,}"
            sketch = replace(sketch, m=2 * sketch.m)  # type: ignore[type-var]
        return "no m"
