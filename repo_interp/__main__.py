"""`python -m repo_interp` is `repo-interp`."""

import sys

from repo_interp.cli import main

sys.exit(main())
