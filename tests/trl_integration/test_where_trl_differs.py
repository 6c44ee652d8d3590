"""Models whose own loss TRL's head does not compute: with the flag it is the model's own, as docs/trl.md
shows."""

import pytest

from .where_trl_differs import MODELS, PAGE, row


@pytest.mark.parametrize("name", MODELS)
def test_the_loss_is_the_models_own(name):
    own, trl, ours = row(name)
    assert ours == pytest.approx(own, rel=1e-4)
    assert trl == "AttributeError" or abs(trl - own) > 0.05 * own
    (line,) = [line for line in PAGE.read_text().splitlines() if line.startswith(f"| {name} |")]
    shown = [cell.strip() for cell in line.split("|")[2:5]]
    assert [float(shown[0]), float(shown[2])] == pytest.approx([own, ours], rel=1e-3)
    assert shown[1] == trl if isinstance(trl, str) else float(shown[1]) == pytest.approx(trl, rel=1e-3)
