"""The Makefile has a rule for every target that it declares and for every one that a page tells
users to make.
"""

import re

from places import ROOT

NAMED = re.compile(r"`make ([a-z]+)[`\s]|^make ([a-z]+(?: [a-z]+)*)", re.MULTILINE)


def test_every_target_that_is_declared_or_named_has_a_rule():
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    rules = set(re.findall(r"^([a-z]+):", text, re.MULTILINE))
    declared = re.search(r"^\.PHONY:(.*)$", text, re.MULTILINE)
    assert declared is not None
    assert set(declared.group(1).split()) == rules

    pages = [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *ROOT.glob("*/README.md"),
        *ROOT.glob("docs/*.md"),
        ROOT / "papers/zoo/README.md",
    ]
    named = {
        word
        for page in pages
        for one, several in NAMED.findall(
            re.sub(r"\s+#.*$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
        )
        for word in (one or several).split()
    }
    assert {"analyze", "test", "figures", "zoo", "docs", "bench"} <= named
    assert named <= rules, f"named in a page, but no rule: {sorted(named - rules)}"
