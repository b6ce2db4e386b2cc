"""What the package promises when things go wrong, tried: bad inputs, fuzzing, kills, full disks, mutants, other versions of libraries.

    python -m trust [PART ...]        run the parts (all), keep what came of each in trust/results/, and write docs/trust.md from them

A part is a module with `run(given) -> Outcome`. A part that did not run stands in the table as not run.
"""
