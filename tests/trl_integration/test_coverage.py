"""The table of trainers and options in docs/trl_tests.md."""

import logitless.trl_integration as ours

from . import coverage


def test_the_docs_have_the_table():
    assert coverage.ROWS.keys() == set(ours.PAIRS)
    shown = coverage.PAGE.read_text().partition("<!-- tests:trl -->\n")[2]
    assert shown.partition("\n<!-- /tests:trl -->")[0] == coverage.table(), (
        "the table of docs/trl_tests.md is not the tests' any more: python -m tests.trl_integration.coverage "
        "--write"
    )
