"""Shapes are enforced in every test: annotations of the package become checks.

Named entry points take plain tensors, so that their own error messages are what a test sees.
"""

from jaxtyping import install_import_hook

import interpreter

interpreter.prepare()
install_import_hook("levattention", "shapecheck.check")

import pytest  # noqa: E402
import torch  # noqa: E402


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)
