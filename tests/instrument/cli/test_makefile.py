"""The Makefile has a rule for every target that it declares and for every one that a page tells
users to make.
"""

import re

from places import ROOT

NAMED = re.compile(r"`make ([a-z]+)[`\s]|^make ([a-z]+(?: [a-z]+)*)", re.MULTILINE)


def test_every_target_that_is_declared_or_named_has_a_rule():
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    rules = set(re.findall(r"^([a-z]+):", text, re.MULTILINE))
    (declared,) = re.findall(r"^\.PHONY:(.*)$", text, re.MULTILINE)
    assert set(declared.split()) == rules

    pages = [*ROOT.glob("*.md"), *ROOT.glob("*/*.md"), ROOT / "papers/zoo/README.md"]
    lines = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    found = NAMED.findall(re.sub(r"\s+#.*$", "", lines, flags=re.MULTILINE))
    named = {word for one, several in found for word in (one or several).split()}
    assert {"analyze", "test", "figures", "zoo", "docs", "bench"} <= named
    assert named <= rules, f"named in a page, but no rule: {sorted(named - rules)}"
