"""What the decoder layers of a configuration hold at each level: `python -m logitless activations`."""

import copy
import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from logitless.errors import value_error
from logitless.layers.fuse import fuse_layers
from logitless.models.activation_plan import ActivationPlan, choose, in_gib, ladder
from logitless.models.activations import decoder_layers, decoder_of, fit_activations, kind_of

LEVELS = ("keep", "cheap", "full")
# Of the model that is run: embedding and head play no part.
VOCABULARY = 64


@dataclass(frozen=True)
class ActivationTable:
    """Bytes of a model's decoder layers; `str()` of it is a table.

    Attributes:
        name: class of the layers' model.
        tokens: of the batch.
        costs: by layer, in their order: bytes by level.
        kinds: by layer, its class, and the first such layer where layers of one class differ.
        shared: bytes that all layers have in common, such as angles and masks.
        closed: why the cheap level is closed; "" where it is open.
    """

    name: str
    tokens: int
    costs: tuple[dict[str, int], ...]
    kinds: tuple[str, ...]
    shared: int
    closed: str = ""

    def total(self, level: str) -> int:
        return self.shared + sum(cost[level] for cost in self.costs)

    def plan(self, budget: int) -> ActivationPlan:
        """The plan of a budget.

        Raises:
            ValueError: the budget is smaller than the inputs of the layers.
        """
        least = self.total("full")
        remedy = "raise it, or take a smaller batch"
        if budget < least:
            raise value_error("activation_budget", f"at least {least:,} bytes", f"{budget:,}", remedy)
        return ActivationPlan(*choose(self.costs, self.shared, budget), budget, self.tokens)

    def rungs(self) -> Iterator[tuple[str, int]]:
        """(levels, bytes) along the ladder, each an upgrade of the one before."""
        levels = ["full"] * len(self.costs)
        total = self.total("full")
        yield _counted(levels), total
        for layer, level in ladder([cost["cheap"] < cost["keep"] for cost in self.costs]):
            total += self.costs[layer][level] - self.costs[layer][levels[layer]]
            levels[layer] = level
            yield _counted(levels), total

    def __str__(self) -> str:
        lines = [f"{self.name}: {len(self.costs)} decoder layers, {self.tokens:,} tokens"]
        lines += [f"the cheap level is closed: {self.closed}"] if self.closed else []
        lines += ["", f"{'bytes a layer':<34}{'keep':>14}{'cheap':>14}{'full':>14}"]
        for kind in dict.fromkeys(self.kinds):
            cost = self.costs[self.kinds.index(kind)]
            title = f"{self.kinds.count(kind)} x {kind}"
            lines.append(f"{title:<34}" + "".join(f"{in_gib(cost[level]):>14}" for level in LEVELS))
        totals = "".join(f"{in_gib(self.total(level)):>14}" for level in LEVELS)
        lines += [f"{'all layers':<34}{totals}", "", f"{'ladder':<48}{'budget':>14}"]
        rungs = list(self.rungs())
        step = max(1, (len(rungs) - 1) // 8)
        shown = [*rungs[:-1:step], rungs[-1]]
        return "\n".join([*lines, *(f"{levels:<48}{in_gib(total):>14}" for levels, total in shown)])


def _counted(levels: list[str]) -> str:
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
    """Count what the decoder layers of a configuration hold, by running one layer of each kind.

    Kernels and attention back ends decide what is saved, so the layers run, on the device that is named. The
    weights are random.

    Args:
        config: folder of a transformers model, or its config.json.
        batch: sequences.
        length: tokens of each.
        dtype: of the weights.
        device: where the layers run; default the GPU, if there is one.
        frozen: whether the layers' weights get no gradient, as the base of an adapter.
        stock_layers: leave out `fuse_layers`; the cheap level is closed then.

    Raises:
        ValueError: there is no such configuration, or `fit_activations` would refuse its model.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = os.path.dirname(config) or "." if config.endswith(".json") else config
    remedy = "pass the folder of a model, or its config.json"
    if not os.path.isfile(os.path.join(folder, "config.json")):
        raise value_error("CONFIG", "a folder with a config.json, or that file", config, remedy)
    whole = AutoConfig.from_pretrained(folder, local_files_only=True)
    if getattr(whole, "is_encoder_decoder", False):
        raise value_error("CONFIG", "a decoder", "an encoder-decoder", "use gradient checkpointing")
    with torch.device("meta"):
        outline = AutoModelForCausalLM.from_config(whole, dtype=dtype)
    kinds = [kind_of(layer) for layer in decoder_layers(decoder_of(outline)).values()]
    if not kinds:
        name = type(outline).__name__
        remedy = "use gradient checkpointing"
        raise value_error("CONFIG", "a model with layers that can be checkpointed", name, remedy)
    # The fewest layers from the first on that have all kinds.
    needed = 1 + max(kinds.index(kind) for kind in kinds)
    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    with torch.random.fork_rng(), torch.device(where):
        model = AutoModelForCausalLM.from_config(_shortened(whole, needed), dtype=dtype).train()
        ids = torch.zeros(batch, length, dtype=torch.long)
    closed = "the layers are stock, without fuse_layers" if stock_layers else ""
    if not stock_layers:
        try:
            fuse_layers(model)
        except ValueError as error:
            closed = str(error)
    if frozen:
        model.requires_grad_(False)
        model.get_input_embeddings().register_forward_hook(lambda _, args, out: out.requires_grad_())
    fitted = fit_activations(model, 2**62)
    backbone = decoder_of(model)
    for _ in range(2):  # the second pass has the plan that the first one's counts give
        backbone(input_ids=ids, use_cache=False)
    costs, shared = fitted.costs
    places = [kinds.index(kind) for kind in kinds]
    classes = list(decoder_layers(backbone).values())
    titles = []
    for place in places:
        name = type(classes[place]).__name__
        alike = all(costs[place] == costs[other] for other in places if type(classes[other]).__name__ == name)
        titles.append(name if alike else f"{name} as {place}")
    counted = tuple(costs[place] for place in places)
    return ActivationTable(type(outline).__name__, batch * length, counted, tuple(titles), shared, closed)


def _shortened(config, layers: int):
    """The configuration with its first layers alone, and few tokens."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    text.num_hidden_layers = layers
    for name, value in vars(text).items():
        if name in ("layer_types", "mlp_layer_types") and isinstance(value, list):
            setattr(text, name, value[:layers])
    text.vocab_size = VOCABULARY
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(text, name, None)
    return config
