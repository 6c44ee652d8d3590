"""Every language model of transformers, tiny: whether loss and gradients with fused layers are its own.

python -m tests.layers.every_fused            compares them and prints what was found
python -m tests.layers.every_fused --write    and writes the tables of docs/layers.md

With transformers beside the environment's own on the path, it writes the table of the classes that differ.
"""

import re
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import peft
import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from logitless.models import fuse_layers
from tests.layers.tiny import FAMILIES, disturb
from tests.models import every

PAGE = Path(__file__).parents[2] / "docs" / "layers.md"
Gradients = dict[str, torch.Tensor]  # those of the parameters, and the loss as "loss"


class Row(NamedTuple):
    model: str
    verdict: str  # "equal", "untouched", "not run" or "wrong"
    detail: str  # what was fused, or why not
    left: str = ""


def classes() -> list[str]:
    """Language models, and models of images and text, which are given text alone."""
    wrappers = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values()
    wrappers = [name if isinstance(name, str) else name[0] for name in wrappers]
    return list(dict.fromkeys([*every.classes(), *wrappers]))


def stepped(model: transformers.PreTrainedModel) -> Gradients:
    out, gradients = every.gradients(model, **every.labelled(model))
    return gradients | {"loss": out.loss.detach()}


def furthest(actual: Gradients, expected: Gradients) -> tuple[float, str]:
    """The largest relative distance; gradients that are next to nothing beside the others do not count."""
    largest = max(x.norm() for x in expected.values())
    distances = []
    for name, x in expected.items():
        apart = (actual[name] - x).norm() / x.norm().clamp_min(1e-5 * largest)
        distances.append((apart.item() if apart.isfinite() else float("inf"), name))
    return max(distances)


def compare(name: str, *, lora: bool = False) -> Row:
    """Compare a class with and without fused layers.

    Args:
        lora: whether all linear layers have LoRA adapters, and nothing else is trained.
    """
    try:
        torch.manual_seed(0)
        model = every.tiny(name)
        disturb(model)
        if lora:
            config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
            peft.get_peft_model(model, config)  # exchanges the model's layers
        expected, again = stepped(model), stepped(model)
    except Exception as error:  # whatever a config or a model has against sizes like these
        return Row(name, "not run", every.described(error))
    if not torch.equal(expected["loss"], again["loss"]):
        return Row(name, "not run", "it gives another loss every time")
    # How far the stock model goes when its weights move by a rounding: top-k of experts may not be smooth.
    weights = {key: parameter.detach().clone() for key, parameter in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 1e-7 * torch.randn_like(parameter))
    sensitivity, _ = furthest(stepped(model), expected)
    model.load_state_dict(weights, strict=False)
    try:
        report = fuse_layers(model).report
    except ValueError as error:
        return Row(name, "untouched", str(error).split("(", 1)[1].rsplit(")", 1)[0])
    left = Counter(f"{report.classes[key]}: {why}" for key, why in report.skipped.items())
    what = {short(each) for parts in report.fused.values() for each in parts}
    row = Row(name, "equal", ", ".join(sorted(what)), "; ".join(left))
    actual = stepped(model)
    if actual.keys() != expected.keys():
        return row._replace(verdict="wrong", detail=f"gradients of {actual.keys() ^ expected.keys()}")
    if report.stock_calls:
        return row._replace(verdict="wrong", detail=f"PEFT's own code: {dict(report.stock_calls)}")
    distance, where = furthest(actual, expected)
    if distance < max(1e-4, 10 * sensitivity):
        return row
    return row._replace(verdict="wrong", detail=f"{where} by {distance:.1e}, {sensitivity:.1e}; {row.detail}")


def short(what: str) -> str:
    """A replacement without the names of the modules."""
    if "of one input" in what:
        return "grouped LoRA"
    if "rotation after" in what:
        return "qk-norm + rope"
    if "addition after" in what:
        return "norm + add"
    if "addition before" in what:
        return "add + norm"
    if what.startswith("gate "):
        return "packed gate" if "halves" in what else "gate"
    return "rope" if "rot" in what else what


# (part of a reason in a report, class of the module, what the page calls it); a LayerNorm of torch is one
# kernel already.
MISSING = (
    ("torch's LayerNorm", "", ""),
    ("no fused gate gives", "", "gate of experts"),
    ("its gate has another activation", "Experts", "gate of experts"),
    ("no fused norm gives", "Gated", "gated norm"),
    ("no fused norm gives", "", "other norm"),
    ("depend on more than its arguments", "", "other norm"),
    ("not a rotation", "", "rotation"),
    ("runs other code", "", "gate of experts"),
    ("no statements", "Attention", "attention"),
    ("no statements", "MLP|Mlp|FeedForward|Experts", "MLP"),
    ("no statements", "DecoderLayer", "decoder layer"),
)


def missing(left: str) -> str:
    """What a model's own code computes, of what a report lists as not fused."""
    actual = set()
    for each in re.split(r"; (?=\w+: )", left) if left else ():
        cls, _, reason = each.partition(": ")
        kinds = [kind for part, name, kind in MISSING if part in reason and re.search(name, cls)]
        actual.add(kinds[0] if kinds else "other")
    return ", ".join(sorted(actual - {""}))


def markdown(actual: list[Row]) -> str:
    """Fused models, those of one combination in one line: first those of which nothing is left."""
    groups: dict[tuple[str, str], list[str]] = {}
    for row in actual:
        if row.verdict == "equal":
            groups.setdefault((row.detail, missing(row.left)), []).append(row.model)
    whole = sum([len(models) for (_, left), models in groups.items() if not left])
    partly = sum(map(len, groups.values())) - whole
    lines = [
        f"transformers {transformers.__version__}: {whole} classes are fused whole, {partly} partly.",
        "",
        "| fused | left to the model's code | classes |",
        "|---|---|---|",
    ]
    for (what, left), models in sorted(groups.items(), key=lambda item: (item[0][1] != "", -len(item[1]))):
        lines.append(f"| {what} | {left or '-'} | {', '.join(models)} |")
    untouched = [row.model for row in actual if row.verdict == "untouched"]
    absent = [row.model for row in actual if row.verdict == "not run"]
    return "\n".join(lines) + (
        "\n\nNo part of these classes is recognized, so `fuse_layers` raises an error: "
        f"{', '.join(untouched)}.\n\n"
        f"Not run, as a tiny model or text only is not possible: {', '.join(absent)}."
    )


def differences(actual: list[Row]) -> str:
    """The classes of another version of transformers of which other parts are fused."""
    before = documented()
    lines = ["| class | fused | left to the model's code |", "|---|---|---|"]
    for row in actual:
        now = row.detail if row.verdict == "equal" else None
        if row.verdict != "not run" and now != before.get(row.model):
            lines.append(f"| {row.model} | {now or '-'} | {missing(row.left) or '-'} |")
    ran = len([row for row in actual if row.verdict != "not run"])
    title = f"transformers {transformers.__version__}: {ran} classes ran. The others are fused as above."
    return "\n".join([title, "", *lines] if len(lines) > 2 else [title.replace("The others", "All")])


def documented() -> dict[str, str]:
    """What the page says is fused, by class."""
    table = PAGE.read_text().partition("<!-- models -->")[2].partition("<!-- /models -->")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    return {name: what for what, _, names in rows[1:] for name in names.split(", ")}


def families() -> str:
    """What is fused in each family that is tested in every way, from the tests' own table."""
    lines = ["| family | attention | decoder layer | MLP, experts |", "|---|---|---|---|"]
    for name, family in FAMILIES.items():
        layer = ", ".join(dict.fromkeys(map(short, family.layer))) or "norms by themselves"
        mlp = ", ".join(map(short, filter(None, (family.mlp, family.experts))))
        attention = (family.attention,) if isinstance(family.attention, str) else family.attention
        attention = ", ".join(dict.fromkeys(map(short, attention)))
        lines.append(f"| {name} | {attention} | {layer} | {mlp} |")
    return "\n".join(lines)


def replaced(text: str, name: str, block: str) -> str:
    """The page with `block` between the two markers of `name`."""
    begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    head, _, rest = text.partition(begin)
    return f"{head}{begin}{block}\n{end}{rest.partition(end)[2]}"


def main() -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    words = [word for word in sys.argv[1:] if not word.startswith("-")]
    actual = []
    for name in words or classes():
        row = compare(name)
        actual.append(row)
        left = f" | left: {row.left}" if row.left else ""
        print(f"{name}: {row.verdict}: {row.detail}{left}", flush=True)
    print(dict(Counter(row.verdict for row in actual)))
    if "--write" in sys.argv:
        text = PAGE.read_text()
        if "transformers-" in transformers.__file__:  # installed beside the environment's own
            PAGE.write_text(replaced(text, "newest models", differences(actual)))
        else:
            text = replaced(text, "families", families())
            PAGE.write_text(replaced(text, "models", markdown(actual)))
    sys.exit(any(row.verdict == "wrong" for row in actual))


if __name__ == "__main__":
    main()
