"""`python -m logitless doctor`: versions, the kernels that run here, and whether losses are correct."""

import platform
from importlib import metadata

import torch

from logitless._version import __version__
from logitless.engine.budget import default_budget
from logitless.engine.plan import MIB
from logitless.kernels import GENERATIONS, fused_projection, uses_triton
from logitless.kernels.head import divergence
from logitless.losses import CrossEntropyLoss, DPOLoss, GRPOLoss, JSDLoss, KTOLoss
from logitless.losses.base import LinearLoss
from logitless.tools.check import check
from logitless.tools.samples import Samples

PACKAGES = ("torch", "triton", "transformers", "trl", "peft")


def examine() -> int:
    """Print the findings; 0 if every loss passes its check."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    versions = ", ".join(f"{name} {_version(name)}" for name in PACKAGES)
    print(f"logitless {__version__}, python {platform.python_version()}, {versions}")
    print(
        f"device: {_described(device)}; a chunk takes up to {default_budget(device) // MIB:,} MiB by default"
    )
    for line in (*accelerated(device), *generators()):
        print(line)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    passed = True
    print(f"parity with full logits in fp64, {str(dtype).removeprefix('torch.')}, without torch.compile:")
    for loss, inputs in main_losses(device, dtype):
        # Compiling a loss of logits takes ten times as long as all else here.
        with torch.compiler.set_stance("force_eager"):
            report = check(loss, **inputs)
        print(f"  {type(loss).__name__:16}  {'ok' if report else f'WRONG: {report}'}")
        passed = passed and bool(report)
    return 0 if passed else 1


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _described(device: torch.device) -> str:
    if device.type == "cpu":
        return f"cpu, {torch.get_num_threads()} threads; no GPU that torch can use"
    gpu = torch.cuda.get_device_properties(device)
    return f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, capability {gpu.major}.{gpu.minor}"


def accelerated(device: torch.device) -> list[str]:
    """Which operators run as kernels on a device, and which do not."""
    dtypes = {name: getattr(torch, name) for name in ("bfloat16", "float16", "float32", "float64")}
    fast = [name for name, dtype in dtypes.items() if uses_triton(device, dtype)]
    slow = [name for name in dtypes if name not in fast]
    head = torch.empty(16, 16, dtype=torch.bfloat16, device=device)
    product = fused_projection.serves(head.dtype, head.shape[1], head)
    elsewhere = f"no, on {', '.join(GENERATIONS.values()).title()} alone"
    kernels = [name for name in divergence.FUSED if divergence.has_kernel(name, device, torch.bfloat16)]
    return [
        f"Triton kernels: {', '.join(fast) or 'none'}; PyTorch twins, in the same chunks: "
        f"{', '.join(slow) or 'none'}",
        f"divergences of a teacher as one kernel: {', '.join(kernels) or 'none'}; "
        "other losses of logits: torch.compile, chunk by chunk",
        f"projected and read in one kernel (bf16): {'yes' if product else elsewhere}",
    ]


def generators() -> list[str]:
    """How logits are rounded where log-probabilities come from a server."""
    return [
        "logits of a server: rounded to bf16 by vLLM and SGLang by default, logits_dtype=torch.bfloat16 "
        "here; "
        "not rounded with vLLM's head_dtype float32 or SGLang's --enable-fp32-lm-head, "
        "logits_dtype=torch.float32 here (better where both sides have it)"
    ]


def main_losses(device: torch.device, dtype: torch.dtype) -> list[tuple[LinearLoss, dict]]:
    """The losses that are checked, and what they are called with."""
    losses = (
        CrossEntropyLoss(label_smoothing=0.1, z_loss=1e-3),
        DPOLoss(),
        KTOLoss(),
        GRPOLoss(beta=0.1),
        JSDLoss(),
    )
    return [(loss, Samples(device, dtype).call(loss)) for loss in losses]
