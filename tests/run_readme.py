"""Runs README.md's Python blocks with the installed logitless: `python -I tests/run_readme.py NUMBER`.

NUMBER is how many blocks run, from the first; the first needs torch alone. `-I` leaves out the repository.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main(count: int) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    names = {"__name__": "pasted"}
    for number, block in enumerate(blocks[:count], 1):
        exec(compile(block, f"README.md, block {number}", "exec"), names)
    where = Path(sys.modules["logitless"].__file__)
    if where.is_relative_to(ROOT / "logitless"):
        sys.exit(f"logitless: expected the installed one, got {where}; run python -I.")
    print(f"{min(count, len(blocks))} blocks ran with {where}")


if __name__ == "__main__":
    main(int(sys.argv[1]))
