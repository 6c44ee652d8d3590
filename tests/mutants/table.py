"""What became of the mutants of the old engine: `python -m tests.mutants.table` brings TABLE.md up to date.

Its first two columns are history, the others follow from here. A mutant is kept, whatever function it is in
by now, unless CHANGED says otherwise.
"""

from pathlib import Path

from tests.mutants import MUTANTS

PAGE = Path(__file__).with_name("TABLE.md")
FORMER = 254

# Name -> "replaced by " and the names of others, separated by "; ", or "dropped because " and the reason.
CHANGED: dict[str, str] = {
    "multi-token: upstream gradient dropped": "replaced by upstream gradient skipped",
    "divergence kernel: tail of the student unmasked": "replaced by divergence kernel: tail of rows unmasked",
    "divergence kernel: tail of the teacher unmasked": "replaced by divergence kernel: tail of rows unmasked",
    "parallel: positions count this rank's too": "replaced by parallel: twice the same position",
}


def former() -> dict[str, str]:
    """The former mutants' files by name, from the page."""
    rows = [line.strip("|").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    return {name.strip(): file for name, file, *_ in rows[2:]}


def problems() -> list[str]:
    """What is not so, of what the table says."""
    names, before = {mutant.name for mutant in MUTANTS}, former()
    found = [] if len(before) == FORMER else [f"{PAGE.name}: expected {FORMER} rows, got {len(before)}"]
    found += [f"CHANGED: expected a former mutant, got {name!r}" for name in CHANGED.keys() - before.keys()]
    for name in before:
        state = CHANGED.get(name, "kept")
        if (state == "kept") != (name in names):
            found.append(
                f"{name}: {state}, but {'it still exists' if name in names else 'it does not exist'}"
            )
        if state.startswith("replaced by "):
            others = state.removeprefix("replaced by ").split("; ")
            found += [
                f"{name}: replaced by {other!r}, which does not exist"
                for other in others
                if other not in names
            ]
        elif not state.startswith(("kept", "dropped because ")):
            found.append(f"{name}: expected 'replaced by …' or 'dropped because …', got {state!r}")
    return found


def page() -> str:
    now = {mutant.name: f"{mutant.file}, {mutant.function}" for mutant in MUTANTS}
    rows = [("mutant", "file before", "state", "file and function now"), ("---",) * 4]
    rows += [(name, file, CHANGED.get(name, "kept"), now.get(name, "")) for name, file in former().items()]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return (
        f"# The {FORMER} mutants of the engine before it was rebuilt\n\n"
        "By `python -m tests.mutants.table`, whose `CHANGED` says what is not kept.\n\n"
        f"{table}\n"
    )


if __name__ == "__main__":
    if problems():
        raise SystemExit("\n".join(problems()))
    PAGE.write_text(page())
