"""Tools for whoever changes the code. In neither wheel.

    python -m benchmarks.cost [PART ...]          what everything costs: figures/bench
    python -m benchmarks.robustness [PART ...]    robustness tests: docs/trust.md
    python -m benchmarks.outputs store|compare    whether the commands give what they gave before a change

A part is a function with a name. It yields rows, in a process of its own; the rows of all parts are
one table (`running`).
"""

import sys
from pathlib import Path

# processes that are forked, and pages in Chromium
sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
