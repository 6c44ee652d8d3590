"""What README.md and docs say about other libraries, and where the source of the named release shows it.

A claim names a sentence of a page, or a cell of the table of features in docs/why.md, and a file of a
wheel. tests/test_peer_claims.py looks for the sentences. `make test-peers` installs the wheels and looks for
the files, signatures and texts.
"""

import ast
import re
from pathlib import Path
from typing import NamedTuple

from benchmarks.pages.claims import BENCHMARKS, WHY

MIGRATE, TRL_PAGE = "docs/migrate.md", "docs/trl.md"
TORCH, LIGER, CCE = "torch==2.13.0", "liger-kernel==0.8.5", "cut-cross-entropy==25.1.1"
QUACK, TRL, UNSLOTH = "quack-kernels==0.6.5", "trl==1.16.0", "unsloth_zoo==2026.10.9"
RELEASES = (TORCH, LIGER, CCE, QUACK, TRL, UNSLOTH)
# The table of features: its columns of other libraries.
COLUMNS = {TORCH: 2, LIGER: 3, CCE: 4, QUACK: 5, TRL: 6}


class PeerClaim(NamedTuple):
    """A statement about a release of another library.

    Attributes:
        release: such as "liger-kernel==0.8.5".
        page: the page.
        text: the sentence or a part of it; of a cell, "row: entry".
        file: of the wheel.
        function: a function or "Class.method" of the file; `has` and `lacks` are then parameters of it.
        has: parameters, or texts that the file contains.
        lacks: parameters, or texts that the file does not contain.
    """

    release: str
    page: str
    text: str
    file: str
    function: str = ""
    has: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()

    def pattern(self) -> str:
        """A regular expression of the text on its page, across line breaks."""
        if self.page != WHY or ": " not in self.text:
            return r"\s+".join(re.escape(word) for word in self.text.split())
        row, entry = map(re.escape, self.text.split(": ", 1))
        return rf"^\| {row} \|(?:[^|\n]*\|){{{COLUMNS[self.release] - 1}}} {entry} \|"

    def find_fault(self, wheel: Path) -> str | None:
        """What the unpacked wheel lacks or has against the claim; None if nothing."""
        path = wheel / self.file
        if not path.is_file():
            return f"{self.release} has no file {self.file}"
        text = path.read_text()
        found = text
        if self.function:
            found = parameters(text, self.function)
            if found is None:
                return f"{self.file} of {self.release} has no {self.function}"
        for name in self.has:
            if name not in found:
                return f"{self.function or self.file} of {self.release} has no {name!r}"
        for name in self.lacks:
            if name in found:
                return f"{self.function or self.file} of {self.release} has {name!r}"
        return None


def parameters(text: str, function: str) -> list[str] | None:
    """The names of the parameters of a function or "Class.method"; None if the file has none of that name."""
    nodes: list[ast.AST] = [ast.parse(text)]
    for name in function.split("."):
        kinds = (ast.FunctionDef, ast.ClassDef)
        nodes = [
            node
            for above in nodes
            for node in ast.walk(above)
            if isinstance(node, kinds) and node.name == name
        ]
    if not nodes:
        return None
    signature = nodes[0].args
    return [each.arg for each in (*signature.posonlyargs, *signature.args, *signature.kwonlyargs)]


LIGER_LOSS = "liger_kernel/transformers/fused_linear_cross_entropy.py"
LIGER_CUTE = "liger_kernel/ops/cutedsl/ops/"
LIGER_SCALED = "liger_kernel/ops/fused_linear_scaled_cross_entropy.py"
CCE_LOSS = "cut_cross_entropy/linear_cross_entropy.py"
QUACK_LOSS = "quack/linear_cross_entropy.py"
TORCH_LOSS = ("torch/nn/functional.py", "linear_cross_entropy")
TRL_LOGPS = ("trl/kernels/chunked_logprob.py", "ChunkedLogProbFunction.forward")


def torch(text: str, *has: str, lacks: tuple[str, ...] = ()) -> PeerClaim:
    return PeerClaim(TORCH, WHY, text, *TORCH_LOSS, has, lacks)


def liger(text: str, *has: str) -> PeerClaim:
    return PeerClaim(LIGER, WHY, text, LIGER_LOSS, "LigerFusedLinearCrossEntropyLoss.__init__", has)


def cce(text: str, *lacks: str, has: tuple[str, ...] = ()) -> PeerClaim:
    return PeerClaim(CCE, WHY, text, CCE_LOSS, "linear_cross_entropy", has, lacks)


def quack(text: str, *lacks: str) -> PeerClaim:
    return PeerClaim(QUACK, WHY, text, QUACK_LOSS, "chunked_linear_cross_entropy", (), lacks)


def trl(text: str, *has: str, lacks: tuple[str, ...] = ()) -> PeerClaim:
    return PeerClaim(TRL, WHY, text, *TRL_LOGPS, has, lacks)


PEER_CLAIMS = (
    torch("masks, weights of tokens: by hand", "reduction", lacks=("mask",)),
    torch("class weights: yes", "weight"),
    torch("bias of the head: yes", "linear_bias"),
    torch("softcap: no", lacks=("softcap",)),
    torch("z-loss: no", lacks=("z_loss", "lse_square_scale")),
    torch("head sharded over ranks: no", lacks=("tp_group", "process_group")),
    PeerClaim(
        TORCH,
        WHY,
        "label smoothing: with full logits and a warning",
        TORCH_LOSS[0],
        has=("or label_smoothing != 0.0", "linear_cross_entropy: ``options`` ignored"),
    ),
    PeerClaim(
        TORCH,
        WHY,
        "torch's documentation recommends chunks where there are at least as many tokens as hidden units",
        "torch/nn/modules/linear_cross_entropy_options.py",
        has=("Chunking is a win when ``num_batches >= in_features``",),
    ),
    PeerClaim(
        TORCH,
        WHY,
        "torch.compile runs the function eagerly",
        TORCH_LOSS[0],
        has=("falls back to eager at the",),
    ),
    PeerClaim(
        TORCH,
        BENCHMARKS,
        '"accurate" is `acc_policy="accurate"`',
        "torch/nn/modules/linear_cross_entropy_options.py",
        has=('"accurate"',),
    ),
    liger("masks, weights of tokens: by hand; a mask in GRPO", "reduction"),
    liger("class weights: yes", "ce_weight"),
    liger("softcap: yes", "softcap"),
    liger("label smoothing: yes", "label_smoothing"),
    liger("z-loss: yes", "lse_square_scale"),
    liger("sum of the head's gradient over chunks: an option; the weight's dtype by default", "accum_dtype"),
    PeerClaim(
        LIGER, WHY, "bias of the head: yes", LIGER_LOSS, "LigerFusedLinearCrossEntropyLoss.forward", ("bias",)
    ),
    PeerClaim(
        LIGER,
        WHY,
        "masks, weights of tokens: by hand; a mask in GRPO",
        "liger_kernel/chunked_loss/grpo_loss.py",
        "LigerFusedLinearGRPOLoss.forward",
        ("attention_mask",),
    ),
    PeerClaim(
        LIGER,
        WHY,
        "head sharded over ranks: in its scaled cross-entropy",
        "liger_kernel/transformers/functional.py",
        "liger_fused_linear_scaled_cross_entropy_tp",
        ("tp_group",),
    ),
    PeerClaim(
        LIGER, WHY, "with kernels in CuTe DSL for Hopper", f"{LIGER_CUTE}fused_scaled_cross_entropy_sm90.py"
    ),
    PeerClaim(
        LIGER,
        BENCHMARKS,
        "`LigerFusedLinearScaledCrossEntropyFunction`, which has CuTe kernels for Hopper",
        LIGER_SCALED,
        has=("class LigerFusedLinearScaledCrossEntropyFunction", "_load_sm90_function"),
    ),
    PeerClaim(
        LIGER,
        BENCHMARKS,
        "runs on compute capability 10.0 alone",
        f"{LIGER_CUTE}fused_linear_cross_entropy.py",
        has=("get_device_capability(tensor.device) == (10, 0)", "requires exact SM100 hardware"),
    ),
    PeerClaim(
        LIGER,
        BENCHMARKS,
        "fused_linear_cross_entropy_sm90.py`, also for Hopper, which nothing outside of that file calls",
        f"{LIGER_CUTE}fused_linear_cross_entropy_sm90.py",
        "liger_fused_linear_cross_entropy_sm90",
        ("_input", "weight", "target"),
    ),
    PeerClaim(
        LIGER,
        BENCHMARKS,
        "which nothing outside of that file calls",
        f"{LIGER_CUTE}__init__.py",
        lacks=("fused_linear_cross_entropy_sm90",),
    ),
    PeerClaim(
        LIGER,
        BENCHMARKS,
        "`ce_impl` of `LigerFusedLinearCrossEntropyFunction`",
        "liger_kernel/ops/fused_linear_cross_entropy.py",
        "LigerFusedLinearCrossEntropyFunction.forward",
        ("ce_impl",),
    ),
    PeerClaim(
        LIGER,
        BENCHMARKS,
        "`liger_kernel/ops/cutile/ops/fused_linear_cross_entropy.py`, also for 9.0",
        "liger_kernel/ops/cutile/ops/fused_linear_cross_entropy.py",
        has=("get_device_capability(_input.device) != (9, 0)",),
    ),
    PeerClaim(
        LIGER,
        BENCHMARKS,
        "without them Liger computes chunks of 512 tokens in PyTorch",
        LIGER_SCALED,
        has=("_FALLBACK_CHUNK_SIZE = 512",),
    ),
    PeerClaim(
        LIGER,
        MIGRATE,
        "the module's order: `(lin_weight, _input, target)`",
        LIGER_LOSS,
        "LigerFusedLinearCrossEntropyLoss.forward",
        ("lin_weight", "_input", "target"),
    ),
    cce("masks, weights of tokens: by hand", has=("reduction",)),
    cce("class weights: no", "weight", "class_weights", "ce_weight"),
    cce("bias of the head: no", "bias"),
    cce("label smoothing: no", "label_smoothing"),
    cce("z-loss: no", "z_loss", "lse_square_scale"),
    cce("head sharded over ranks: no", "vocab_parallel_options", "tp_group"),
    cce("softcap: yes", has=("softcap",)),
    PeerClaim(
        CCE,
        WHY,
        "gradients: filtered by default",
        CCE_LOSS,
        has=('filter_eps: float | str | None = "high"',),
    ),
    PeerClaim(
        CCE,
        WHY,
        "sum of the head's gradient over chunks: dtype of the hidden states",
        "cut_cross_entropy/cce_backward.py",
        has=("dc = torch.zeros_like(c, dtype = e.dtype)",),
    ),
    PeerClaim(
        CCE,
        MIGRATE,
        "`(e, c, targets)`",
        CCE_LOSS,
        "linear_cross_entropy",
        ("e", "c", "targets", "ignore_index", "softcap", "reduction", "shift", "filter_eps", "impl"),
    ),
    quack("masks, weights of tokens: no", "mask", "token_weights"),
    quack("class weights: no", "class_weights", "ce_weight"),
    quack("bias of the head: no", "bias"),
    quack("softcap: no", "softcap"),
    PeerClaim(
        QUACK,
        "docs/choosing.md",
        "threads without a column of the row subtract -inf from -inf",
        "quack/reduce.py",
        has=(
            "x.reduce(cute.ReductionOp.MAX, init_val=-Float32.inf, reduction_profile=0)",
            "exp_x = cute.math.exp2(x * log2_e - (max_x * log2_e), fastmath=True)",
        ),
    ),
    quack("label smoothing: no", "label_smoothing"),
    quack("z-loss: no", "z_loss", "lse_square_scale"),
    PeerClaim(
        QUACK,
        WHY,
        "sum of the head's gradient over chunks: fp32",
        QUACK_LOSS,
        has=("dw = torch.empty_like(weight, dtype=torch.float32)",),
    ),
    PeerClaim(
        QUACK,
        BENCHMARKS,
        "as its default `chunk_size`, 4,096, does with H 4,096",
        QUACK_LOSS,
        has=("chunk_size: int = 4096",),
    ),
    trl("bias of the head: yes", "bias"),
    trl("softcap: yes", "final_logit_softcapping"),
    trl("logit scale, temperature: yes", "logit_scale", "temperature"),
    trl("label smoothing: no", lacks=("label_smoothing",)),
    PeerClaim(
        TRL,
        WHY,
        "logits in memory: a chunk of 4,096 rows x 32,768 columns",
        "trl/kernels/chunked_divergence.py",
        has=("TOKEN_CHUNK_SIZE = 4096", "VOCAB_CHUNK_SIZE = 32768"),
    ),
    PeerClaim(
        TRL,
        TRL_PAGE,
        "replaces a difference below 1e-7 by 1e-7",
        "trl/experimental/sdft/loss_utils.py",
        has=("torch.clamp(log_s, max=-1e-7)",),
    ),
    PeerClaim(
        UNSLOTH,
        WHY,
        "and takes a mask, a bias, a softcap and label smoothing",
        "unsloth_zoo/fused_losses/cross_entropy_loss.py",
        "unsloth_fused_ce_loss",
        ("mask", "lm_head_bias", "target_gb"),
    ),
    PeerClaim(
        UNSLOTH,
        WHY,
        "in chunks that are sized by the free memory",
        "unsloth_zoo/fused_losses/cross_entropy_loss.py",
        has=("def _free_target_gb", "logit_softcapping", '"label_smoothing"'),
    ),
    PeerClaim(
        UNSLOTH,
        WHY,
        "unsloth_zoo is licensed under the LGPL",
        "unsloth_zoo-2026.10.9.dist-info/METADATA",
        has=("License-Expression: LGPL-3.0-or-later",),
    ),
    PeerClaim(
        LIGER,
        WHY,
        "AMD GPUs or NPUs where Liger is in use",
        "liger_kernel/ops/backends/_ascend/cross_entropy.py",
    ),
    PeerClaim(
        LIGER,
        WHY,
        "ignored tokens: projected",
        "liger_kernel/ops/fused_linear_cross_entropy.py",
        has=("logits_chunk = _input_chunk @ weight.t()",),
    ),
    PeerClaim(
        CCE,
        WHY,
        "ignored tokens: not projected",
        "cut_cross_entropy/cce.py",
        has=("_build_flat_valids", "params.valids"),
    ),
    PeerClaim(
        QUACK,
        WHY,
        "ignored tokens: projected",
        QUACK_LOSS,
        has=("torch.mm(x_chunk, weight.mT, out=logits_chunk)",),
    ),
    *(
        PeerClaim(release, WHY, f"depends on: {entry}", f"{folder}.dist-info/METADATA", has=needed)
        for release, entry, folder, needed in (
            (LIGER, "torch, Triton", "liger_kernel-0.8.5", ("Requires-Dist: torch", "Requires-Dist: triton")),
            (
                CCE,
                "torch, Triton",
                "cut_cross_entropy-25.1.1",
                ("Requires-Dist: torch", "Requires-Dist: triton"),
            ),
            (QUACK, "CUTLASS DSL", "quack_kernels-0.6.5", ("Requires-Dist: nvidia-cutlass-dsl",)),
        )
    ),
)
