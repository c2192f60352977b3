"""What a call launches, kept, so that the next call of its kind only launches.

Around its launches a call works out shapes, strides and sizes and makes scratch tensors. On a short sequence that costs
the host more time than the kernels take. All of it depends on the kind of call alone: on the shapes, strides and types
of its tensors and on its other arguments. So the first call of a kind is recorded, as launches whose pointers are told
as places in the call's tensors, in the results and in one scratch buffer; later calls fill in the pointers.

Whatever else touches data (a sort, an eigendecomposition, a copy) cannot be told that way: such a call is not kept, and
runs as it is written each time.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# How many kinds of call are kept.
MOST = 1024
# Results and scratch tensors start where any load may.
ALIGNED = 256

_EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_ZEROS = {"zeros", "zeros_like", "new_zeros"}

_local = threading.local()
_UNKNOWN: Any = object()
_plans: dict[Any, Plan | None] = {}


def eager(tensor: Any) -> bool:
    """True where a call can run its kernels at once, without the dispatcher: no tracing, and a plain tensor.

    A registered operator costs tens of microseconds a call; it is there for torch.compile and its like.
    """
    return type(tensor) is Tensor and not torch.compiler.is_compiling()


def differentiated(*tensors: Tensor) -> bool:
    """Whether a call on these needs its derivative: gradients are wanted, or forward mode is on.

    Forward mode, which the kernels do not have, is then refused by autograd instead of silently giving no tangent.
    """
    if torch.autograd.forward_ad._current_level >= 0:
        return True
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def note(run: Callable[..., Any] | None, tensors: Any, rest: Any) -> None:
    """Tell the recording, if there is one, of a launch: run(*pointers, *rest), on a CPU run(*tensors, *rest).

    `run` is None for a launch that may not be repeated as it was.
    """
    recording = getattr(_local, "recording", None)
    if recording is not None:
        recording.add(run, tensors, rest)


@contextlib.contextmanager
def unheard() -> Iterator[None]:
    """What happens inside is no part of the call that is recorded: a kernel's compilation, or its interpreter."""
    recording = getattr(_local, "recording", None)
    if recording is None:
        yield
        return
    before, recording.listens = recording.listens, False
    try:
        yield
    finally:
        recording.listens = before


def replayed(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, of tensors, numbers and None, that gives a tensor or a tuple of them, recorded and replayed."""

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        key = _kind(function, args)
        if key is None or getattr(_local, "recording", None) is not None:
            return function(*args)
        plan = _plans.get(key, _UNKNOWN)
        if plan is not _UNKNOWN:
            return function(*args) if plan is None else plan(args)
        if len(_plans) >= MOST:
            _plans.clear()
        with Recording(args) as recording:
            out = function(*args)
        _plans[key] = recording.plan(out)
        return out

    return call


def _kind(function: Any, args: Any) -> Any:
    """What a plan depends on; None for a call that is not to be kept."""
    if torch.compiler.is_compiling():
        return None
    key: list[Any] = [function]
    seen = set()
    for arg in args:
        if isinstance(arg, Tensor):
            pointer = arg.data_ptr() if type(arg) is Tensor else 1
            # Kernels are compiled for pointers that are multiples of 16. Tensors that start at one address cannot be
            # told apart by it.
            if pointer & 15 or pointer in seen:
                return None
            seen.add(pointer)
            key += (arg.shape, arg.stride(), arg.dtype, arg.get_device())
        else:
            key.append(arg)
    key.append(torch.cuda.current_device() if args[0].is_cuda else -1)
    return tuple(key)


@dataclass(frozen=True)
class Made:
    """A tensor that a call makes."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    zero: bool

    @property
    def bytes(self) -> int:
        """From its first element to its last."""
        last = sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        return 0 if 0 in self.shape else (last + 1) * self.dtype.itemsize

    def make(self, device: torch.device) -> Tensor:
        """A new one."""
        tensor = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)
        return tensor.zero_() if self.zero else tensor


@dataclass(frozen=True)
class View:
    """A tensor that lies in another one: in which, how many bytes from its start, and how."""

    base: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def of(self, bases: list[Tensor]) -> Tensor:
        """The view."""
        base = bases[self.base]
        start = base.storage_offset() * base.element_size() + self.offset
        return torch.empty(0, dtype=self.dtype, device=base.device).set_(
            base.untyped_storage(), start // self.dtype.itemsize, self.shape, self.stride
        )


@dataclass(frozen=True)
class Plan:
    """A call as the tensors that it makes and the launches on them.

    Bases are the call's tensors, then what it gives back, then the scratch buffer.

    Attributes:
        inputs: which arguments are tensors.
        made: what it gives back, in the order of making.
        scratch: bytes of the scratch buffer.
        launches: (run, places of the pointers, whatever comes after them).
        views: what the caller gets, in the bases.
        single: whether it gets one tensor instead of a tuple.
    """

    inputs: tuple[int, ...]
    made: tuple[Made, ...]
    scratch: int
    launches: tuple[tuple[Callable[..., Any], tuple[View, ...], tuple[Any, ...]], ...]
    views: tuple[View | int, ...]
    single: bool

    def __call__(self, args: Any) -> Any:
        """Make the tensors, launch, and give them back."""
        bases = [args[i] for i in self.inputs]
        device = bases[0].device
        bases += [made.make(device) for made in self.made]
        if self.scratch:
            bases.append(torch.empty(self.scratch, dtype=torch.uint8, device=device))
        if device.type == "cuda":
            starts = [base.data_ptr() for base in bases]
            for run, places, rest in self.launches:
                run(*[starts[place.base] + place.offset for place in places], *rest)
        else:
            for run, places, rest in self.launches:
                run(*[place.of(bases) for place in places], *rest)
        out = tuple(bases[view] if isinstance(view, int) else view.of(bases) for view in self.views)
        return out[0] if self.single else out


@dataclass
class Recording(TorchDispatchMode):
    """One call, as it runs: its launches, the tensors it makes, and whether it does anything else to data."""

    args: Any
    launches: list[tuple[Any, list[Tensor], tuple[Any, ...]]] = field(default_factory=list)
    made: list[tuple[Tensor, bool]] = field(default_factory=list)
    repeats: bool = True
    listens: bool = True

    def __post_init__(self) -> None:
        super().__init__()

    def __enter__(self) -> Recording:
        _local.recording = self
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        _local.recording = None
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not self.listens:
            return out
        name = func._schema.name.removeprefix("aten::")
        if name in _EMPTY or name in _ZEROS:
            self.made.append((out, name in _ZEROS))
        elif not any(part.alias_info is not None and not part.alias_info.is_write for part in func._schema.returns):
            # Neither a new tensor without contents nor a view.
            self.repeats = False
        return out

    def add(self, run: Any, tensors: Any, rest: Any) -> None:
        """A launch."""
        self.repeats &= run is not None
        self.launches.append((run, list(tensors), tuple(rest)))

    def plan(self, out: Any) -> Plan | None:
        """How to do it again; None if that cannot be told."""
        if not self.repeats:
            return None
        results = [out] if isinstance(out, Tensor) else list(out)
        inputs = tuple(i for i, arg in enumerate(self.args) if isinstance(arg, Tensor))
        given = [self.args[i] for i in inputs]
        kept = {_storage(result) for result in results}
        back = [(tensor, zero) for tensor, zero in self.made if _storage(tensor) in kept]
        aside = [(tensor, zero) for tensor, zero in self.made if _storage(tensor) not in kept]
        if any(zero for _, zero in aside):
            return None
        made = [Made(tuple(t.shape), t.stride(), t.dtype, zero) for t, zero in back]
        # Scratch tensors one after another in one buffer.
        starts, scratch = [], 0
        for tensor, _ in aside:
            starts.append(scratch)
            size = Made(tuple(tensor.shape), tensor.stride(), tensor.dtype, False).bytes
            scratch += -(-size // ALIGNED) * ALIGNED
        whole = [(tensor, base, 0) for base, tensor in enumerate([*given, *(tensor for tensor, _ in back)])]
        whole += [(tensor, len(whole), start) for (tensor, _), start in zip(aside, starts, strict=True)]

        def place(tensor: Tensor) -> View | None:
            shape = (tuple(tensor.shape), tensor.stride(), tensor.dtype)
            if tensor.numel() == 0:
                return View(0, 0, *shape)
            for other, base, start in whole:
                ahead = tensor.data_ptr() - other.data_ptr()
                # A call's tensors may share memory with each other, so a place in them is their very start.
                if ahead == 0 or (base >= len(given) and _storage(other) == _storage(tensor) and ahead > 0):
                    return View(base, start + ahead, *shape)
            return None

        launches = []
        for run, tensors, rest in self.launches:
            places = [place(tensor) for tensor in tensors]
            if None in places:
                return None
            launches.append((run, tuple(view for view in places if view is not None), rest))
        views: list[View | int] = []
        for result in results:
            itself = next((base for tensor, base, _ in whole[len(given) :] if tensor is result), None)
            view = itself if itself is not None else place(result)
            if view is None or (isinstance(view, View) and view.base < len(given)):
                return None
            views.append(view)
        return Plan(inputs, tuple(made), scratch, tuple(launches), tuple(views), isinstance(out, Tensor))


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
