"""What every kernel takes on a GPU, found out without one: registers, spilled bytes, shared memory, programs that fit.

    python benchmarks/compiled.py [--capability 90] [--out benchmarks/results/compiled.json]

Every launch that the library would make for a shape is recorded on tensors without data, compiled for the GPU by
Triton's own compiler, and read off the binary. A kernel that does not compile, or that wants more shared memory than
the GPU has, ends the run with an error. Nothing runs, so nothing is timed.
"""

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

import triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from levattention.kernels import attention, common, fused, prefill, running  # noqa: E402

MODULES = ("gram_matrix", "factor", "scores", "selection", "short", "attention", "attention_backward")
MODULES += ("running", "prefill", "prefill_backward")
TYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.bool: "i1",
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# By compute capability: multiprocessors, and bytes of shared memory of one program and of a multiprocessor.
DEVICES = {
    80: ("A100", 108, 166912, 167936),
    86: ("RTX 3090", 82, 101376, 102400),
    89: ("RTX 4090, L4", 128, 101376, 102400),
    90: ("H100, H200", 132, 232448, 233472),
    100: ("B200", 148, 232448, 233472),
    120: ("RTX 5090", 170, 101376, 102400),
}
SHAPES = [  # B, H, n, d, k
    (64, 6, 197, 64, 32),
    (64, 16, 785, 64, 32),
    (1, 16, 65536, 128, 128),
    (2, 8, 1500, 32, 5),
    (2, 8, 1500, 80, 130),
    (2, 8, 600, 96, 64),
    (2, 8, 1500, 256, 70),
    (2, 8, 1500, 256, 16),
    (2, 8, 1500, 64, 128),
    (2, 8, 700, 128, 20),
]


class Recorder:
    """Stands in for `launch`: compiles what would be launched.

    Args:
        capability: of the GPU, 90 for Hopper.
    """

    def __init__(self, capability):
        self.capability = capability
        self.found = {}

    def __call__(self, kernel, grid, tensors, scalars, constants, *, warps, stages=1):
        """The arguments are `launch`'s; nothing is launched."""
        signature, fixed, hints = {}, dict(constants), {}
        values = [*tensors, *scalars]
        for i, (name, value) in enumerate(zip(kernel.arg_names, values, strict=False)):
            if isinstance(value, torch.Tensor):
                signature[name], aligned = "*" + TYPES[value.dtype], True
            elif isinstance(value, float):
                signature[name], aligned = "fp32", False
            elif value == 1:
                signature[name], fixed[name], aligned = "constexpr", 1, False
            else:
                signature[name], aligned = "i32" if -(2**31) <= value < 2**31 else "i64", value % 16 == 0
            if aligned:
                hints[i,] = [["tt.divisibility", 16]]
        signature |= dict.fromkeys(kernel.arg_names[len(values) :], "constexpr")
        key = (kernel.fn.__name__, warps, stages, *sorted(signature.items()), *sorted(fixed.items()))
        if key not in self.found:
            self.found[key] = {"kernel": kernel.fn.__name__.strip("_").removesuffix("_kernel"), "grid": list(grid)}
            self.found[key] |= self.compiled(ASTSource(kernel, signature, fixed, hints), warps, stages)
            self.found[key] |= {"constants": {k: v for k, v in constants.items() if not isinstance(v, bool)}}

    def compiled(self, source, warps, stages):
        """Registers a thread, bytes a thread spills, shared memory, and how many programs a multiprocessor holds."""
        name, _, most, whole = DEVICES[self.capability]
        target = GPUTarget("cuda", self.capability, 32)
        # As `launch` does where a program does not fit.
        while True:
            made = triton.compile(source, target=target, options={"num_warps": warps, "num_stages": stages})
            shared = made.metadata.shared
            if shared <= most or stages == 1:
                break
            stages -= 1
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            Path(file.name).write_bytes(made.asm["cubin"])
            tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
            lines = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True).stdout
        fields = dict(field.split(":") for field in lines.split("REG", 1)[-1].join(["REG", ""]).split() if ":" in field)
        registers = int(fields["REG"])
        # Registers are given out to a warp by 256, shared memory to a program by 1 KiB more than it asks for.
        by_registers = 65536 // (-(-registers * 32 // 256) * 256 * warps)
        fits = min(by_registers, whole // (shared + 1024), 64 // warps, 32)
        return {
            "warps": warps,
            "stages": stages,
            "registers": registers,
            "spilled": int(fields["STACK"]),
            "shared": shared,
            "programs": fits,
            "problem": f"wants {shared} bytes of shared memory, {name} has {most}" if shared > most else "",
        }


def empty(*shape, dtype):
    return torch.empty(*shape, dtype=dtype, device="meta").requires_grad_(dtype.is_floating_point)


def every_launch(shape, dtype, capability):
    """What attention with its selection, forward and backward, takes at a shape: a list of launches."""
    recorder = Recorder(capability)
    common.multiprocessors = lambda tensor: DEVICES[capability][1]
    for name in MODULES:
        module = importlib.import_module(f"levattention.kernels.{name}")
        module.launch = recorder
        # The smallest GPUs take smaller tiles.
        module.small = lambda tensor: DEVICES[capability][2] < 128 * 1024
        module.multiplies_fp64 = lambda tensor: capability // 10 != 10
    b, h, n, d, k = shape
    q, keys, v = (empty(b, h, n, d, dtype=dtype) for _ in range(3))
    index = empty(b, h, k, dtype=torch.int64)
    fused.select(keys, k)
    fused.gram(keys.detach(), precise=True)
    out, _ = attention.gathered_attention(q, keys, v, index, scale=d**-0.5)
    out.backward(torch.empty_like(out))
    # Padding, and slots with weights of their own, are other kernels.
    mask, bias = empty(b, h, n, dtype=torch.bool), empty(b, h, k, dtype=torch.float32)
    fused.select(keys, k, mask)
    out, _ = attention.gathered_attention(q, keys, v, index, bias, scale=d**-0.5, valid=mask[..., :k])
    out.backward(torch.empty_like(out))
    if n > 1024:  # a prompt, not a picture
        sets = running.running_top_k(keys, k, chunk=256)
        out, _ = prefill.causal_attention(q, keys, v, *sets, chunk=256, reach=100, scale=d**-0.5)
        out.backward(torch.empty_like(out))
    return list(recorder.found.values())


def shape_of(text):
    """1x16x4096x128x128: B, H, n, d, k."""
    return tuple(int(size) for size in text.split("x"))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--capability", type=int, nargs="+", default=[90], choices=sorted(DEVICES))
    parser.add_argument("--types", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--shapes", nargs="+", type=shape_of, default=SHAPES, metavar="BxHxNxDxK")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rows = []
    for capability in given.capability:
        for shape in given.shapes:
            for dtype in given.types:
                for row in every_launch(shape, DTYPES[dtype], capability):
                    rows.append({"gpu": capability, "shape": shape, "type": dtype, **row})
                    print(
                        f"{capability:4d} {'x'.join(map(str, shape)):18s} {dtype} {row['kernel']:9s}",
                        f"{row['warps']} warps {row['registers']:4d} registers {row['spilled']:5d} spilled",
                        f"{row['shared']:7d} shared {row['programs']:2d} fit {row['problem']}",
                        flush=True,
                    )
    if given.out:
        given.out.write_text(json.dumps({"triton": triton.__version__, "rows": rows}, indent=1) + "\n")
    problems = [row for row in rows if row["problem"]]
    if problems:
        sys.exit(f"{len(problems)} of {len(rows)} launches would fail")


if __name__ == "__main__":
    main()
