"""The command."""

import sys

from mxfp8_moe.selftest.checks import main

sys.exit(main())
