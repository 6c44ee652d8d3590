"""Group relative policy optimization with TRL: log-probabilities, entropy and KL of the completions without
their logits.

    python examples/grpo.py     # a tiny model learns to write letters; offline, a few seconds on a CPU
    python examples/grpo.py --model Qwen/Qwen3-0.6B --dataset trl-lib/DeepMath-103K --steps 500
    --completion-tokens 1024 --output grpo
    python examples/grpo.py --own-loop     # without a trainer: sampler, reference and loss

Other options: --help.
"""

import copy
from typing import Annotated

import torch
import transformers
import typer
from tiny_start import (
    Batch,
    Chunked,
    Data,
    Model,
    Output,
    Steps,
    data,
    report,
    settings,
    tiny_model,
    workspace,
)

from logitless import GRPOLoss, SamplerCorrection, linear_logprobs
from logitless.trl_integration import GRPOConfig, GRPOTrainer


def letters(completions: list[str] | list[list[dict]], **_) -> list[float]:
    """The share of letters in a completion; put your own reward here."""
    texts = [x if isinstance(x, str) else x[-1]["content"] for x in completions]
    return [sum(map(str.isalpha, text)) / max(len(text), 1) for text in texts]


def own_loop(start: str, prompts: list[str], steps: int, samples: int, length: int, rate: float) -> None:
    """Two updates from each group of samples: the ratio to the old policy, a reference, a correction of the
    sampler and an entropy bonus."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = transformers.AutoTokenizer.from_pretrained(start, padding_side="left")
    policy = transformers.AutoModelForCausalLM.from_pretrained(start).to(device)
    reference = copy.deepcopy(policy).requires_grad_(False)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=rate)
    loss_fn = GRPOLoss(
        epsilon_high=0.28,
        beta=0.02,
        entropy_coef=1e-3,
        sampler_correction=SamplerCorrection(high=2.0),
    )
    rewards, plan = [], None
    for step in range(steps):
        asked = tokenizer([prompts[step % len(prompts)]] * samples, return_tensors="pt").to(device)
        before = asked["input_ids"].shape[1]
        sampled = policy.generate(
            input_ids=asked["input_ids"],
            attention_mask=asked["attention_mask"],
            do_sample=True,
            top_k=0,
            top_p=1.0,
            temperature=1.0,
            repetition_penalty=1.0,
            max_new_tokens=length,
            return_dict_in_generate=True,
            output_logits=True,
        )
        tokens = sampled.sequences[:, before:]
        # An inference engine returns these; its kernels are others than the trainer's.
        sampling_logps = torch.stack(sampled.logits, 1).float().log_softmax(-1)
        sampling_logps = sampling_logps.gather(-1, tokens[..., None])[..., 0]
        ended = (tokens == tokenizer.eos_token_id).cumsum(1) - (tokens == tokenizer.eos_token_id).long()
        mask = ended == 0
        reward = torch.tensor(
            letters(tokenizer.batch_decode(tokens, skip_special_tokens=True)), device=device
        )
        rewards.append(reward.mean().item())
        seen = torch.cat((asked["attention_mask"], mask.long()), 1)

        def hidden_of(model, ids=sampled.sequences, seen=seen, before=before):
            return model.model(ids, attention_mask=seen).last_hidden_state[:, before - 1 : -1]

        with torch.no_grad():
            rollout = {
                "advantages": (reward - reward.mean()) / (reward.std() + 1e-4),
                "old_logps": linear_logprobs(hidden_of(policy), policy.lm_head, tokens).logps,
                "sampling_logps": sampling_logps,
                "ref_hidden": hidden_of(reference),
                "ref_weight": reference.lm_head,
                "mask": mask,
            }
        for _ in range(2):
            out = loss_fn(hidden_of(policy), policy.lm_head, tokens, **rollout)
            out.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        plan = out.plan
    some = -(-len(rewards) // 4)
    print(f"reward {sum(rewards[:some]) / some:.4f} -> {sum(rewards[-some:]) / some:.4f}; {plan.describe()}")


def main(
    model: Model = "",
    dataset: Data = "",
    steps: Steps = 15,
    batch_size: Batch = 8,
    output: Output = "",
    use_chunked_loss: Chunked = True,
    num_generations: Annotated[int, typer.Option(help="Completions of each prompt.")] = 8,
    completion_tokens: Annotated[int, typer.Option(help="Tokens of a completion at most.")] = 32,
    own: Annotated[bool, typer.Option("--own-loop", help="Train without a trainer.")] = False,
) -> None:
    with workspace(output) as folder:
        start = model or tiny_model(folder)
        if own:
            prompts = [x for x in data(dataset, ["prompt"])["prompt"] if x]
            own_loop(start, prompts, steps, num_generations, completion_tokens, 1e-6 if model else 1e-2)
            return
        args = GRPOConfig(
            use_chunked_loss=use_chunked_loss,
            num_generations=num_generations,
            max_completion_length=completion_tokens,
            learning_rate=1e-6 if model else 1e-2,
            **settings(folder, steps, batch_size),
        )
        trainer = GRPOTrainer(
            start,
            reward_funcs=letters,
            args=args,
            train_dataset=data(dataset, ["prompt"]),
        )
        trainer.train()
        report(trainer, output, "reward")


if __name__ == "__main__":
    typer.run(main)
