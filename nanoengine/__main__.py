"""`python -m nanoengine` is the `nanoengine` command."""

import sys

from nanoengine.cli import main

if __name__ == "__main__":
    sys.exit(main())
