"""Trains a small EAGLE-3 draft of a tiny model, and compares its accepted length with a decoder's count.

    verifier   a small Llama learns next tokens; then it is frozen
    text       what the verifier generates greedily: there alone teacher-forced lengths are those of decoding
    draft      one attention block over (hidden state i, token i + 1), 500 of the verifier's 2,000 ids, three
               steps, in each of which the draft sees its own state of the step before

After every round of training the draft decodes the held-out text, with its own tokens as inputs. Fails unless
the accepted length that the loss reports is that of these drafts within 3%, and rises. Needs no network, a
few minutes on a CPU:

    python examples/speculator.py
"""

import tempfile
from pathlib import Path
from typing import Annotated

import torch
import transformers
import typer
from demo_text import make_rows
from rich.console import Console
from rich.progress import track
from tabulate import tabulate
from torch import Tensor, nn

from logitless import SpeculatorLoss, linear_cross_entropy

VOCAB, DRAFT_VOCAB, HIDDEN, STEPS = 2000, 500, 96, 3
PROMPT, ROW_TOKENS, HELD_OUT, BATCH = 12, 60, 24, 16
CORPUS = 2**20  # characters


def build_verifier(device: str) -> transformers.LlamaForCausalLM:
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=3 * HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=128,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
    return transformers.LlamaForCausalLM(config).to(device)


class Draft(nn.Module):
    """A draft with EAGLE-3's inputs: the verifier's states in step 0, its own states in later steps."""

    def __init__(self, embedding: nn.Embedding):
        super().__init__()
        self.embedding = embedding.weight.detach()
        self.joined = nn.Linear(2 * HIDDEN, HIDDEN)
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.out = nn.Linear(HIDDEN, HIDDEN)
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, 3 * HIDDEN), nn.SiLU(), nn.Linear(3 * HIDDEN, HIDDEN))
        self.norms = nn.ModuleList([nn.RMSNorm(HIDDEN) for _ in range(3)])
        self.head = nn.Linear(HIDDEN, DRAFT_VOCAB, bias=False)

    def step(self, state: Tensor, tokens: Tensor, past: list[tuple[Tensor, Tensor]]) -> Tensor:
        """The states (B, T, H) of a step; `past` holds the keys and values of the steps so far.

        A row attends to the rows before it in step 0, and to itself in each step.
        """
        x = self.joined(torch.cat((self.embedding[tokens], state), -1))
        q, k, v = self.qkv(self.norms[0](x)).chunk(3, -1)
        past.append((k, v))
        T = x.shape[1]
        causal = torch.ones(T, T, dtype=torch.bool, device=x.device).tril()
        scores = [(q @ past[0][0].mT).masked_fill(~causal, -torch.inf)]
        scores += [(q * keys).sum(-1, keepdim=True) for keys, _ in past[1:]]
        weights = (torch.cat(scores, -1) / HIDDEN**0.5).softmax(-1)
        seen = weights[..., :T] @ past[0][1]
        for j, (_, values) in enumerate(past[1:]):
            seen = seen + weights[..., T + j, None] * values
        x = x + self.out(seen)
        return x + self.mlp(self.norms[1](x))

    def forward(self, hidden: Tensor, ids: Tensor) -> list[Tensor]:
        """The hidden states of all steps, with the tokens of the text as inputs: row i of step k gets token
        i + 1 + k."""
        state, past, found = hidden, [], []
        for k in range(STEPS):
            state = self.step(state, ids.roll(-1 - k, 1), past)
            found.append(self.norms[2](state))
        return found

    @torch.no_grad()
    def proposals(self, hidden: Tensor, ids: Tensor, draft_ids: Tensor) -> Tensor:
        """(B, T, steps) tokens that the draft proposes from every row, each step fed with its own."""
        state, past, found, tokens = hidden, [], [], ids.roll(-1, 1)
        for _ in range(STEPS):
            state = self.step(state, tokens, past)
            tokens = draft_ids[self.head(self.norms[2](state)).argmax(-1)]
            found.append(tokens)
        return torch.stack(found, -1)


def decoded(proposals: Tensor, ids: Tensor) -> tuple[float, float]:
    """(mean tokens of a draft from every row, tokens per pass of a decoder), the verifier's own included.

    The text is the verifier's greedy one, so the verifier accepts what agrees with it.
    """
    rows, lengths, passes, made = len(ids), [], 0, 0
    accepted = torch.zeros(ids.shape, dtype=torch.int64)
    for i in range(PROMPT - 2, ROW_TOKENS - 2):
        run = torch.ones(rows, dtype=torch.bool)
        for k in range(min(STEPS, ROW_TOKENS - 2 - i)):
            run &= (proposals[:, i, k] == ids[:, i + 2 + k]).cpu()
            accepted[:, i] += run
        lengths.append(1.0 + accepted[:, i].float())
    for row in range(rows):
        i = PROMPT - 2
        while i < ROW_TOKENS - 2 - STEPS:
            passes, made, i = passes + 1, made + 1 + accepted[row, i], i + 1 + int(accepted[row, i])
    return torch.stack(lengths).mean().item(), float(made) / passes


def main(
    verifier_steps: Annotated[int, typer.Option(help="Steps of the verifier.")] = 150,
    rounds: Annotated[int, typer.Option(help="Rounds of the draft's training.")] = 4,
    round_steps: Annotated[int, typer.Option(help="Steps of a round.")] = 40,
    divergence: Annotated[str, typer.Option(help="Divergence of SpeculatorLoss.")] = "lk_hybrid",
    device: Annotated[str, typer.Option(help="cpu or cuda. Default: cuda where there is one.")] = "",
) -> None:
    """Train a verifier, then a draft on its text; exit with 1 unless the accepted length rises and is that of
    decoding."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory() as folder:
        corpus = make_rows(400, ROW_TOKENS, VOCAB, CORPUS, Path(folder) / "tokenizer.json").to(device)
    verifier = build_verifier(device)
    optimizer = torch.optim.AdamW(verifier.parameters(), lr=3e-3)
    for _ in track(range(verifier_steps), "verifier", console=console):
        ids = corpus[torch.randint(len(corpus), (BATCH,), device=device)]
        optimizer.zero_grad()
        states = verifier.base_model(input_ids=ids).last_hidden_state
        linear_cross_entropy(states, verifier.lm_head, ids, shift=True).backward()
        optimizer.step()
    verifier.requires_grad_(False).eval()

    with torch.no_grad():
        prompts = corpus[: 160 + HELD_OUT, :PROMPT]
        text = verifier.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=False,
            max_new_tokens=ROW_TOKENS - PROMPT,
        )
        hidden = verifier.base_model(input_ids=text).last_hidden_state
    draft_ids = text.flatten().bincount(minlength=VOCAB).topk(DRAFT_VOCAB).indices.sort().values
    # Chains start where the first predicted token is the verifier's.
    chains = slice(PROMPT - 2, ROW_TOKENS - 2)
    starts = torch.arange(chains.start, chains.stop, device=device)
    draft = Draft(verifier.get_input_embeddings()).to(device)
    loss = SpeculatorLoss(divergence=divergence)

    def call(rows: Tensor):
        states = [x[:, chains] for x in draft(hidden[rows], text[rows])]
        given = {"teacher_hidden": hidden[rows], "teacher_weight": verifier.lm_head, "draft_ids": draft_ids}
        return loss(states, draft.head, text[rows], starts=starts.expand(len(rows), -1), **given)

    optimizer = torch.optim.AdamW(draft.parameters(), lr=3e-3)
    held_out, table = torch.arange(HELD_OUT, device=device), []
    for number in range(rounds + 1):
        if number:
            for _ in track(range(round_steps), f"round {number}", console=console):
                rows = HELD_OUT + torch.randint(len(text) - HELD_OUT, (BATCH,), device=device)
                optimizer.zero_grad()
                call(rows).loss.backward()
                optimizer.step()
        with torch.no_grad():
            out = call(held_out)
        lengths = decoded(draft.proposals(hidden[:HELD_OUT], text[:HELD_OUT], draft_ids), text[:HELD_OUT])
        rates = [out.metrics[f"step_{k}/acceptance"].item() for k in range(STEPS)]
        reported = [out.metrics[f"{kind}_length"].item() for kind in ("accepted", "expected")]
        table.append([number * round_steps, *rates, *reported, *lengths])
    headers = ["steps", *(f"acceptance {k}" for k in range(STEPS))]
    headers += ["accepted length", "expected length", "drafts", "decoder"]
    print(tabulate(table, headers=headers, floatfmt=".3f"))
    print(out.plan)
    first, last = table[0], table[-1]
    failures = []
    if any(abs(row[-2] - row[-4]) > 0.03 * row[-2] for row in table):
        failures.append("an accepted length other than that of the drafts")
    if last[-4] < max(1.5, first[-4] + 0.3) or last[-1] < 1.3:
        failures.append(f"an accepted length of {last[-4]:.2f} after {first[-4]:.2f}")
    if last[-3] <= first[-3]:
        failures.append("an expected length that does not rise")
    if failures:
        raise SystemExit("expected a draft that learns and decodes as reported, got " + "; ".join(failures))


if __name__ == "__main__":
    typer.run(main)
