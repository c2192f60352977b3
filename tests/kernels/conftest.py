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
def poisoned():
    from poison import poisoned

    with poisoned():
        yield


@pytest.fixture(autouse=True)
def memory_checked():
    from memcheck import checked

    if torch.cuda.is_available():
        yield
    else:
        with checked():
            yield
