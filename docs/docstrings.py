"""An extension of griffe: what the reference adds to the docstrings of the library.

* How each public object is imported.
* The options that a loss has from its parents. Those of classes that are no part of the reference stand in
  the loss's own table; of the others the names are listed, with links to where they are explained.
* An entry for each argument, also where a docstring explains several together; fields of named tuples,
  whose types griffe finds below `Attributes:` alone. Where a function's arguments are as in others of its
  module, the entries of those.
* The inputs of a loss's call as a list; griffe has them as one paragraph.
"""

import ast
import re

import griffe

SECTION = re.compile(r"^(Args|Attributes|Raises):\n((?:    .*\n|\n)+)", re.MULTILINE)
ENTRY = re.compile(r"^    (\*{0,2}\w+(?:, \w+)*): ((?:.*\n)(?:     .*\n|\n)*)", re.MULTILINE)
INPUTS = re.compile(r"^Inputs:\n((?:    .*\n|\n)+)", re.MULTILINE)
SAME = re.compile(r"(?:Other a|A)rguments as in (`\w+`(?: and `\w+`)?)\.\s*")
EVERY_LOSS = "logitless.losses.linear.LinearLoss"
# Bases whose options have an anchor each, `logitless.TokenLoss(return_logps)`, and what the others call them.
ANCHORED = {"logitless.TokenLoss": "losses of tokens", EVERY_LOSS: "every loss"}
# Packages whose names are public, and the dict of those that they import with their first use.
PACKAGES = {"": None, "models": "_MODULES", "trl_integration": "MODULES", "kernels": None}


class Docstrings(griffe.Extension):
    def on_package(self, *, pkg: griffe.Module, **kwargs) -> None:
        public = public_paths(pkg)
        for path in public:
            if (x := found_at(pkg, path)) is not None and x.docstring:
                x.docstring.value = with_own_entries(x)
        told = [x for path in public if (x := found_at(pkg, path)) is not None and x.docstring]
        same = {x: with_same_arguments(x) for x in told if SAME.search(x.docstring.value)}
        for x, text in same.items():  # when all have been read
            x.docstring.value = text
        modules = (pkg["losses"], *pkg["losses"].modules.values())
        classes = [x for module in modules for x in module.classes.values() if not x.is_alias]
        losses = [x for x in classes if "dataclass" in x.labels and x.docstring]
        explained = {x.path: entries_of(x.docstring.value) for x in losses}
        names = public | {EVERY_LOSS: EVERY_LOSS}
        for loss in losses:
            if loss.path in names and loss.path != EVERY_LOSS:
                loss.docstring.value = with_options(loss, names, explained)
        for path, name in public.items():
            if (x := found_at(pkg, path)) is not None and x.docstring:
                package, _, own = name.rpartition(".")
                line = f"```python\nfrom {package} import {own}\n```"
                x.docstring.value = f"{line}\n\n{x.docstring.value}"


def public_paths(pkg: griffe.Module) -> dict[str, str]:
    """Where each public object is defined -> the name that users import."""
    paths = {}
    for package, later in PACKAGES.items():
        module = pkg[package] if package else pkg
        for name in module.exports or ():
            member = module.members.get(name)
            if member is not None and member.is_module:  # griffe has it in the place of its namesake
                member = member.members.get(name)
            if member is not None:
                home = member.final_target.path if member.is_alias else member.path
                paths.setdefault(home, f"{module.path}.{name}")
        for name, home in ast.literal_eval(str(module[later].value)).items() if later else ():
            home = f"{module.path}{home}" if home.startswith(".") else home
            paths.setdefault(f"{home}.{name}", f"{module.path}.{name}")
    return paths


def found_at(pkg: griffe.Module, path: str) -> griffe.Object | None:
    """A class or function of the library, by its whole path."""
    try:
        found = pkg[path.removeprefix(f"{pkg.path}.")]
    except KeyError:
        return None
    return found if found.is_class or found.is_function else None


def entries_of(docstring: str, section: str = "Args") -> dict[str, str]:
    """Argument name -> its text in the section `Args:`."""
    found = next((x for x in SECTION.finditer(f"{docstring}\n") if x[1] == section), None)
    return {name: text.rstrip() for name, text in ENTRY.findall(found[2])} if found else {}


def listed(entries: dict[str, str]) -> str:
    return "".join(f"    {name}: {text}\n" for name, text in entries.items())


def with_own_entries(x: griffe.Object) -> str:
    """The docstring of an object with a name in each entry, and fields as attributes."""
    fields = x.is_class and any(str(base) == "NamedTuple" for base in x.bases)

    def apart(section: re.Match) -> str:
        entries = {}
        if left := ENTRY.sub("", section[2]).strip():
            raise ValueError(f"{x.path}: expected entries `name: text` below {section[1]}:, got {left!r}.")
        for names, text in ENTRY.findall(section[2]):
            first, *others = names.split(", ")
            entries[first] = text.rstrip()
            same = text.rstrip() if section[1] == "Raises" else f"see `{first}`."
            entries |= dict.fromkeys(others, same)
        title = "Attributes" if fields and section[1] == "Args" else section[1]
        return f"{title}:\n{listed(entries)}\n"

    text = SECTION.sub(apart, f"{x.docstring.value}\n")
    return INPUTS.sub(with_inputs, text).rstrip()


def with_inputs(section: re.Match) -> str:
    """`Inputs:` of a docstring as a list."""
    entries = (f"* `{name}`: {' '.join(text.split())}\n" for name, text in ENTRY.findall(section[1]))
    return f"**Inputs:**\n\n{''.join(entries)}\n"


def arguments_of(function: griffe.Function) -> dict[str, str]:
    """Entries of its arguments in their order: its own, else of the functions that it names."""
    text = function.docstring.value
    entries = entries_of(text)
    for others in SAME.findall(text):
        for name in re.findall(r"\w+", others.replace(" and ", "")):  # of two the first, where both have one
            entries = arguments_of(function.parent.members[name]) | entries
    if missing := [x.name for x in function.parameters if x.name not in entries]:
        raise ValueError(f"{function.path}: expected an entry below `Args:` for {missing}, got none; add it.")
    return {x.name: entries[x.name] for x in function.parameters}


def with_same_arguments(function: griffe.Function) -> str:
    """The docstring with a whole table in the place of "Arguments as in ..."."""
    text = SECTION.sub(lambda x: "" if x[1] == "Args" else x[0], f"{function.docstring.value}\n")
    table = f"\n\nArgs:\n{listed(arguments_of(function))}\n"
    return SAME.sub(lambda _: table, text).rstrip()


def options_of(loss: griffe.Class) -> set[str]:
    """Its fields, those of its parents among them."""
    options: set[str] = set()
    for x in (*reversed(loss.mro()), loss):
        for name, attribute in x.members.items():
            # griffe takes a bare ClassVar for the type of a field.
            if "instance-attribute" in attribute.labels and str(attribute.annotation) != "ClassVar":
                options.add(name)
            else:
                options.discard(name)
    return options


def with_options(loss: griffe.Class, public: dict[str, str], explained: dict[str, dict[str, str]]) -> str:
    """The docstring of a loss with all its options: explained, or named with a link."""
    options = options_of(loss)
    own, inherited, above = dict(explained[loss.path]), {}, set()
    for base in loss.mro():
        entries = explained.get(base.path, {})
        fresh = [name for name in entries if name in options and name not in own and name not in above]
        if base.path in public:
            inherited[public[base.path]] = fresh
            above |= set(fresh)
        elif not inherited:
            own |= {name: entries[name] for name in fresh}
        else:  # a parent of a public class, in whose table they stand
            inherited[next(reversed(inherited))] += fresh
            above |= set(fresh)
    if missing := options - own.keys() - above:
        raise ValueError(f"{loss.path}: expected an entry below `Args:` for {missing}, got none; add it.")
    changed = {name: x.value for name, x in loss.members.items() if name in above}
    lines = []
    for name, options in inherited.items():
        title = ANCHORED.get(name, f"`{name.rpartition('.')[2]}`")
        shown = (
            (f"[`{x}`][{name}({x})]" if name in ANCHORED else f"`{x}`")
            + (f" (here `{changed[x]}`)" if x in changed else "")
            for x in options
        )
        lines += [f"* Options of [{title}][{name}]: {', '.join(shown)}."] if options else []
    text = f"{loss.docstring.value}\n"
    table = f"Args:\n{listed(own)}\n" if own else ""
    also = "\n".join(lines) + "\n\n"
    if found := next((x for x in SECTION.finditer(text) if x[1] == "Args"), None):
        return f"{text[: found.start()]}{table}{also}{text[found.end() :]}"
    return f"{text}\n{table}{also}".rstrip()
