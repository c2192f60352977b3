"""Runs the kernels on the GPU where there is one, and otherwise on the CPU under Triton's interpreter.

Triton decides when it is first imported, so the variable is set before any test of this folder is collected.
"""

import importlib
import importlib.util
import os
import sys

import pytest
import torch

import interpreter

if importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
        interpreter.repair()
    # Triton reads a kernel's source and globals, so kernels are imported without the hook that checks shapes.
    hooked = sys.meta_path
    sys.meta_path = [finder for finder in hooked if "jaxtyping" not in type(finder).__module__]
    importlib.import_module("levattention.kernels.fused")
    sys.meta_path = hooked


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
