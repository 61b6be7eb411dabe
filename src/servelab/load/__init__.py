"""The load client. Standard library only; imports nothing here, so that the command starts fast.

wire      the hot path: writes requests, reads bytes, stamps them
loop      one level: launches what is due, hands on what ended
arrivals  load shapes: closed loop, Poisson, constant, burst, ramp; when a window opens and closes
clock     whether the system clock was set meanwhile
capture   what the wire recorded of one request, on its way through a file
http      strict HTTP/1.1 framing of recorded bytes, after the level
forms     streams whose events are like others, without taking each apart
rows      a recorded request → one raw row
metrics   rows → the figures of a level
prompts   generated prompts
datasets  prompts and traces from files
tokens    the server's tokenizer, where it is local
workload  the requests of a level
server    everything asked of the server besides load: identity, cache flush, secrets
progress  progress.json and the terminal
session   the levels of one run, from the checks before to summary.json
setup     the words of the command line → what a session needs
command   the command line
recover   rows from what a killed client left
tls       https and proxies, in a socket's place
story     older call forms of it
"""
