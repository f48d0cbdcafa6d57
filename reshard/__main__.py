"""``python -m reshard`` runs the command ``reshard``."""

from __future__ import annotations

import sys

from reshard.cli.main import main

sys.exit(main())
