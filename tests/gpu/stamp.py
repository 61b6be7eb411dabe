#!/usr/bin/env python3
"""Put the time before each line that comes in."""

import sys
import time

for line in sys.stdin:
    print(time.strftime("%H:%M:%S"), line, end="", flush=True)
