"""The acceptance rate in the divergence kernel and twin, and what is made of it, against fp64 logits."""

import pytest
import torch

from logitless.kernels import uses_triton
from logitless.kernels.head import divergence as kernels
from logitless.kernels.head.transform import LogitTransform
from tests.cases import covering_array
from tests.kernels.support import DEVICE, Random
from tests.support import relative_error

MODES = {
    "jsd": ("jsd", 0.3),
    "jsd even": ("jsd", 0.5),
    "forward": ("forward_kl", 0.5),
    "reverse": ("reverse_kl", 0.5),
    "tv": ("total_variation", 0.5),
    "nla": ("neg_log_acceptance", 0.5),
    "lk": ("lk_hybrid", 0.5),
}
FACTORS = {
    "mode": list(MODES),
    "dtypes": [("fp32", "fp32"), ("bf16", "bf16"), ("fp32", "bf16"), ("fp64", "fp64")],
    "vocab": [17, 1000, 2500],
    "mass": [True, False],
    "rows": [True, False],
    "temperature": [1.0, 1.7],
    "softcap": [0.0, 6.0],
    "bias": [False, True],
    "hard": [0.0, 0.4],
    "write": [True, False],
    "near": [False, True],
}
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


def plain_divergences(q: torch.Tensor, p: torch.Tensor, p_full: torch.Tensor, beta: float, eta: float):
    """Divergences by name from distributions (n, D), and the acceptance rate, as their papers define them."""
    alpha = torch.minimum(q, p_full).sum(-1)
    kl = (p * (p.log() - q.log())).sum(-1)
    m = beta * p + (1 - beta) * q
    lam = (-eta * alpha.detach()).exp()
    return {
        "jsd": (beta * p * (p / m).log() + (1 - beta) * q * (q / m).log()).sum(-1),
        "forward_kl": kl,
        "reverse_kl": (q * (q.log() - p.log())).sum(-1),
        "total_variation": 1 - alpha,
        "neg_log_acceptance": -alpha.clamp(min=1e-5).log(),
        "lk_hybrid": lam * kl + (1 - lam) * (1 - alpha),
    }, alpha


@pytest.mark.parametrize("case", covering_array(FACTORS, lambda case: True))
def test_options(case):
    dtype, grad_dtype = (TYPES[name] for name in case["dtypes"])
    if DEVICE.type != "cpu" and dtype == torch.float64:
        pytest.skip("fp64 is the twin's, which is tested on the CPU")
    random, C, D = Random(case["seed"]), 6, case["vocab"]
    V, R = (D + 300 if case["mass"] else D), (4 if case["rows"] else C)
    student = random.normal(C, D).to(dtype) * 2
    everything = random.normal(R, V).to(dtype) * 2
    ids = torch.randperm(V, generator=torch.Generator().manual_seed(1))[:D].to(DEVICE)
    rows = torch.tensor([0, 0, 1, 1, 3, 3], device=DEVICE) if case["rows"] else None
    own = torch.arange(C, device=DEVICE) if rows is None else rows
    if case["near"]:
        everything[:, ids] = 0
        everything[own[:, None], ids] = (student.float() * (1 + 1e-2 * random.normal(C, D))).to(dtype)
    bias = random.normal(D) if case["bias"] else None
    teacher_bias = random.normal(V) if case["bias"] else None
    labels = random.integers(D, C)
    labels[2] = -1
    factors = random.normal(C)
    factors[3] = 0.0
    head = LogitTransform(case["softcap"] or None, 1.0, case["temperature"])
    teacher_head = LogitTransform(case["softcap"] / 2 or None, 1.2, case["temperature"])
    (divergence, beta), eta, hard = MODES[case["mode"]], 2.5, case["hard"]

    x = student.double().clone().requires_grad_()
    z = head.logits(x, None if bias is None else bias.double())[0]
    taught = teacher_head.logits(
        everything.double(), None if teacher_bias is None else teacher_bias.double()
    )[0][own]
    full = taught.softmax(-1)[:, ids]
    found, alpha = plain_divergences(z.softmax(-1), taught[:, ids].softmax(-1), full, beta, eta)
    known = labels >= 0
    log_q = (z * case["temperature"]).log_softmax(-1)
    cross_entropy = torch.where(known, -log_q.gather(1, labels.clamp(min=0)[:, None])[:, 0], 0.0)
    total = hard * cross_entropy + (1 - hard) * found[divergence]
    (truth,) = torch.autograd.grad((total * factors.double()).sum(), x)

    lse = None
    if case["mass"]:
        whole = taught.new_empty(R).index_copy_(0, own, taught.logsumexp(-1))
        stored = whole.to(torch.promote_types(dtype, torch.float32))
        lse = (stored, (whole - stored.double()).to(stored.dtype))
    gradient = None
    logits = student.clone()
    if case["write"]:
        gradient = logits if grad_dtype == dtype else logits.view(grad_dtype)[:, :D]
    result = kernels.fused_divergence(
        logits,
        everything[:, ids].contiguous(),
        labels,
        factors if case["write"] else None,
        gradient=gradient,
        divergence=divergence,
        beta=beta,
        hard_weight=hard,
        head=head,
        teacher_head=teacher_head,
        bias=bias,
        teacher_bias=None if teacher_bias is None else teacher_bias[ids],
        overlap=True,
        teacher_rows=rows,
        teacher_lse=lse,
        lk_eta=eta,
    )
    limit = 1e-12 if dtype == torch.float64 else 2e-5
    assert relative_error(result.acceptance, alpha.detach()) < limit
    assert relative_error(result.soft, found[divergence].detach()) < (1e-8 if limit < 1e-6 else 5e-5)
    assert relative_error(result.hard, cross_entropy.detach()) < limit
    assert torch.equal(result.agreement.bool(), z.argmax(-1) == taught[:, ids].argmax(-1))
    if case["write"]:
        # An id whose probabilities are equal but for rounding may be counted on either side.
        limit = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 8e-3}[grad_dtype]
        assert relative_error(gradient.double(), truth) < limit, relative_error(gradient.double(), truth)
        assert not gradient[3].any()


ENDS = {"jsd 0": ("jsd", 0.0), "jsd 1": ("jsd", 1.0)}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("mode", [*MODES, *ENDS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["kernel", "twin"])
def test_a_draft_that_is_the_verifier(dtype, mode, overlap):
    """Loss 0, gradient 0, acceptance 1, exactly."""
    if dtype == torch.float32 and not uses_triton(DEVICE, dtype):
        pytest.skip("no Triton: this would be the twin, in fp32")
    divergence, beta = (MODES | ENDS)[mode]
    student = (Random().normal(3, 2100) * 5).to(dtype)
    gradient = torch.full_like(student, torch.nan)
    found = kernels.fused_divergence(
        student,
        student.clone(),
        None,
        torch.ones(3, device=DEVICE),
        gradient=gradient,
        divergence=divergence,
        beta=beta,
        hard_weight=0.0,
        head=LogitTransform(),
        teacher_head=LogitTransform(),
        overlap=overlap,
    )
    assert not found.soft.any() and not gradient.any() and found.agreement.all()
    assert found.acceptance is None or (found.acceptance == 1).all()
    assert found.acceptance is not None or not (overlap or divergence in kernels.OF_ACCEPTANCE)


@pytest.mark.parametrize("gap", [1e-4, 1.0, 9.0, 20.0, 100.0])
@pytest.mark.parametrize("divergence", kernels.OF_ACCEPTANCE)
def test_rates_near_one_and_near_nothing(divergence, gap):
    """1 - alpha of 1e-5, and an alpha below the bound, at which the negative logarithm stops."""
    student, teacher = torch.zeros(2, 1, 2, device=DEVICE)
    student[0, 0], teacher[0, 1] = gap / 2, gap / 2
    x = student.double().requires_grad_()
    q, p = x.softmax(-1), teacher.double().softmax(-1)
    expected, alpha = plain_divergences(q.clamp(min=1e-300), p.clamp(min=1e-300), p, 0.5, 3.0)
    (truth,) = torch.autograd.grad(expected[divergence].sum(), x)
    gradient = torch.empty_like(student)
    found = kernels.fused_divergence(
        student,
        teacher,
        None,
        torch.ones(1, device=DEVICE),
        gradient=gradient,
        divergence=divergence,
        beta=0.5,
        hard_weight=0.0,
        head=LogitTransform(),
        teacher_head=LogitTransform(),
    )
    assert torch.allclose(found.soft.double(), expected[divergence].detach(), rtol=1e-5, atol=2e-7)
    assert torch.allclose(found.acceptance.double(), alpha.detach(), rtol=1e-5, atol=0)
    assert torch.allclose(gradient.double(), truth, rtol=1e-4, atol=2e-7)
