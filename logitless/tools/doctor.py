"""`python -m logitless doctor`: versions, this machine's kernels, checks of losses, a block for an issue."""

import platform
from collections.abc import Sequence
from importlib import metadata

import torch

from logitless._version import __version__
from logitless.engine.budget import default_budget
from logitless.engine.plan import MIB
from logitless.kernels import GENERATIONS, fused_projection, uses_triton
from logitless.kernels.head import divergence
from logitless.losses import CrossEntropyLoss, DPOLoss, GRPOLoss, JSDLoss, KTOLoss
from logitless.losses.base import LinearLoss
from logitless.tools.cards import find_support
from logitless.tools.check import check
from logitless.tools.samples import Samples

PACKAGES = ("torch", "triton", "transformers", "trl", "peft")
# Also named in the block for an issue, where they are installed.
OTHERS = ("accelerate", "deepspeed", "bitsandbytes", "torchao", "flash-attn", "vllm", "liger-kernel")


def run_doctor() -> int:
    """Print versions, kernels, checks and a block for an issue; return 0 if every loss passes, else 1."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(describe_versions(PACKAGES))
    print(f"device: {_describe_device(device)}; default logits_budget {default_budget(device) // MIB:,} MiB")
    for line in (*describe_support(device), *describe_kernels(device), *describe_server_rounding()):
        print(line)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    parity = f"parity with full logits in fp64, {str(dtype).removeprefix('torch.')}, without torch.compile:"
    print(parity)
    wrong = []
    for loss, inputs in main_losses(device, dtype):
        # Compiling a loss of logits would take ten times as long as the rest of this command.
        with torch.compiler.set_stance("force_eager"):
            report = check(loss, **inputs)
        print(f"  {type(loss).__name__:16}  {'ok' if report else f'WRONG: {report}'}")
        if not report:
            wrong.append(type(loss).__name__)
    found = f"WRONG: {', '.join(wrong)}" if wrong else "ok"
    block = "\n".join([*describe_machine(device), f"{parity} {found}"])
    print(f"\nFor an issue, paste this block:\n\n```text\n{block}\n```")
    return 1 if wrong else 0


def describe_versions(packages: Sequence[str]) -> str:
    """Return the versions of logitless, Python and packages, in one line."""
    versions = ", ".join(f"{name} {_version(name) or 'not installed'}" for name in packages)
    return f"logitless {__version__}, python {platform.python_version()}, {versions}"


def describe_support(device: torch.device) -> list[str]:
    """Return rows of the table of devices in docs/versions.md: of `device`, and of Intel's and Apple's GPUs.

    The checks run on `device`, which is never a GPU of Intel or Apple.
    """
    others = [torch.device(name) for name in ("xpu", "mps") if getattr(torch, name).is_available()]
    rows = [find_support(found) for found in (device, *others)]
    return [f"{row.devices} ({row.architecture}): {row.kernels}; {row.state}" for row in rows]


def describe_machine(device: torch.device) -> list[str]:
    """Return the lines of the block for an issue: versions, device, and what is installed."""
    runtime = f"hip {torch.version.hip}" if torch.version.hip else f"cuda {torch.version.cuda or 'none'}"
    return [
        describe_versions([name for name in (*PACKAGES, *OTHERS) if _version(name)]),
        f"{platform.platform()}, torch for {runtime}",
        f"device: {_describe_device(device)}",
        *describe_support(device),
        *describe_kernels(device),
    ]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _describe_device(device: torch.device) -> str:
    if device.type == "cpu":
        return f"cpu, {torch.get_num_threads()} threads; no GPU that torch can use"
    gpu = torch.cuda.get_device_properties(device)
    return f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, capability {gpu.major}.{gpu.minor}"


def describe_kernels(device: torch.device) -> list[str]:
    """Return lines that say which operators run as Triton kernels on a device."""
    dtypes = {name: getattr(torch, name) for name in ("bfloat16", "float16", "float32", "float64")}
    triton_dtypes = [name for name, dtype in dtypes.items() if uses_triton(device, dtype)]
    twin_dtypes = [name for name in dtypes if name not in triton_dtypes]
    head = torch.empty(16, 16, dtype=torch.bfloat16, device=device)
    has_fused_projection = fused_projection.serves(head.dtype, head.shape[1], head)
    unavailable = f"no, on {', '.join(GENERATIONS.values()).title()} only"
    fused_divergences = [
        name for name in divergence.FUSED if divergence.has_kernel(name, device, torch.bfloat16)
    ]
    return [
        f"Triton kernels: {', '.join(triton_dtypes) or 'none'}; PyTorch twins, in the same chunks: "
        f"{', '.join(twin_dtypes) or 'none'}",
        f"divergences of a teacher as one kernel: {', '.join(fused_divergences) or 'none'}; "
        "other losses of logits: torch.compile, chunk by chunk",
        f"product and statistics in one kernel (bf16): {'yes' if has_fused_projection else unavailable}",
    ]


def describe_server_rounding() -> list[str]:
    """Return a line on how vLLM and SGLang round the logits of their log-probabilities."""
    return [
        "logits of a server: vLLM and SGLang round them to bf16 by default (set "
        "logits_dtype=torch.bfloat16 here); not with vLLM's head_dtype float32 or SGLang's "
        "--enable-fp32-lm-head (set logits_dtype=torch.float32 here; more precise)"
    ]


def main_losses(device: torch.device, dtype: torch.dtype) -> list[tuple[LinearLoss, dict]]:
    """Return the losses that are checked, each with the arguments of its call."""
    losses = (
        CrossEntropyLoss(label_smoothing=0.1, z_loss=1e-3),
        DPOLoss(),
        KTOLoss(),
        GRPOLoss(beta=0.1),
        JSDLoss(),
    )
    return [(loss, Samples(device, dtype).draw_arguments(loss)) for loss in losses]
