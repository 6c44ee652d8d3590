"""An extension of griffe: a loss's reference lists the options that it has from its parents, too."""

import re

import griffe

ARGS = re.compile(r"^Args:\n((?:    .*\n|\n)+)", re.MULTILINE)
ENTRY = re.compile(r"^    (\w+(?:, \w+)*): ((?:.*\n)(?:     .*\n|\n)*)", re.MULTILINE)


class InheritedOptions(griffe.Extension):
    """Adds the `Args:` of a dataclass's parents to its docstring, a name each."""

    def on_package(self, *, pkg: griffe.Module, **kwargs) -> None:
        modules = (pkg["losses"], *pkg["losses"].modules.values())
        classes = [x for module in modules for x in module.classes.values() if not x.is_alias]
        losses = [x for x in classes if "dataclass" in x.labels and x.docstring]
        own = {x.path: options(x.docstring.value) for x in losses}
        for loss in losses:
            found: dict[str, str] = {}
            for x in (loss, *loss.mro()):
                found = found | {
                    name: text for name, text in own.get(x.path, {}).items() if name not in found
                }
            loss.docstring.value = with_options(loss.docstring.value, found)
        if not all(
            "    logits_budget: " in loss.docstring.value for loss in losses if loss.name.endswith("Loss")
        ):
            raise ValueError(
                "losses: expected an option of all of them in each, got one without it; see mro()."
            )


def options(docstring: str) -> dict[str, str]:
    """What stands below `Args:`, an entry for each name: several together have no type and default there."""
    found = ARGS.search(f"{docstring}\n")
    entries = {}
    for names, text in ENTRY.findall(found[1]) if found else ():
        first, *others = names.split(", ")
        entries[first] = text.rstrip()
        entries |= dict.fromkeys(others, f"with `{first}`, above.")
    return entries


def with_options(docstring: str, entries: dict[str, str]) -> str:
    if not entries:
        return docstring
    text = f"{docstring}\n"
    listed = "".join(f"    {name}: {said}\n" for name, said in entries.items())
    if found := ARGS.search(text):
        return f"{text[: found.start(1)]}{listed}\n{text[found.end(1) :]}"
    return f"{text}\nArgs:\n{listed}"
