"""What the documents show is what is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvest.cli.explain import parse

ROOT = Path(__file__).parents[1]
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
QUOTED = re.compile(r"<!-- from (\S+) -->\n```\w*\n(.*?)```", re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)#:\s]+)(?:#[^)]*)?\)")
QUOTES = [(page, *found) for page in PAGES for found in QUOTED.findall(page.read_text())]


def test_there_are_quotes():
    assert len(QUOTES) >= 5


@pytest.mark.parametrize(("page", "path", "text"), QUOTES, ids=[f"{p.name}:{path}" for p, path, _ in QUOTES])
def test_a_quoted_piece_of_a_file_is_in_it(page, path, text):
    assert text in (ROOT / path).read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page):
    for target in LINK.findall(page.read_text()):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_policies_in_commands_can_be_read(page):
    for sentence in re.findall(r"--policy +\"?([^\s\"]+/[^\"\n]*?)\"?(?:\s|$)", page.read_text()):
        parse(sentence)
