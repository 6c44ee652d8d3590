"""Every kernel compiles offline for every supported GPU, under the oldest and the newest supported Triton,
and the launchers ask for nothing that was not compiled."""

import itertools
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from logitless import (
    CrossEntropyLoss,
    DistillationLoss,
    SamplingMask,
    SpeculatorLoss,
    Term,
    TokenLoss,
    linear_logprobs,
    linear_topk,
)
from tests.cases import DTYPES, operands

pytest.importorskip("triton")

from tests.kernels.compile_kernels import INT8, INT32, INT64, combination, combinations
from tests.kernels.hopper.compile_fused_projection import variants as fused_variants
from tests.kernels.offline import (
    INTERPRETED,
    TRITONS,
    by_target,
    check_compilation,
    jitted,
    kernel_modules,
)
from tests.layers.compile_layer_kernels import variants as layer_variants


@pytest.mark.offline
@pytest.mark.timeout(3600)
@pytest.mark.skipif(
    INTERPRETED,
    reason="compiled in the run without TRITON_INTERPRET; the interpreter changes nothing about it",
)
@pytest.mark.parametrize("version", TRITONS)
def test_compiles(version, tmp_path, everything):
    """Without --all, see `offline`; and of the products with an epilogue half under each Triton, without any
    option: they run on Hopper alone, and some take ten seconds."""
    kernels = [each.kernel for each in combinations()]
    layers = [each.kernel for each in layer_variants()]
    products = [each.kernel for each in fused_variants()]
    first = [products.index(kernel) for kernel in dict.fromkeys(products)]
    usual = first[TRITONS.index(version) :: len(TRITONS)]
    modules = {
        "tests.kernels.compile_kernels": by_target(kernels, version, everything=everything),
        "tests.layers.compile_layer_kernels": by_target(layers, version, everything=everything),
        "tests.kernels.hopper.compile_fused_projection": {
            ("cuda", "90"): range(len(products)) if everything else usual
        },
    }
    check_compilation(modules, version, tmp_path)


NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
NAMES |= {torch.int8: "i8", torch.int64: "i64"}
# What a kernel takes in several dtypes.
STREAMED = "logits student teacher grad x out hidden weight total base y y_out supervised y_supervised"
STREAMED = tuple(STREAMED.split())


@dataclass(frozen=True, kw_only=True)
class SumObserver(TokenLoss):
    """Looks at numbers that it does not differentiate."""

    observes: ClassVar = ("sum_logits",)
    metric_names: ClassVar = ("sum_logits",)

    def terms(self, stats, batch):
        return {"nll": Term(-stats.logps)}, {"sum_logits": Term(stats.sum_logits)}


class SquareObserver(SumObserver):
    observes: ClassVar = ("sum_logits", "log_sum_sq_probs")


class Recorder:
    """Stands in for a kernel and notes what it would have been compiled for."""

    def __init__(self, kernel, name: str, variants: set) -> None:
        self.arg_names, self.name, self.variants = kernel.arg_names, name, variants

    def __getitem__(self, grid):
        return self.launch

    def launch(self, *args, num_warps: int, **constants) -> None:
        named = dict(zip(self.arg_names, args, strict=False))
        assert {*named, *constants} == set(self.arg_names)
        for name, value in named.items():
            if name.endswith("_ptr") and name.removesuffix("_ptr") not in STREAMED:
                assert value.is_contiguous() or name == "factor_ptr", (
                    f"{name} has strides {value.stride()}, which no kernel sees"
                )
                whole = {torch.int64: INT64, torch.int32: INT32, torch.int8: INT8}
                kind = next((dtype for dtype, names in whole.items() if name in names), torch.float32)
                assert value.dtype == kind, name
        for name in named.keys() & {"wrong_ptr", "rows_ptr", "found_ptr", "kinds_ptr", "missing_ptr"}:
            named[name].zero_()  # these are looked at: no fault, and a row or an id that exists
        if self.name == "select_kernel":
            named["ids_ptr"].zero_()
        if self.name == "mark_kernel":
            marks = named["marks_ptr"].zero_()
            marks[0] = 1  # every token is supervised
        if self.name == "rows_kernel":
            named["numbers_ptr"][3] = named["N"]  # the logits of every row are gathered
            named["numbers_ptr"][6] = named["total"]
        if self.name == "count_kernel":
            counts = named["counts_ptr"]
            rows = named["rows"]
            counts[:rows] = named["marks_ptr"].view(rows, -1).sum(1)
            counts[rows:] = 0  # the boundaries are right
        if self.name == "count_targets_kernel":
            named["counts_ptr"].zero_()  # no target is outside
            named["inverse_ptr"].fill_(1.0)
        pointers = {name: NAMES[named[f"{name}_ptr"].dtype] for name in STREAMED if f"{name}_ptr" in named}
        self.variants.add(combination(self.name, pointers, constants))


@pytest.fixture
def launches(monkeypatch):
    """What the launchers ask for, while nothing is computed."""
    from logitless.kernels import TRITON_DTYPES
    from logitless.kernels.head import cross_entropy, divergence, scale, select, targets
    from logitless.kernels.ids import distinct, gathered, sets, slots

    variants = set()
    for module in (cross_entropy, distinct, divergence, gathered, scale, select, sets, slots, targets):
        monkeypatch.setattr(module, "uses_triton", lambda device, dtype: dtype in TRITON_DTYPES)
    for name, module in kernel_modules().items():
        monkeypatch.setattr(module, name, Recorder(jitted(getattr(module, name)), name, variants))
    return variants


def run_everything(dtype, logits_dtype, bias, softcap, autocast) -> None:
    """Every way into the kernels for one choice of dtypes and head."""
    for trainable, (smoothing, entropy) in itertools.product(
        ("all", "hidden"), ((0.0, False), (0.1, "metric"), (0.1, True))
    ):
        # Nothing is computed, so the CPU will do, and autocast below is the CPU's.
        h, w, targets, b = (x.cpu() for x in operands((6,), 40, 30, torch.float32 if autocast else dtype))
        h.requires_grad_(trainable != "nothing")
        w.requires_grad_(trainable == "all")
        transform = {"softcap": softcap, "logits_dtype": logits_dtype}
        with torch.autocast("cpu", dtype=dtype, enabled=autocast):
            losses = []
            for weights in (None, *(torch.ones(30, dtype=x, device="cpu") for x in DTYPES.values())):
                for reduction in ("mean", "none"):
                    loss = CrossEntropyLoss(label_smoothing=smoothing, reduction=reduction, **transform)
                    losses.append(loss(h, w, targets, bias=b if bias else None, class_weights=weights).loss)
            for observer in (SumObserver(**transform), SquareObserver(**transform)):
                losses.append(observer(h, w, targets, bias=b if bias else None).loss)
                with torch.no_grad():
                    observer(h, w, targets, bias=b if bias else None)
            out = linear_logprobs(h, w, targets, bias=b if bias else None, entropy=entropy, **transform)
            losses += [out.logps, *([out.entropy] if entropy is True else [])]
            for compact in (True, False):
                kept = SamplingMask.from_lists([[int(x), 0, 1] for x in targets], device="cpu")
                given = {"bias": b if bias else None, "compact": compact, "sampling_mask": kept, **transform}
                out = linear_logprobs(h, w, targets, entropy=entropy, **given)
                losses += [out.logps, out.lse, *([out.entropy] if entropy is True else [])]
            for x in (logits_dtype, dtype):
                linear_topk(h, w, 5, bias=b if bias else None, **transform | {"logits_dtype": x})
        if not entropy:  # which these have no options for, as for smoothing
            kinds = (
                ("jsd", 0.3),
                ("jsd", 0.5),
                ("forward_kl", 0.5),
                ("reverse_kl", 0.5),
                ("total_variation", 0.5),
            )
            for (divergence, beta), temperature in itertools.product(kinds, (1.0, 2.0)):
                distillation = DistillationLoss(
                    divergence=divergence, beta=beta, temperature=temperature, **transform
                )
                teacher = {"teacher_hidden": h.detach(), "teacher_weight": w.detach()}
                with torch.autocast("cpu", dtype=dtype, enabled=autocast):
                    losses.append(distillation(h, w, targets, bias=b if bias else None, **teacher).loss)
                    with torch.no_grad():
                        distillation(h, w, targets, bias=b if bias else None, **teacher)
            kinds = (*kinds, ("neg_log_acceptance", 0.5), ("lk_hybrid", 0.5))
            given = {"teacher_hidden": h.detach(), "bias": b if bias else None}
            verifiers = (w.detach(), None), (torch.cat((w, w)).detach(), torch.arange(30, device="cpu"))
            for (divergence, beta), temperature, (verifier, ids) in itertools.product(
                kinds, (1.0, 2.0), verifiers
            ):
                draft = SpeculatorLoss(divergence=divergence, beta=beta, temperature=temperature, **transform)
                with torch.autocast("cpu", dtype=dtype, enabled=autocast):
                    losses.append(draft([h], w, teacher_weight=verifier, draft_ids=ids, **given).loss)
        several = targets[:, None].expand(-1, 3)
        with torch.autocast("cpu", dtype=dtype, enabled=autocast):
            given = {"bias": b if bias else None, **transform}
            losses.append(linear_logprobs(h, w, several, entropy=entropy, **given).logps)
            packed = {"shift": True, "cu_seqlens": torch.tensor([0, 2, 6], device="cpu")}
            losses.append(linear_logprobs(h, w, targets, **packed, **given).logps)
            if trainable == "hidden" and softcap is None:
                rows = torch.cat([w] * 7).detach()
                bias_of_rows = torch.cat([b] * 7).requires_grad_() if bias else None
                for head_rows in (rows, rows.clone().requires_grad_()):
                    loss = DistillationLoss(support="teacher", topk_mode="renormalize")
                    known = -torch.ones(6, 1), several[:, :1]
                    losses.append(loss(h, head_rows, bias=bias_of_rows, teacher_logprobs_topk=known).loss)
        for loss in losses:
            if trainable != "nothing":
                loss.sum().backward(retain_graph=True)


# Kernels that no call here launches; a guess takes more calls.
ELSEWHERE = (
    *("scale_kernel", "scale_all_kernel", "shard_kernel", "shard_columns_kernel", "merge_kernel"),
    *("clamp_kernel", "clean_kernel"),
    "split_rows_kernel",
)


@pytest.mark.skipif(INTERPRETED, reason="the recorder takes the kernels' place either way")
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_launchers_ask_for_nothing_else(launches, dtype, everything):
    """Without --all, of heads with neither a bias nor a softcap, or with both."""
    widths = {None, torch.float32}
    for logits_dtype, bias, softcap, autocast in itertools.product(
        widths, (False, True), (None, 5.0), (False, True)
    ):
        usual = everything or bias == (softcap is not None)
        if usual and not (autocast and dtype == torch.float32):
            run_everything(dtype, logits_dtype, bias, softcap, autocast)
    assert launches <= set(combinations())
    if not everything:
        return
    # Nor is anything listed that they never ask for; `scale` is called with other shapes than these, a shard
    # needs ranks.
    name = NAMES[dtype]
    for c in set(combinations()) - launches:
        product = dict(c.pointers).get("grad")
        elsewhere = (
            c.kernel in ELSEWHERE
            or dict(c.constants).get("UPSTREAM")
            or max(dict(c.constants).get(name, 16) for name in ("TILES", "K")) > 16
        )
        assert elsewhere or product != name or product == "fp32", c
