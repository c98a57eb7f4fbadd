"""What `python -c CODE ARGUMENTS...` does, for a server to fork: child.py CODE ARGUMENTS..."""

import sys

if __name__ == "__main__":
    code = sys.argv.pop(1)
    sys.argv[0] = "-c"
    exec(code)
