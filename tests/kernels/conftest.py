"""On the GPU where there is one, and otherwise on the CPU under Triton's interpreter (tests/interpreter.py)."""

import importlib.util

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def device():
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Fill every fresh tensor with NaN or nonsense, so that an element no kernel wrote is seen."""

    def poison(make):
        def made(*args, **kwargs):
            tensor = make(*args, **kwargs)
            if tensor.dtype == torch.bool:
                return tensor
            return tensor.fill_(float("nan") if tensor.is_floating_point() else -77)

        return made

    monkeypatch.setattr(torch, "empty_like", poison(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", poison(torch.Tensor.new_empty))
