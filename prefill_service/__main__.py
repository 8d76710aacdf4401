"""`python -m prefill_service`"""

import sys

from prefill_service.main import main

if __name__ == "__main__":
    sys.exit(main())
