"""The public surface, pinned, and an import that needs torch and numpy alone."""

import subprocess
import sys

import levattention as la

HEAVY = ["transformers", "matplotlib", "dask", "accelerate", "timm", "triton", "typer", "rich", "PIL", "jaxtyping"]


def test_every_public_name_resolves():
    for name in la.__all__:
        assert getattr(la, name) is not None
    assert set(la.__all__) <= set(dir(la))


def test_heavy_queries_are_public():
    names = {"HeavyIndex", "Hits", "heavy_keys", "normaliser", "sketches"}
    assert names <= set(la.__all__)
    assert {"SketchedLeverage", "RightSketch"} <= set(la.scorers.__all__)
    assert {"Exact", "Sampled", "Sketched", "TensorSketched"} <= set(la.normaliser.__all__)


def test_import_pulls_in_torch_and_numpy_alone():
    script = (
        "import sys\n"
        f"for name in {HEAVY}: sys.modules[name] = None\n"
        "import levattention as la, torch\n"
        "assert 'levattention.universal' not in sys.modules, 'submodules must resolve lazily'\n"
        "u = la.universal_set(torch.eye(3).repeat(2, 1), eps=0.5)\n"
        "assert u.size == 6\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
