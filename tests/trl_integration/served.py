"""A stand-in for the vLLM server of a teacher: log-probabilities of a tiny teacher, computed here."""

from types import SimpleNamespace

import torch
from torch import Tensor

from .tiny import VOCAB, tiny_model


class Client:
    """`trl.generation.vllm_client.VLLMClient`, as far as teachers are asked."""

    missing, vocab_size = False, VOCAB

    def __init__(self, *args, **kwargs):
        self.teacher = tiny_model(hidden_size=48, vocab_size=self.vocab_size)

    @torch.no_grad()
    def get_sequence_logprobs(self, sequences, prompt_lengths, top_logprobs, temperature) -> dict[str, list]:
        found = {"actual_logprobs": [], "logprobs": [], "logprob_token_ids": []}
        for ids, start in zip(sequences, prompt_lengths, strict=True):
            log_p = (self.teacher(torch.tensor([ids])).logits[0] / temperature).log_softmax(-1)[
                start - 1 : -1
            ]
            best = log_p.topk(top_logprobs, -1)
            actual = log_p.gather(-1, torch.tensor(ids[start:])[:, None])
            if self.missing:
                actual = torch.full_like(actual, -torch.inf)
            for name, x in zip(found, (actual, best.values, best.indices), strict=True):
                found[name].append(x.tolist())
        return found


class Generation:
    """`trl.generation.vllm_generation.VLLMGeneration`, whose completions depend on nothing but the
    prompts."""

    def __init__(self, *args, max_completion_length: int, **kwargs):
        self.length = max_completion_length

    def sync_weights(self) -> None:
        pass

    def generate(self, prompts, images, num_generations) -> tuple:
        generator = torch.Generator().manual_seed(sum(map(sum, prompts)))
        lengths: list[int] = torch.randint(2, self.length + 1, (len(prompts),), generator=generator).tolist()
        return prompts, [self.completion(length, generator) for length in lengths], None, None

    def completion(self, length: int, generator: torch.Generator) -> list[int]:
        ids: Tensor = torch.randint(3, 90, (length,), generator=generator)
        return ids.tolist()


def serve(monkeypatch, *, missing: bool = False, vocab_size: int = VOCAB) -> SimpleNamespace:
    """Puts the stand-ins in the place of TRL's clients; with `missing` the server does not know the sampled
    tokens."""
    from trl.generation import vllm_client, vllm_generation

    client = type("Client", (Client,), {"missing": missing, "vocab_size": vocab_size})
    monkeypatch.setattr(vllm_client, "VLLMClient", client)
    monkeypatch.setattr(vllm_generation, "VLLMGeneration", Generation)
    return SimpleNamespace(client=client, generation=Generation)
