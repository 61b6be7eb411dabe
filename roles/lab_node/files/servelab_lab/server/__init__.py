"""A double of the SGLang server: its flags, logs, processes and answers; its rates come from a stated cost model."""
