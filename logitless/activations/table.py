"""Activation bytes of a configuration's decoder layers at each level: `python -m logitless activations`."""

import copy
import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from logitless.activations.fit import decoder_layers, decoder_of, fit_activations, kind_of
from logitless.activations.plan import ActivationPlan, choose_levels, format_bytes, upgrades
from logitless.errors import value_error
from logitless.layers.fuse import fuse_layers

LEVELS = ("keep", "cheap", "full")
# Vocabulary size of the model that is run; embedding and head are not counted.
VOCAB_SIZE = 64


@dataclass(frozen=True)
class ActivationTable:
    """Activation bytes that each decoder layer holds between forward and backward, at each level.

    The levels "keep", "cheap" and "full" are described in docs/activations.md. `str()` returns a table.

    Attributes:
        name: class name of the model.
        tokens: number of tokens in the batch.
        costs: for each layer, a dict from level to bytes.
        kinds: for each layer, its class name; layers of one class with different costs are named "Class as
            i", i the index of the first such layer.
        shared: bytes that all layers share, such as rotation angles and masks.
        unavailable: why the level "cheap" is unavailable; "" if it is available.
    """

    name: str
    tokens: int
    costs: tuple[dict[str, int], ...]
    kinds: tuple[str, ...]
    shared: int
    unavailable: str = ""

    def total(self, level: str) -> int:
        """Return the bytes with all layers at one level."""
        return self.shared + sum(cost[level] for cost in self.costs)

    def plan(self, budget: int) -> ActivationPlan:
        """Return the plan for a budget in bytes.

        Raises:
            ValueError: the budget is smaller than the bytes with all layers at "full".
        """
        min_bytes = self.total("full")
        remedy = "raise it, or take a smaller batch"
        if budget < min_bytes:
            raise value_error("activation_budget", f"at least {min_bytes:,} bytes", f"{budget:,}", remedy)
        return ActivationPlan(*choose_levels(self.costs, self.shared, budget), budget, self.tokens)

    def levels_and_bytes(self) -> Iterator[tuple[str, int]]:
        """Yield (number of layers at each level as text, bytes) after each of the `upgrades`."""
        levels = ["full"] * len(self.costs)
        total = self.total("full")
        yield _format_levels(levels), total
        for layer, level in upgrades([cost["cheap"] < cost["keep"] for cost in self.costs]):
            total += self.costs[layer][level] - self.costs[layer][levels[layer]]
            levels[layer] = level
            yield _format_levels(levels), total

    def __str__(self) -> str:
        lines = [f"{self.name}: {len(self.costs)} decoder layers, {self.tokens:,} tokens"]
        lines += [f"level cheap is unavailable: {self.unavailable}"] if self.unavailable else []
        lines += ["", f"{'bytes a layer':<34}{'keep':>14}{'cheap':>14}{'full':>14}"]
        for kind in dict.fromkeys(self.kinds):
            cost = self.costs[self.kinds.index(kind)]
            title = f"{self.kinds.count(kind)} x {kind}"
            lines.append(f"{title:<34}" + "".join(f"{format_bytes(cost[level]):>14}" for level in LEVELS))
        totals = "".join(f"{format_bytes(self.total(level)):>14}" for level in LEVELS)
        lines += [f"{'all layers':<34}{totals}", "", f"{'upgrades':<48}{'budget':>14}"]
        rows = list(self.levels_and_bytes())
        step = max(1, (len(rows) - 1) // 8)
        shown = [*rows[:-1:step], rows[-1]]
        return "\n".join([*lines, *(f"{levels:<48}{format_bytes(total):>14}" for levels, total in shown)])


def _format_levels(levels: list[str]) -> str:
    return ", ".join(
        f"{levels.count(level)} {name}" for level, name in zip(LEVELS, ("kept", "cheap", "full"))
    )


def activation_table(
    config: str,
    *,
    batch: int,
    length: int,
    dtype: torch.dtype = torch.bfloat16,
    device: str | None = None,
    frozen: bool = False,
    stock_layers: bool = False,
) -> ActivationTable:
    """Count the activation bytes of a configuration's decoder layers by running one layer of each kind.

    The layers run, because kernels and attention backends decide which tensors are saved. The weights are
    random.

    Args:
        config: folder of a transformers model, or its config.json.
        batch: number of sequences.
        length: number of tokens in each sequence.
        dtype: dtype of the weights.
        device: device on which the layers run; default the GPU, if there is one.
        frozen: whether the layers' weights require no gradient, as under an adapter.
        stock_layers: whether to run the model without `fuse_layers`; the level "cheap" is then unavailable.

    Raises:
        ValueError: there is no such configuration, or `fit_activations` does not support its model.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = config
    if config.endswith(".json"):
        folder = os.path.dirname(config) or "."
    remedy = "pass the folder of a model, or its config.json"
    if not os.path.isfile(os.path.join(folder, "config.json")):
        raise value_error("CONFIG", "a folder with a config.json, or that file", config, remedy)
    model_config = AutoConfig.from_pretrained(folder, local_files_only=True)
    if getattr(model_config, "is_encoder_decoder", False):
        raise value_error("CONFIG", "a decoder", "an encoder-decoder", "use gradient checkpointing")
    with torch.device("meta"):
        meta_model = AutoModelForCausalLM.from_config(model_config, dtype=dtype)
    kinds = [kind_of(layer) for layer in decoder_layers(decoder_of(meta_model)).values()]
    if not kinds:
        name = type(meta_model).__name__
        remedy = "use gradient checkpointing"
        raise value_error("CONFIG", "a model with layers that can be checkpointed", name, remedy)
    # The first layers, as few as include all kinds.
    num_layers = 1 + max(kinds.index(kind) for kind in kinds)
    run_device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    with torch.random.fork_rng(), torch.device(run_device):
        model = AutoModelForCausalLM.from_config(
            _shorten_config(model_config, num_layers), dtype=dtype
        ).train()
        ids = torch.zeros(batch, length, dtype=torch.long)
    unavailable = "the layers are stock, without fuse_layers" if stock_layers else ""
    if not stock_layers:
        try:
            fuse_layers(model)
        except ValueError as error:
            unavailable = str(error)
    if frozen:
        model.requires_grad_(False)
        model.get_input_embeddings().register_forward_hook(lambda _, args, out: out.requires_grad_())
    handle = fit_activations(model, 2**62)
    backbone = decoder_of(model)
    for _ in range(2):  # the first pass counts, the second one sets `costs`
        backbone(input_ids=ids, use_cache=False)
    costs, shared = handle.costs
    # For each layer of the configuration, the index of the layer of its kind that was run.
    indices = [kinds.index(kind) for kind in kinds]
    names = [type(layer).__name__ for layer in decoder_layers(backbone).values()]
    titles = []
    for index in indices:
        name = names[index]
        have_equal_costs = all(costs[index] == costs[other] for other in indices if names[other] == name)
        titles.append(name if have_equal_costs else f"{name} as {index}")
    return ActivationTable(
        name=type(meta_model).__name__,
        tokens=batch * length,
        costs=tuple(costs[index] for index in indices),
        kinds=tuple(titles),
        shared=shared,
        unavailable=unavailable,
    )


def _shorten_config(config, num_layers: int):
    """Return a copy of the configuration with only its first layers, and a small vocabulary."""
    config = copy.deepcopy(config)
    text_config = config.get_text_config()
    text_config.num_hidden_layers = num_layers
    for name, value in vars(text_config).items():
        if name in ("layer_types", "mlp_layer_types") and isinstance(value, list):
            setattr(text_config, name, value[:num_layers])
    text_config.vocab_size = VOCAB_SIZE
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(text_config, name, None)
    return config
