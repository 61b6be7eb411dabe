"""What the simulated model says can be worked out with a pocket calculator and a table of CRC-32 values."""

from __future__ import annotations

from servelab_lab.server.text import Continuation, chat_words, continuation


def test_the_chain_starts_at_the_prompts_checksum() -> None:
    # CRC-32 of "hello" is 0x3610A686; its low 15 bits are 9862.
    # 20021 x 9862 + 12345 = 197459447 = 6025 x 32768 + 32247.
    assert continuation("hello", 2) == " w9862 w32247"


def test_spaces_do_not_matter_but_words_do() -> None:
    assert continuation("hello", 8) == continuation("  hello\n", 8)
    assert continuation("hello", 8) != continuation("hello hello", 8)


def test_no_word_comes_twice_in_a_whole_round() -> None:
    words = continuation("hello", 32768).split()
    assert len(set(words)) == 32768


def test_a_known_question_gets_its_answer_first() -> None:
    assert continuation("The capital of France is", 1) == " Paris"
    assert continuation("colour of the sky?", 2, {"colour of the sky": "deep blue"}) == " deep blue"


def test_where_the_text_ends() -> None:
    # 0x3610A686 mod 192 = 70.
    assert Continuation(["hello"]).natural_length == 134
    assert Continuation(["The", "capital", "of", "France", "is"]).natural_length == 1


def test_chat_words_are_roles_and_contents_and_the_cue() -> None:
    assert chat_words([("system", "be brief"), ("user", "hi")]) == ["system", "be", "brief", "user", "hi", "assistant"]
