"""The tables of docs/proof.md, from a result of `python -m benchmarks convergence`."""

from tabulate import tabulate

from benchmarks.proof import curves, gradient_errors
from benchmarks.proof.gradient_errors import CE, DEFAULT, FLOOR

# The largest head of a result, whose rows are shown in detail
DETAILED = "SmolLM2-135M, text read"


def section_of(document: dict, head: str, objective: str = "CE") -> dict:
    (found,) = [
        section
        for section in document["gradients"]
        if (section["head"], section["objective"]) == (head, objective)
    ]
    return found


def together(documents: list[dict]) -> dict:
    """Results of some parts as one, the oldest first: of a part that was run twice, the later."""
    whole: dict = {}
    for document in documents:
        whole |= {name: found for name, found in document.items() if found or name not in whole}

    def several(values: list[str | None]) -> str:
        return " and ".join(dict.fromkeys(value for value in values if value))

    absent = {name: why for document in documents for name, why in document["absent"].items()}
    return whole | {
        "device": several([document["device"] for document in documents]),
        "versions": {
            name: several([document["versions"].get(name) for document in documents])
            for name in whole["versions"]
        },
        "absent": {name: why for name, why in absent.items() if name not in whole},
        "left_out": [what for document in documents for what in document["left_out"]],
    }


def widest(documents: list[dict]) -> dict:
    """The result whose training runs are of the most implementations, the newest of several."""
    return max(reversed(documents), key=lambda document: len({run["variant"] for run in document["runs"]}))


def of_page(documents: list[dict]) -> dict[str, str]:
    """Each table of the page, by the name of its markers; of the training runs, one for each result."""
    document = together(documents)
    runs = [(curves.table(each["statistics"], "github"), each) for each in with_part(documents, "statistics")]
    return {
        "proof-heads": heads(document),
        "proof-detail": gradient_errors.table(section_of(document, DETAILED), "github"),
        "proof-objectives": objectives(document),
        "proof-shadow": shadow(document),
        "proof-curves": "\n\n".join(f"{table}\n\n{source(each)}" for table, each in reversed(runs)),
        "proof-outcomes": recipes(with_part(documents, "outcomes")),
    }


def with_part(documents: list[dict], part: str) -> list[dict]:
    return [document for document in documents if document.get(part)]


def source(document: dict) -> str:
    return f"One {document['device']}, {document['date'][:10]}, commit {document['commit']}."


def recipes(documents: list[dict]) -> str:
    """One table of the outcomes: of each recipe the newest result, and below the table which it is."""
    found = {row["name"]: (row, each) for each in documents for row in each["outcomes"]}
    if not found:
        return "*Not measured yet.*"
    sources: dict[str, list[str]] = {}
    for name, (_, each) in found.items():
        sources.setdefault(source(each), []).append(name)
    lines = [
        text if len(sources) == 1 else f"{', '.join(names)}: {text[0].lower()}{text[1:]}"
        for text, names in sources.items()
    ]
    return "\n\n".join([outcomes([row for row, _ in found.values()], "github"), *lines])


def heads(document: dict) -> str:
    """Errors of cross-entropy's gradients on every head."""
    return errors([section for section in document["gradients"] if section["objective"] == "CE"])


def objectives(document: dict) -> str:
    """The same of preferences and policies."""
    return errors([section for section in document["gradients"] if section["objective"] != "CE"])


def errors(sections: list[dict]) -> str:
    """A column for each section: the errors of d_hidden and d_weight in percent."""

    def facts(section: dict) -> str:
        return f"{section['facts']['nats']:.1f}, {section['facts']['largest logit']:.0f}"

    several = {section["objective"] for section in sections} != {"CE"}
    headers = [
        "d_hidden / d_weight, %",
        *(
            f"{section['head']}, {section['objective']}" if several else section["head"]
            for section in sections
        ),
    ]
    body = [["loss in nats, mean largest logit", *map(facts, sections)]]
    names = dict.fromkeys(row["name"] for section in sections for row in section["rows"])
    order = [FLOOR, *(peer.name for peer in CE.peers)]
    for name in sorted(names, key=order.index):
        rows = [next((row for row in section["rows"] if row["name"] == name), None) for section in sections]
        cells = [name, *map(cell, rows)]
        body.append([entry and f"**{entry}**" for entry in cells] if name == DEFAULT else cells)
    align = ("left", *["right"] * len(sections))
    return tabulate(body, headers, tablefmt="github", colalign=align, disable_numparse=True)


def cell(row: dict | None) -> str:
    if row is None:
        return ""
    if row["verdict"] != "ok":
        return row["verdict"]
    return f"{100 * row['d_hidden']['error']:.2f} / {100 * row['d_weight']['error']:.2f}"


def shadow(document: dict) -> str:
    """A row for each trainer: how far the gradients are apart in fp32, and from fp32 in bf16."""
    found = {(section["trainer"], section["dtype"]): section for section in document["shadow"]}
    body = []
    for trainer in dict.fromkeys(trainer for trainer, _ in found):
        exact, low = found[trainer, "float32"], found.get((trainer, "bfloat16"))
        body.append(
            [
                trainer,
                len(exact["steps"]),
                f"{exact['largest']:.1e}",
                *["" if low is None else f"{100 * low[name]:.1f}%" for name in ("stock_error", "error")],
            ]
        )
    headers = [
        "trainer",
        "steps",
        "fp32: largest difference of the gradients",
        "bf16: stock's gradient off by",
        "with the flag",
    ]
    return tabulate(body, headers, tablefmt="github", disable_numparse=True)


def outcomes(rows: list[dict], form: str = "simple") -> str:
    """A row for each recipe: the metric on held-out prompts, with the flag and from moved weights."""

    def less(row: dict, variant: str) -> str:
        found = row[variant]["interval"]
        between = "" if found is None else ", {:+.2g} to {:+.2g}".format(*found)
        return f"{row[variant]['mean']:+.2g}{between}"

    body = []
    for row in rows:
        seeds = [each["parted"] for each in row["seeds"] if "failed" not in each]
        cells = [row["name"], row["metric"], row["steps"], len(seeds)]
        if seeds:
            cells += [f"{row['before']:.3f}, {row['stock']:.3f}", less(row, "flag"), less(row, "moved")]
            cells.append(" / ".join(parted([each[name] for each in seeds]) for name in ("flag", "moved")))
        else:
            cells += [""] * 4
        body.append([*cells, row["verdict"]])
    headers = [
        "recipe",
        "metric",
        "steps",
        "seeds",
        "before, stock",
        "flag - stock, 95%",
        "moved - stock, 95%",
    ]
    headers += ["runs part: flag / moved", "difference"]
    return tabulate(body, headers, tablefmt=form, disable_numparse=True)


def parted(steps: list[int | None]) -> str:
    """In how many seeds two runs have parted, and the first step."""
    found = [step for step in steps if step is not None]
    return f"{len(found)}, from step {min(found)}" if found else "0"
