"""A small Llama whose greedy answer is known: after token t comes successor(t), whatever else stands in the prompt.

Each row of the embedding is a random direction, and the row of the output layer for successor(t) is the direction of t.
Attention and MLP are random and too weak to turn it. So a server that computes rightly gives exactly this chain, and
nothing is downloaded. Needs torch, safetensors and tokenizers: run it with a stack's Python.

    make_model.py DIRECTORY            write the model
    make_model.py --expect TOKEN N     print the N tokens that follow TOKEN, as JSON
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

VOCABULARY, HIDDEN, HEADS, KEY_HEADS, HEAD, INNER, LAYERS = 32000, 256, 4, 2, 64, 512, 2
SPECIAL = ["<unk>", "<s>", "</s>", "<pad>"]
# The logit of the right token; the largest of the others is near 4.
LOGIT = 14.0


def successors(seed: int = 7) -> list[int]:
    """The token that follows each token: closed chains of 8 to 40 ordinary tokens. Special tokens lead into one."""
    ordinary = list(range(len(SPECIAL), VOCABULARY))
    random.Random(seed).shuffle(ordinary)
    follows = [ordinary[0]] * VOCABULARY
    lengths = random.Random(seed + 1)
    start = 0
    while start < len(ordinary):
        chain = ordinary[start : start + lengths.randint(8, 40)]
        for here, there in zip(chain, chain[1:] + chain[:1], strict=True):
            follows[here] = there
        start += len(chain)
    return follows


def write(directory: Path) -> None:
    """Write weights, configuration and tokenizer as Hugging Face lays them out."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(1)

    def noise(*shape: int, scale: float = 0.02) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(torch.bfloat16)

    embedding = torch.randn(VOCABULARY, HIDDEN, generator=generator)
    embedding = embedding / embedding.norm(dim=1, keepdim=True) * HIDDEN**0.5
    output = torch.zeros(VOCABULARY, HIDDEN)
    # Special tokens share a successor, whose row only its true predecessor may have.
    for token, following in list(enumerate(successors()))[len(SPECIAL) :]:
        output[following] = embedding[token] * (LOGIT / HIDDEN)
    ones = torch.ones(HIDDEN, dtype=torch.bfloat16)
    weights = {
        "model.embed_tokens.weight": embedding.to(torch.bfloat16),
        "lm_head.weight": output.to(torch.bfloat16),
        "model.norm.weight": ones.clone(),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        weights |= {
            prefix + "self_attn.q_proj.weight": noise(HEADS * HEAD, HIDDEN),
            prefix + "self_attn.k_proj.weight": noise(KEY_HEADS * HEAD, HIDDEN),
            prefix + "self_attn.v_proj.weight": noise(KEY_HEADS * HEAD, HIDDEN),
            prefix + "self_attn.o_proj.weight": noise(HIDDEN, HEADS * HEAD, scale=0.002),
            prefix + "mlp.gate_proj.weight": noise(INNER, HIDDEN),
            prefix + "mlp.up_proj.weight": noise(INNER, HIDDEN),
            prefix + "mlp.down_proj.weight": noise(HIDDEN, INNER, scale=0.001),
            prefix + "input_layernorm.weight": ones.clone(),
            prefix + "post_attention_layernorm.weight": ones.clone(),
        }
    directory.mkdir(parents=True, exist_ok=True)
    save_file(weights, str(directory / "model.safetensors"), metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_HEADS,
        "head_dim": HEAD,
        "num_hidden_layers": LAYERS,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 3,
        "attention_bias": False,
        "mlp_bias": False,
    }
    # It is written for its maker alone, and a server runs as another user.
    (directory / "model.safetensors").chmod(0o644)
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    tokenizer(directory)


def tokenizer(directory: Path) -> None:
    """One token for each word: w4, w5, … and the words that the load client's prompts are made of become <unk>."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    vocabulary = {word: number for number, word in enumerate(SPECIAL)}
    vocabulary |= {f"w{number}": number for number in range(len(SPECIAL), VOCABULARY)}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in SPECIAL])
    made.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 8192,
        "chat_template": "{% for m in messages %}{{ m['content'] }} {% endfor %}",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", nargs="?", type=Path)
    parser.add_argument("--expect", nargs=2, type=int, metavar=("TOKEN", "N"))
    args = parser.parse_args()
    if args.expect:
        token, count = args.expect
        follows, chain = successors(), []
        for _ in range(count):
            token = follows[token]
            chain.append(token)
        print(json.dumps(chain))
    elif args.directory:
        write(args.directory)
    else:
        parser.error("name a directory, or --expect TOKEN N")


if __name__ == "__main__":
    main()
