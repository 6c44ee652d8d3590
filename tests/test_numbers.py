"""The numbers in the sentences of README.md and docs are those of the committed results."""

import pytest

from benchmarks.pages import numbers
from benchmarks.pages.claims import CLAIMS
from benchmarks.pages.numbers import Claim, Derived, Result


def test_every_number_has_a_source_that_bears_it_out():
    actual = list(numbers.numbers(CLAIMS, numbers.pages()))
    faults = [
        f"{number.page}:{number.line}: {number.printed} in {number.sentence!r}: {number.fault}"
        for number in actual
        if number.fault
    ]
    assert not faults, "\n".join(["run `python -m benchmarks numbers`", *faults])
    assert len(actual) > 60 and {number.page for number in actual} > {"README.md", "docs/benchmarks.md"}


PAGE = (
    "a call takes 41 ms,\nnot 3 to 5% of 1,024 tokens, with torch 2.13, Gemma 2 used\n"
    "```\n7 ms\n```\n`8 ms` [9 ms](10ms)"
)


def found_in(text: str, *claims: Claim) -> list[tuple[str, str | None]]:
    page = numbers.LEFT_OUT.sub(lambda actual: " " * len(actual[0]), text)
    return [(number.printed, number.fault) for number in numbers.numbers(claims, {"page": page})]


def test_numbers_with_a_unit_are_found_and_code_is_left_out():
    assert [printed for printed, _ in found_in(PAGE)] == ["41", "3", "5", "9"]
    assert all("no claim" in fault for _, fault in found_in(PAGE))


def test_a_claim_is_compared_as_it_is_printed():
    measured = Result("ce.json", ("sections", 1, "rows", "logitless", "ms"))
    value = measured.value()
    right = f"{value:.0f}"
    assert found_in(f"takes {right} ms", Claim("page", "takes {} ms", (measured,))) == [(right, None)]
    for wrong in (f"{value - 1:.0f}", f"{value + 0.2:.1f}", f"{value + 0.02:.2f}"):
        ((printed, fault),) = found_in(f"takes {wrong} ms", Claim("page", "takes {} ms", (measured,)))
        assert printed == wrong and fault.startswith("expected 4") and "ce.json" in fault


def test_a_claim_without_its_sentence_or_sources_is_an_error():
    one = Derived("one", lambda: 1.0)
    with pytest.raises(ValueError, match="expected the sentence"):
        found_in("nothing", Claim("page", "takes {} ms", (one,)))
    with pytest.raises(ValueError, match="expected a source for each number, got 1 for 2"):
        found_in("takes 1 ms, 2 GiB", Claim("page", "takes {} ms, {} GiB", (one,)))
