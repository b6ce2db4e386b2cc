"""For whoever changes the code: whether the commands give what they gave before (`outputs`). What they cost: `repo-interp bench`."""
