"""`python -m decode_service`"""

import sys

from decode_service.main import main

if __name__ == "__main__":
    sys.exit(main())
