"""Our measures, experiments and views, one folder per subject; the core imports none of them."""
