"""What an all-reduce costs on this machine, per way to reduce and size, and what that would do to a model's step.

`worker` is one rank (needs torch), `drive` starts a rank per GPU for each arm, `predict` turns latencies into
milliseconds per step, `command` is `servelab collectives`. Everything but `worker` is standard library only.
"""
