"""The table of trainers and options: what the tests say, and what docs/trl_tests.md shows."""

import pytest

from . import coverage

NAMES = {"DPO": None, "SDPO": None, "OnlineDPO": None, "GKD": None}


@pytest.mark.parametrize(
    "words, found",
    [
        ("dpo", ("DPO", "")),
        ("sdpo_heads", ("SDPO", "heads")),
        ("lora_of_online_dpo", ("OnlineDPO", "lora of")),
        ("label_smoothing", (None, "label smoothing")),
    ],
)
def test_trainer_in_a_tests_name(words, found):
    trainer, rest = coverage.split(words.split("_"), NAMES)
    assert (trainer, " ".join(rest)) == found


def assert_same_nothing():
    pass


def through_another():
    assert_same_nothing()


def test_parity_is_seen_through_helpers():
    def direct():
        assert_same_nothing()

    def indirect():
        through_another()

    assert coverage.is_parity(direct) and coverage.is_parity(indirect)
    assert not coverage.is_parity(test_trainer_in_a_tests_name)


def test_the_docs_have_the_table(capsys):
    coverage.main([])
    printed = capsys.readouterr().out.strip()
    for trainer in coverage.trainers():
        assert f"\n| {trainer} | " in printed
    for part in (
        "`loss_type` (",
        "bf16 autocast",
        "lora on the head",
        "ddp with two processes",
        "vision language model",
    ):
        assert part in printed
    page = (coverage.ROOT / "docs" / "trl_tests.md").read_text()
    shown = page.partition("<!-- tests:trl -->\n")[2].partition("\n<!-- /tests:trl -->")[0]
    assert shown == printed, (
        "the table of docs/trl_tests.md is not the tests' any more: python -m tests.trl_integration.coverage "
        "--write"
    )
