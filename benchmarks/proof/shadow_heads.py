"""Shadow gradients of heads beside a trained model: Medusa's heads, and a draft of speculative decoding.

As in `shadow.py`, the weights of every step are those of the stock loss, here on full logits, and the chunked
loss computes loss and gradients of the same inputs at the same weights.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.proof.shadow import Step, World, distance, norm_of
from logitless import MedusaHeads, MedusaLoss, SpeculatorLoss

HEADS, DRAFT_STEPS, DECAY = 3, 3, 0.8
# (parameters, the loss on full logits, the chunked loss) of a batch of ids and labels (B, T)
Losses = tuple[list[nn.Parameter], Callable[..., Tensor], Callable[..., Tensor]]


def medusa_heads(model: nn.Module) -> MedusaHeads:
    """Heads that start from the model's head."""
    width, ids = model.config.hidden_size, model.config.vocab_size
    heads = MedusaHeads(width, ids, num_heads=HEADS).to(model.device, model.dtype)
    return heads.start_from(model.get_output_embeddings().weight)


def medusa(
    model: nn.Module, *, stage: int, logits_budget: int | None, heads: MedusaHeads | None = None
) -> Losses:
    """Stage 1 trains the heads, stage 2 the model as well."""
    heads = medusa_heads(model) if heads is None else heads
    trained = [*heads.parameters(), *(model.parameters() if stage == 2 else ())]
    base = model.get_output_embeddings().weight if stage == 2 else None
    coefficient = 1.0 if stage == 2 else 0.0
    chunked = MedusaLoss(decay=DECAY, base_coefficient=coefficient, logits_budget=logits_budget)

    def hidden_of(batch: Tensor) -> Tensor:
        with torch.set_grad_enabled(stage == 2):
            return model.base_model(input_ids=batch).last_hidden_state

    def full(batch: Tensor, labels: Tensor) -> Tensor:
        """Sum over the heads of decay^k times the mean cross-entropy of the token k + 2 positions ahead."""
        hidden = hidden_of(batch)
        total = hidden.new_zeros(())
        if base is not None:
            total = total + mean(hidden[:, :-1] @ base.t(), labels[:, 1:])
        for k in range(HEADS):
            logits = heads.blocks(k)[0](hidden[:, : -(k + 2)]) @ heads.projection(k).t()
            total = total + DECAY**k * mean(logits, labels[:, k + 2 :])
        return total

    def ours(batch: Tensor, labels: Tensor) -> Tensor:
        return chunked(hidden_of(batch), heads, labels, base_weight=base).loss

    return trained, full, ours


def mean(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1).double(), labels.flatten()).to(logits.dtype)


def draft(model: nn.Module, *, logits_budget: int | None) -> Losses:
    """A draft of one layer, which is applied once a step, and the model as its verifier."""
    width = model.config.hidden_size
    torch.manual_seed(1)
    layer = nn.Linear(2 * width, width).to(model.device, model.dtype)
    embeddings = model.get_input_embeddings()
    verifier_head = model.get_output_embeddings().weight.detach()
    head = nn.Parameter(verifier_head.clone())
    chunked = SpeculatorLoss(decay=1.0, logits_budget=logits_budget)

    def unrolled(batch: Tensor) -> tuple[list[Tensor], Tensor]:
        """The hidden states of each step, and the verifier's. Row i of the first has seen token i + 1."""
        with torch.no_grad():
            verifier = model.base_model(input_ids=batch).last_hidden_state
            tokens = embeddings(batch)
        states, state = [], verifier
        for k in range(DRAFT_STEPS):
            state = torch.tanh(layer(torch.cat((state, tokens.roll(-1 - k, 1)), -1)))
            states.append(state)
        return states, verifier

    def full(batch: Tensor, labels: Tensor) -> Tensor:
        """Sum over the steps of the mean KL divergence from the verifier."""
        states, verifier = unrolled(batch)
        log_p = (verifier @ verifier_head.t()).double().log_softmax(-1)
        total = verifier.new_zeros(())
        for k, state in enumerate(states):
            count = batch.shape[1] - 2 - k
            log_q = (state[:, :count] @ head.t()).double().log_softmax(-1)
            p = log_p[:, 1 + k : 1 + k + count]
            total = total + (p.exp() * (p - log_q)).sum(-1).mean().to(verifier.dtype)
        return total

    def ours(batch: Tensor, labels: Tensor) -> Tensor:
        states, verifier = unrolled(batch)
        return chunked(states, head, teacher_hidden=verifier, teacher_weight=verifier_head).loss

    return [*layer.parameters(), head], full, ours


KINDS: dict[str, Callable[..., Losses]] = {
    "Medusa, stage 1": lambda model, **options: medusa(model, stage=1, **options),
    "Medusa, stage 2": lambda model, **options: medusa(model, stage=2, **options),
    "draft": draft,
}


def compare(
    kind: str,
    world: World,
    *,
    steps: int,
    logits_budget: int | None = None,
    fault: float = 0.0,
    ended: Callable[[], bool] = lambda: False,
) -> list[Step]:
    """Train heads on full logits, and compare the gradients of both losses at every step.

    Args:
        kind: a name of `KINDS`.
        logits_budget: of the chunked loss.
        fault: share of the first gradient by which the chunked loss's is changed, to show that it is seen.
        ended: whether the time is up; training then stops.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = world.model().to(device)
    torch.manual_seed(0)
    trained, full, ours = KINDS[kind](model, logits_budget=logits_budget)
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    found = []
    for batch, labels in batches(world, steps, device):
        if ended():
            break
        chunked = ours(batch, labels)
        gradients = list(torch.autograd.grad(chunked, trained))
        gradients[0] = gradients[0] * (1 + fault)
        loss = full(batch, labels)
        optimizer.zero_grad()
        loss.backward()
        stock = [x.grad for x in trained]
        difference = abs(chunked.item() - loss.item())
        found.append(Step(loss.item(), difference, norm_of(stock), distance(gradients, stock)))
        optimizer.step()
    return found


def batches(world: World, steps: int, device: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Texts of the world one after the other: ids (B, T), and the same as labels, without padding."""
    texts = [world.tokenizer(a + b)["input_ids"] for a, b in zip(world.prompts, world.right, strict=True)]
    ids = [token for text in texts for token in text]
    B, T = world.batch, max(8, max(map(len, texts)))
    rows = [ids[start : start + T] for start in range(0, len(ids) - T + 1, T)]
    for step in range(steps):
        chosen: Sequence[list[int]] = [rows[(step * B + i) % len(rows)] for i in range(B)]
        batch = torch.tensor(chosen, device=device)
        yield batch, batch
