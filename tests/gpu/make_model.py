#!/usr/bin/env python3
"""A 0.9B Llama whose greedy answer is a known chain of tokens, and an EAGLE-3 draft that knows a part of it.

    make_model.py DIRECTORY [--layers N] [--known SHARE] [--device cuda]

DIRECTORY/target: after token t comes successor(t), in closed chains of 8 to 40 tokens; attention and MLP are random
and too weak to turn it. DIRECTORY/draft: one EAGLE-3 layer that knows the successor of SHARE of the tokens, so that
acceptance is real and partial. DIRECTORY/answers.json: prompts and their right answers as token ids, for the gate of
correctness. Nothing is downloaded. Needs torch, safetensors and tokenizers.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

VOCABULARY, HIDDEN, HEADS, KEY_HEADS, HEAD, INNER = 32000, 2048, 16, 8, 128, 5632
SPECIAL = ["<unk>", "<s>", "</s>", "<pad>"]
# The logit of the right token; the largest of the others is near 4.
LOGIT = 14.0


def successors(seed: int = 7) -> np.ndarray:
    """(VOCABULARY,) int: the token that follows each token; only the end of a text leads nowhere but to itself.

    <unk> stands in a chain of words: a prompt of words that the tokenizer does not know has a text for an answer.
    """
    rng = np.random.default_rng(seed)
    follows = np.arange(VOCABULARY)
    ordinary = rng.permutation(np.delete(np.arange(VOCABULARY), SPECIAL.index("</s>")))
    start = 0
    while start < len(ordinary):
        chain = ordinary[start : start + int(rng.integers(8, 41))]
        follows[chain] = np.roll(chain, -1)
        start += len(chain)
    return follows


def answers(follows: np.ndarray, count: int = 16, prompt: int = 32, answer: int = 48) -> list[dict[str, list[int]]]:
    """Prompts of random ordinary tokens; the answer depends on the last of them alone."""
    rng = np.random.default_rng(11)
    cases = []
    for _ in range(count):
        ids = [int(token) for token in rng.integers(len(SPECIAL), VOCABULARY, prompt)]
        said, token = [], ids[-1]
        for _ in range(answer):
            token = int(follows[token])
            said.append(token)
        cases.append({"input_ids": ids, "output_ids": said})
    return cases


def write_tokenizer(directory: Path) -> None:
    """One word per token, split at spaces: the number of tokens of a text is the number of its words."""
    words = SPECIAL + [f"w{number}" for number in range(len(SPECIAL), VOCABULARY)]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in SPECIAL])
    tokenizer.save(str(directory / "tokenizer.json"))
    told = {
        "tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>",
        "pad_token": "<pad>", "add_bos_token": False, "clean_up_tokenization_spaces": False, "model_max_length": 8192,
        "chat_template": "{% for m in messages %}{{ m['content'] }} {% endfor %}",
    }  # fmt: skip
    (directory / "tokenizer_config.json").write_text(json.dumps(told))


class Maker:
    """The weights of target and draft, made from the same directions."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.random = torch.Generator(device=device).manual_seed(1)
        directions = torch.randn(VOCABULARY, HIDDEN, generator=self.random, device=device)
        self.directions = directions / directions.norm(dim=1, keepdim=True) * HIDDEN**0.5
        self.follows = successors()
        # before[follows[t]] = t: the row of the output layer for a token is the direction of the one before it.
        self.before = np.empty_like(self.follows)
        self.before[self.follows] = np.arange(VOCABULARY)

    def noise(self, *shape: int, scale: float) -> torch.Tensor:
        return (torch.randn(*shape, generator=self.random, device=self.device) * scale).to(torch.bfloat16)

    def ones(self) -> torch.Tensor:
        return torch.ones(HIDDEN, dtype=torch.bfloat16, device=self.device)

    def output(self, before: np.ndarray) -> torch.Tensor:
        rows = self.directions[torch.tensor(before, device=self.device)]
        return (rows * (LOGIT / HIDDEN)).to(torch.bfloat16)

    def target(self, layers: int) -> dict[str, torch.Tensor]:
        weights = {
            "model.embed_tokens.weight": self.directions.to(torch.bfloat16),
            "lm_head.weight": self.output(self.before),
            "model.norm.weight": self.ones(),
        }
        for layer in range(layers):
            at = f"model.layers.{layer}."
            weights[at + "self_attn.q_proj.weight"] = self.noise(HEADS * HEAD, HIDDEN, scale=0.02)
            weights[at + "self_attn.k_proj.weight"] = self.noise(KEY_HEADS * HEAD, HIDDEN, scale=0.02)
            weights[at + "self_attn.v_proj.weight"] = self.noise(KEY_HEADS * HEAD, HIDDEN, scale=0.02)
            weights[at + "self_attn.o_proj.weight"] = self.noise(HIDDEN, HEADS * HEAD, scale=0.002)
            weights[at + "mlp.gate_proj.weight"] = self.noise(INNER, HIDDEN, scale=0.02)
            weights[at + "mlp.up_proj.weight"] = self.noise(INNER, HIDDEN, scale=0.02)
            weights[at + "mlp.down_proj.weight"] = self.noise(HIDDEN, INNER, scale=0.001)
            weights[at + "input_layernorm.weight"] = self.ones()
            weights[at + "post_attention_layernorm.weight"] = self.ones()
        return weights

    def draft(self, known: float) -> dict[str, torch.Tensor]:
        """One layer. Its value is the current token's direction less 0.6 of the step before, projected and back."""
        width = KEY_HEADS * HEAD
        basis, _ = torch.linalg.qr(torch.randn(HIDDEN, width, generator=self.random, device=self.device))
        project = basis.t().contiguous()
        query = project.view(KEY_HEADS, HEAD, HIDDEN).repeat_interleave(2, 0).reshape(HEADS * HEAD, HIDDEN)
        # Two query heads share a key head and carry the same value; the even one is used.
        back = torch.zeros(HIDDEN, HEADS * HEAD, device=self.device)
        for head in range(KEY_HEADS):
            back[:, 2 * head * HEAD : (2 * head + 1) * HEAD] = project[head * HEAD : (head + 1) * HEAD].t()
        rng = np.random.default_rng(3)
        unknown = rng.random(VOCABULARY) >= known
        before = self.before.copy()
        moved = np.where(unknown[self.before])[0]
        before[moved] = self.before[np.roll(moved, 1)]
        weights = {
            "self_attn.q_proj": torch.cat([query, torch.zeros_like(query)], 1).to(torch.bfloat16),
            "self_attn.k_proj": torch.cat([project, torch.zeros_like(project)], 1).to(torch.bfloat16),
            "self_attn.v_proj": torch.cat([project, -0.6 * project], 1).to(torch.bfloat16),
            "self_attn.o_proj": back.to(torch.bfloat16),
            "mlp.gate_proj": self.noise(INNER, HIDDEN, scale=0.001),
            "mlp.up_proj": self.noise(INNER, HIDDEN, scale=0.001),
            "mlp.down_proj": self.noise(HIDDEN, INNER, scale=0.001),
            "input_layernorm": self.ones(),
            "post_attention_layernorm": self.ones(),
            "hidden_norm": self.ones(),
        }
        named = {f"layers.0.{name}.weight": tensor for name, tensor in weights.items()}
        return named | {
            "norm.weight": self.ones(),
            "fc.weight": self.noise(HIDDEN, 3 * HIDDEN, scale=0.0005),
            "lm_head.weight": self.output(before),
            "embed_tokens.weight": self.directions.to(torch.bfloat16),
        }


def write_model(directory: Path, weights: dict[str, torch.Tensor], **config: object) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.contiguous().cpu() for name, tensor in weights.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    common = {
        "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INNER, "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_HEADS, "head_dim": HEAD, "vocab_size": VOCABULARY, "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3, "attention_bias": False,
        "mlp_bias": False,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(common | config, indent=1))
    generation = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3, "do_sample": False}
    (directory / "generation_config.json").write_text(json.dumps(generation))
    write_tokenizer(directory)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a target and a draft whose right answers are known.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--known", type=float, default=0.7, help="share of the tokens that the draft knows")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    maker = Maker(options.device)
    write_model(
        options.directory / "target", maker.target(options.layers),
        architectures=["LlamaForCausalLM"], num_hidden_layers=options.layers,
    )  # fmt: skip
    write_model(
        options.directory / "draft", maker.draft(options.known),
        architectures=["LlamaForCausalLMEagle3"], num_hidden_layers=1, draft_vocab_size=VOCABULARY,
    )  # fmt: skip
    (options.directory / "answers.json").write_text(json.dumps(answers(maker.follows)))


if __name__ == "__main__":
    main()
