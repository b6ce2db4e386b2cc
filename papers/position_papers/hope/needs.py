"""What the experiments on rotary components need: a checkpoint with RoPE in every layer (HoPE sec. 3)."""

from __future__ import annotations

from position_papers.hope.analysed import has_rope_alone
from position_papers.kit.experiment import Needs, each

NEEDS_ROPE = Needs(each(has_rope_alone), "no checkpoint with RoPE in every layer was given", ("language/rope",), "rope")
