"""Prompts from files, exact lengths, salts and shared beginnings: what is sent, read back from the requests' bytes."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from servelab.load.datasets import DatasetError, Entry, read, trace
from servelab.load.prompts import prompt
from servelab.load.tokens import Local, TokenizerError, exactly
from servelab.load.workload import PRIMER, Workload


class Halves:
    """A tokenizer with known answers: a word of more than four letters is two tokens, any other one; in front of it
    all one special token (id 0). Cut in the middle of a word, the half stands alone as a word of its own."""

    def __init__(self) -> None:
        self.words: list[str] = [""]

    def encode(self, text: str, special: bool) -> list[int]:
        ids = [0] if special else []
        for word in text.split(" "):
            parts = [word[:4], "+" + word[4:]] if len(word) > 4 and not word.startswith("+") else [word]
            for part in parts:
                if part not in self.words:
                    self.words.append(part)
                ids.append(self.words.index(part))
        return ids

    def decode(self, ids: list[int]) -> str:
        return " ".join(self.words[i] for i in ids if i).replace(" +", "")


def workload(**more: Any) -> Workload:
    return Workload(**({"api": "completions", "seed": 1, "input_tokens": 20, "output_tokens": 5} | more))


def bodies(work: Workload, level: int | str = 2, count: int = 3) -> list[dict[str, Any]]:
    head = "POST /p HTTP/1.1\r\nHost: h:1\r\n"
    found = []
    for raw in islice(work.payloads(level, head, "m"), count):
        top, body = raw.split(b"\r\n\r\n", 1)
        assert top.decode() == f"POST /p HTTP/1.1\r\nHost: h:1\r\nContent-Length: {len(body)}"
        found.append(json.loads(body))
    return found


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_what_each_api_is_asked() -> None:
    text = prompt(1, 2, 1, 20)
    completion = bodies(workload())[1]
    assert (completion["prompt"], completion["max_tokens"], completion["model"]) == (text, 5, "m")
    assert completion["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert bodies(workload(api="chat"))[1]["messages"] == [{"role": "user", "content": text}]
    assert bodies(workload(api="generate"))[1] == {
        "text": text,
        "sampling_params": {"temperature": 0, "max_new_tokens": 5, "ignore_eos": True},
        "stream": True,
    }
    assert "return_spec_tokens_details" not in completion
    assert bodies(workload(spec_details=True))[0]["return_spec_tokens_details"] is True


def test_natural_lengths() -> None:
    natural = workload(ignore_eos=False)
    assert bodies(natural)[0]["ignore_eos"] is False
    assert (natural.expected(0), workload().expected(0)) == (None, 5)


def test_random_token_ids_are_in_their_range_and_the_same_for_every_mode() -> None:
    work = workload(api="generate", form="ids", token_range=(100, 200))
    first, second, _ = (body["input_ids"] for body in bodies(work))
    assert len(first) == 20
    assert all(100 <= token < 200 for token in first + second)
    assert first != second
    assert first == bodies(work)[0]["input_ids"]


@pytest.mark.parametrize("count", [12, 19, 20, 21, 33])
def test_exact_lengths_with_a_tokenizer(count: int) -> None:
    tokenizer = Halves()
    for body in bodies(workload(input_tokens=count, tokenizer=tokenizer)):
        assert len(tokenizer.encode(body["prompt"], True)) == count  # as a server counts it, the special token included
    for body in bodies(workload(input_tokens=count, tokenizer=tokenizer, api="chat")):
        assert len(tokenizer.encode(body["messages"][0]["content"], False)) == count  # the template comes on top
    for body in bodies(workload(input_tokens=count, tokenizer=tokenizer, form="ids")):
        assert (len(body["prompt"]), body["prompt"][0]) == (count, 0)


def test_a_cut_inside_a_word_is_made_good_and_the_impossible_is_said() -> None:
    tokenizer = Halves()
    # one special token, two for each word: no text of these has four, but one cut in a word has
    assert exactly("abcdefgh ijklmnop", 4, tokenizer, True) == "abcdefgh ijkl"
    with pytest.raises(TokenizerError, match="exactly 9 tokens"):
        exactly("abcdefgh ijklmnop", 9, tokenizer, True)


def test_a_real_tokenizer(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: number for number, word in enumerate(["<unk>", "one", "two", "three"])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    local = Local(tmp_path)
    assert local.encode("one three two", True) == [1, 3, 2]
    assert exactly("one two three two", 3, local, True) == "one two three"


def test_no_tokenizer_there(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"there is no .*tokenizer.json"):
        Local(tmp_path)


def test_every_form_of_an_entry(tmp_path: Path) -> None:
    path = write(
        tmp_path / "d.jsonl",
        {"prompt": "hello", "output_tokens": 7},
        "",
        {"input_ids": [1, 2, 3], "max_tokens": 8},
        {"prompt": [4, 5]},
        {"messages": [{"role": "user", "content": "hi"}]},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "one two three"}]},
        {"conversations": [{"from": "gpt", "value": "never mind"}]},  # passed over
        {"timestamp": 1500, "input_length": 30, "output_length": 9},
    )
    assert read(path, lambda text: len(text.split())) == [
        Entry("hello", None, 7, None),
        Entry([1, 2, 3], None, 8, None),
        Entry([4, 5], None, None, None),
        Entry([{"role": "user", "content": "hi"}], None, None, None),
        Entry("q", None, 3, None),
        Entry(None, 30, 9, 1.5),
    ]
    share = tmp_path / "share.json"
    share.write_text(json.dumps([{"id": "x", "conversations": [{"from": "human", "value": "q"}, {"value": "a"}]}]))
    assert read(share) == [Entry("q", None, None, None)]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "d.jsonl:2 is no JSON"),
        ("[1]", "d.jsonl:2 is list, not an object"),
        ({"output_tokens": 3}, "d.jsonl:2 has neither"),
        ({"prompt": ""}, "d.jsonl:2: prompt is neither a text nor a list of token ids"),
        ({"prompt": [1, "x"]}, "neither a text nor a list of token ids"),
        ({"messages": ["hi"]}, "d.jsonl:2: messages is not a list of messages"),
        ({"prompt": "x", "max_tokens": 0}, "d.jsonl:2: max_tokens is 0, not a whole number above 0"),
        ({"prompt": "x", "t": -1}, "d.jsonl:2: t is -1, not a time"),
    ],
)
def test_what_is_no_entry_is_named_with_its_line(tmp_path: Path, line: Any, words: str) -> None:
    with pytest.raises(DatasetError) as caught:
        read(write(tmp_path / "d.jsonl", {"prompt": "fine"}, line))
    assert words in str(caught.value)


def test_a_file_without_prompts(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="holds no prompt"):
        read(write(tmp_path / "d.jsonl", ""))
    with pytest.raises(DatasetError, match="cannot be read"):
        read(tmp_path / "none")


def test_a_trace_starts_at_0_and_can_be_replayed_faster() -> None:
    entries = [Entry("x", None, None, time) for time in (10.0, 10.5, 14.0)]
    assert trace(Path("f"), entries, 1) == [0, 0.5, 4]
    assert trace(Path("f"), entries, 2) == [0, 0.25, 2]
    with pytest.raises(DatasetError, match="entry 2 has neither t"):
        trace(Path("f"), [entries[0], Entry("x", None, None, None)], 1)
    with pytest.raises(DatasetError, match="entry 2 is due before the one above it"):
        trace(Path("f"), [entries[1], entries[0]], 1)


ENTRIES = [Entry(f"prompt {number}", None, number + 1, None) for number in range(10)]


def test_entries_come_in_the_seeds_order_each_once_before_any_comes_again() -> None:
    texts = [body["prompt"] for body in bodies(workload(entries=ENTRIES, salt="none"), count=20)]
    assert sorted(texts[:10]) == sorted(texts[10:]) == [f"prompt {number}" for number in range(10)]
    assert texts[:10] != texts[10:]
    assert texts == [body["prompt"] for body in bodies(workload(entries=ENTRIES, salt="none"), level=7, count=20)]
    other = [body["prompt"] for body in bodies(workload(entries=ENTRIES, salt="none", seed=2), count=20)]
    assert texts != other
    in_order = bodies(workload(entries=ENTRIES, salt="none", in_order=True), count=3)
    assert [(body["prompt"], body["max_tokens"]) for body in in_order] == [
        ("prompt 0", 1),
        ("prompt 1", 2),
        ("prompt 2", 3),
    ]
    assert workload(entries=ENTRIES, in_order=True).expected(2) == 3


def test_salts() -> None:
    chat = [Entry([{"role": "system", "content": "be kind"}, {"role": "user", "content": "q"}], None, None, None)]
    salted = bodies(workload(entries=ENTRIES[:1], salt="text"), count=2)
    assert all(body["prompt"].endswith("]\nprompt 0") for body in salted)
    assert salted[0]["prompt"] != salted[1]["prompt"]
    first = bodies(workload(entries=chat, api="chat", salt="text"), count=1)[0]["messages"]
    assert first[0]["content"].endswith("]\nbe kind")
    assert first[1]["content"] == "q"
    keyed = bodies(workload(entries=ENTRIES[:1], salt="key"), count=2)
    assert keyed[0]["prompt"] == "prompt 0"
    keys = {body["extra_key"] for level in (1, 2) for body in bodies(workload(entries=ENTRIES, salt="key"), level)}
    assert len(keys) == 6  # none twice, whatever the level
    assert "extra_key" not in bodies(workload(entries=ENTRIES, salt="none"))[0]


@pytest.mark.parametrize("more", [{}, {"form": "ids", "token_range": (5, 50_000)}, {"tokenizer": Halves()}])
def test_a_stated_share_of_each_prompt_is_the_same_in_a_level(more: dict[str, Any]) -> None:
    work = workload(input_tokens=100, cached_share=0.6, salt="key", **more)
    sent = bodies(work)
    texts = [body["prompt"] if isinstance(body["prompt"], list) else body["prompt"].split(" ") for body in sent]
    alike = [next(i for i, (a, b) in enumerate(zip(one, texts[0], strict=False)) if a != b) for one in texts[1:]]
    least = 60 if "tokenizer" not in more else 30  # Halves has up to two tokens a word
    assert all(least - 10 <= count <= 60 for count in alike)  # full stops are no words of their own in a text
    assert len({body["extra_key"] for body in sent}) == 1
    primer = json.loads(work.payload(2, PRIMER, "", "m").split(b"\r\n\r\n", 1)[1])
    assert primer["extra_key"] == sent[0]["extra_key"]
    assert primer["prompt"][:20] == sent[0]["prompt"][:20]
    assert bodies(work, level=3)[0]["prompt"][:20] != sent[0]["prompt"][:20]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"form": "ids", "api": "chat", "token_range": (1, 2)}, "a chat is made of texts"),
        ({"form": "ids"}, "needs --tokenizer, --token-range or --dataset"),
        ({"cached_share": 0.5, "entries": ENTRIES}, "those of a file are what they are"),
        (
            {"api": "chat", "entries": [Entry([1], None, None, None)], "salt": "key"},
            "token ids, which --api chat cannot send",
        ),
        ({"entries": [Entry([{"role": "user"}], None, None, None)]}, "messages, which --api completions cannot send"),
        ({"entries": [Entry([1], None, None, None)], "salt": "text"}, "use --salt key or none"),
    ],
)
def test_what_cannot_be_asked(more: dict[str, Any], words: str) -> None:
    assert [words in problem for problem in workload(**more).problems()] == [True]
