"`python -m rollpipe` is the command `rollpipe`."

import sys

from .cli.start import main

if __name__ == "__main__":
    sys.exit(main())
