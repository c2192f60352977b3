"""Importing the package must not import Triton, or any other part of the library."""

import subprocess
import sys


def test_import_is_light():
    code = (
        "import sys, levattention.kernels as kernels\n"
        "others = [m for m in sys.modules if m.startswith('levattention.') and m != 'levattention.kernels']\n"
        "assert 'triton' not in sys.modules and not others, others\n"
        "assert 'gram' in dir(kernels)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
