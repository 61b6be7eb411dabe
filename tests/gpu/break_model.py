#!/usr/bin/env python3
"""A copy of a model that answers wrongly, as a server with wrong sums would: rows of its output layer are exchanged.

    break_model.py MODEL COPY [--share 0.1]

COPY answers as fluently as MODEL, and with SHARE of its tokens something else. Needs torch and safetensors.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def main() -> None:
    parser = argparse.ArgumentParser(description="Copy a model that answers wrongly.")
    parser.add_argument("model", type=Path)
    parser.add_argument("copy", type=Path)
    parser.add_argument("--share", type=float, default=0.1, help="of the tokens (default %(default)s)")
    options = parser.parse_args()
    shutil.copytree(options.model, options.copy)
    (file,) = options.copy.glob("*.safetensors")
    weights = load_file(file)
    rows = weights["lm_head.weight"]
    chosen = torch.randperm(len(rows), generator=torch.Generator().manual_seed(5))[: int(len(rows) * options.share)]
    rows[chosen] = rows[chosen.roll(1)]
    save_file(weights, file, metadata={"format": "pt"})


if __name__ == "__main__":
    main()
