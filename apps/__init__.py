"""Programs that use lingua. Each folder is one app; copy one to start another."""

import signal
import sys

if sys.argv[0] == "-m":
    # Started as `python -m apps...`: until lingua.args.cli takes over, which importing torch delays by seconds,
    # Ctrl-C just ends the process instead of printing where in the imports it was.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
