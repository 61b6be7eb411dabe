"""The load client. Standard library only; imports nothing here, so that the command starts fast.

wire      the hot path: writes requests, reads bytes, stamps them
closed    the load shape: keeps C requests in flight, opens and closes the steady window
capture   what the wire recorded of one request, on its way through a file
http      strict HTTP/1.1 framing of recorded bytes, after the level
rows      a recorded request → one raw row
metrics   rows → the figures of a level
prompts   seeded prompts and request bodies
server    everything asked of the server besides load: identity, cache flush, secrets
progress  progress.json and the terminal
session   the levels of one run, from the checks before to summary.json
command   the command line
story     older call forms of it
"""
