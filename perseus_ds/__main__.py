"""``python -m perseus_ds`` is ``perseus-ds``."""

import sys

from perseus_ds.cli.main import main

sys.exit(main())
