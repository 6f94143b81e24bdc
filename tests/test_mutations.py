"""The list of mutations is in step with the sources; ``python -m tests.mutations`` runs them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.mutations import ROOT, mutations


def test_the_text_of_every_mutation_occurs_once() -> None:
    for mutation in mutations():
        text = (ROOT / mutation.file).read_text(encoding="utf-8")
        assert mutation.applied(text) != text, mutation.name


def test_the_tests_of_every_mutation_exist() -> None:
    for mutation in mutations():
        assert mutation.tests, mutation.name
        for test in mutation.tests:
            file, _, name = test.partition("::")
            assert f"def {name}" in (ROOT / file).read_text(encoding="utf-8"), f"{mutation.name}: {test}"


def test_a_text_that_is_not_there_or_occurs_twice_is_an_error() -> None:
    mutation = mutations()[0]
    text = (ROOT / mutation.file).read_text(encoding="utf-8")
    for wrong in (replace(mutation, old="no such text"), replace(mutation, old="import")):
        with pytest.raises(ValueError, match="expected once"):
            wrong.applied(text)
