"""Triton's interpreter, which runs the kernels where there is no GPU."""

import importlib.util
import os

import torch


def prepare():
    """Import the kernels as they can run here.

    Triton decides when it is first imported, and reads a kernel's source and globals, so this comes before anything
    else imports the kernels and before the hook that checks shapes.
    """
    if importlib.util.find_spec("triton") is None:
        return
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
        repair()
    for name in ("fused", "prefill", "running"):
        importlib.import_module(f"levattention.kernels.{name}")


def repair():
    """Let Triton 3.6's interpreter run under NumPy 2.4, which no longer turns a one-element array into an int."""
    from triton.runtime import interpreter

    plain = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        plain(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched
