"""Is what a server says what the baseline says? Greedy answers to fixed prompts, compared token by token.

Pure: answers go in, a verdict comes out. A *pass* is one answer per prompt; every start of a server gives two, the
prompts one after the other and all at once, because the size of a batch changes the order of the sums and with it what
rounding does. Passes of the baseline's own starts, compared with each other (A/A), say how much may differ.

At every place up to and with the first token that differs both servers have seen the same text, so the chances that
they give there (log-probabilities of the likeliest tokens) can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations, product
from statistics import fmean, median
from typing import Any

SCHEMA = "servelab.correctness/1"
TOKENS = 24
TOP = 10
KEPT_STARTS = 5

PROMPTS = (
    "The capital of France is",
    "List the first ten prime numbers, separated by commas: 2, 3, 5,",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a small village by the sea, there lived",
    "Water boils at a temperature of",
    '{"name": "Alice", "age": 30, "city":',
    "The three laws of motion were formulated by",
    "Translate to German: The weather is nice today. ->",
)

# What rounding one bf16 logit does: its last place is 2^-8 of it, and logits that decide are about 16.
LOGIT_STEP = 16 * 2.0**-8
# Two distributions whose logits differ by one such step are about half its square apart.
KL_STEP = LOGIT_STEP**2 / 2
# A few restarts do not show the widest difference that there is; this much more than the widest seen is still the same.
MARGIN = 3
# Below these a server is not a language model at all, whatever the baseline said: a greedy token of one chance in 150,
# distributions a whole nat apart, fewer than half of the tokens the same and no near tie that explains it.
SURE = -5.0
GROSS_KL = 1.0
GROSS_MATCH = 0.5


@dataclass(frozen=True)
class Answer:
    """One greedy answer. `logprobs` and `top` are empty where the server gives none; `top`: id → log-probability."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    top: tuple[Mapping[int, float], ...] = ()
    text: str = ""


Pass = Sequence[Answer]


@dataclass(frozen=True)
class Difference:
    """Between two passes. `match`: mean share of leading tokens that are the same; `kl`: mean over the places that can
    be compared, in nats (None: nothing was given); `shift`: the largest change of a token's log-probability there;
    `unexplained`: answers that part where the first of the two clearly preferred its own token."""

    match: float
    kl: float | None
    shift: float
    unexplained: int


@dataclass(frozen=True)
class Tolerance:
    """What the baseline's own passes differ by, and what is therefore allowed. `pairs`: how many were compared."""

    pairs: int
    starts: int
    match: float
    kl: float
    shift: float
    unexplained: int


@dataclass(frozen=True)
class Verdict:
    """`status`: verified, unverified or wrong. `figures`: match, kl, tolerance, …, for the run's record."""

    status: str
    reason: str
    figures: dict[str, Any]


def read_answer(body: Any, tokens: int) -> Answer:
    """Take an answer of /generate apart. Raises ValueError with a sentence part where it is none."""
    if not isinstance(body, Mapping) or not isinstance(body.get("meta_info"), Mapping):
        raise ValueError(f"no answer of /generate: {str(body)[:200]}")
    meta, text = body["meta_info"], str(body.get("text") or "")
    if meta.get("completion_tokens") != tokens:
        raise ValueError(f"{meta.get('completion_tokens')} tokens where {tokens} were asked for")
    said = meta.get("output_token_logprobs") or []
    ids = [entry[1] for entry in said] or body.get("output_ids") or []
    if len(ids) != tokens:
        raise ValueError(f"{len(ids)} token numbers where {tokens} were said")
    logprobs = [_number(entry[0]) for entry in said]
    top = [
        {int(entry[1]): _number(entry[0]) for entry in place or []} for place in meta.get("output_top_logprobs") or []
    ]
    # Without logprobs there is nothing to compare by chance; a part of them is worse than none.
    complete = len(logprobs) == tokens and len(top) == tokens and all(top)
    return Answer(tuple(map(int, ids)), tuple(logprobs) if complete else (), tuple(top) if complete else (), text[:300])


def difference(one: Pass, other: Pass, excuse: float) -> Difference:
    """Compare two passes over the same prompts; `one` is the reference. Where they part is explained when the reference
    gave the other's token a log-probability within `excuse` of its own token's."""
    shares, kls, shifts, unexplained = [], [], [0.0], 0
    for left, right in zip(one, other, strict=True):
        length = min(len(left.ids), len(right.ids))
        same = next((n for n in range(length) if left.ids[n] != right.ids[n]), length)
        shares.append(same / length)
        if same < length:
            unexplained += not _near_tie(left, right.ids[same], same, excuse)
        if not left.top or not right.top:
            continue
        for place in range(min(same + 1, length)):
            kls.append(_kl(left.top[place], right.top[place]))
        shifts += [abs(left.logprobs[place] - right.logprobs[place]) for place in range(same)]
    return Difference(fmean(shares), fmean(kls) if kls else None, max(shifts), unexplained)


def tolerance(starts: Sequence[Sequence[Pass]]) -> Tolerance | None:
    """What the recorded starts of the baseline differ by among themselves; None with fewer than two of them."""
    if len(starts) < 2:
        return None
    pairs = [pair for one, other in combinations(starts, 2) for pair in product(one, other)]
    pairs += [pair for start in starts for pair in combinations(start, 2)]
    shift = max(difference(one, other, math.inf).shift for one, other in pairs)
    seen = [difference(one, other, excuse_of(shift)) for one, other in pairs]
    kls = [entry.kl for entry in seen if entry.kl is not None]
    return Tolerance(
        pairs=len(pairs),
        starts=len(starts),
        match=min(entry.match for entry in seen),
        kl=MARGIN * max([KL_STEP, *kls]),
        shift=shift,
        unexplained=max(entry.unexplained for entry in seen),
    )


def excuse_of(shift: float) -> float:
    """Two tokens may change places when each may move by what one was seen to move by, or by one logit's rounding."""
    return 2 * MARGIN * max(LOGIT_STEP, shift)


def judge(
    passes: Sequence[Pass], recorded: Sequence[Sequence[Pass]], known: Sequence[str] = (), *, baseline: bool = False
) -> Verdict:
    """Judge a server's passes against the recorded starts of the baseline.

    `known`: sentences about known answers that it got wrong. `baseline`: it is one more start of the baseline, which
    widens what may differ instead of being held against it, unless it is grossly different.
    """
    if broken := gross_problem(passes):
        return Verdict("wrong", f"Wrong output: {broken}.", {})
    if known:
        return Verdict("wrong", f"Wrong output: {known[0]}", {"known_answers_wrong": len(known)})
    if not recorded:
        what = "This is the first recorded start" if baseline else "No start is recorded"
        reason = f"{what} of the baseline on this model and stack, so only gross errors were looked for."
        return Verdict("unverified", reason, {})
    allowed = tolerance([*recorded, passes] if baseline else recorded)
    excuse = excuse_of(allowed.shift if allowed else 0.0)
    seen = [difference(one, other, excuse) for start in recorded for one in start for other in passes]
    match = median(entry.match for entry in seen)
    kls = [entry.kl for entry in seen if entry.kl is not None]
    kl = median(kls) if kls else None
    unexplained = int(median(entry.unexplained for entry in seen))
    figures: dict[str, Any] = {
        "match": round(match, 4),
        "kl": None if kl is None else round(kl, 6),
        "unexplained": unexplained,
        "prompts": len(passes[0]),
        "tokens": len(passes[0][0].ids),
        "starts_recorded": len(recorded),
        "tolerance": None if allowed is None else {key: _rounded(value) for key, value in asdict(allowed).items()},
    }
    said = f"{match:.0%} of the tokens as the baseline's, KL {'unknown' if kl is None else format(kl, '.2g')} nats"
    if (kl is not None and kl > GROSS_KL) or (match < GROSS_MATCH and unexplained > len(passes[0]) / 2):
        return Verdict("wrong", f"Wrong output: {said}; that is another model's answer.", figures)
    if allowed is None:
        reason = f"{said}; one start of the baseline is recorded, and it takes two to know what may differ."
        return Verdict("unverified", reason, figures)
    if not baseline and ((kl is not None and kl > allowed.kl) or unexplained > allowed.unexplained):
        reason = (
            f"Wrong output: {said}, and {unexplained} answers part without a near tie; {allowed.starts} starts of the "
            f"baseline allow KL {allowed.kl:.2g} and {allowed.unexplained} such answers."
        )
        return Verdict("wrong", reason, figures)
    return Verdict("verified", f"{said}; {allowed.starts} starts of the baseline allow KL {allowed.kl:.2g}.", figures)


def gross_problem(passes: Sequence[Pass]) -> str | None:
    """What shows without any record that these are no answers of a language model, as a sentence part."""
    answers = [answer for each in passes for answer in each]
    if all(len(set(answer.ids)) == 1 for answer in answers):
        return f"every answer is one token repeated ({answers[0].text[:12]!r})"
    logprobs = [chance for answer in answers for chance in answer.logprobs]
    if any(not math.isfinite(chance) for chance in logprobs):
        return "some log-probabilities are not numbers"
    if logprobs and fmean(logprobs) < SURE:
        return f"the likeliest tokens' mean log-probability is {fmean(logprobs):.1f}: the model is sure of nothing"
    for one, other in combinations(passes, 2):
        seen = difference(one, other, excuse_of(0.0))
        if (seen.kl or 0.0) > GROSS_KL or (seen.match < GROSS_MATCH and seen.unexplained > len(one) / 2):
            return f"it does not agree with itself ({seen.match:.0%} of the tokens the same when asked again)"
    return None


def known_problems(asked: Sequence[Mapping[str, Any]], said: Sequence[Answer]) -> list[str]:
    """A sentence for each known answer (`input_ids` → `output_ids`) that came out otherwise."""
    problems = []
    for number, (entry, answer) in enumerate(zip(asked, said, strict=True), 1):
        right = [int(token) for token in entry["output_ids"]]
        wrong = next((n for n, (a, b) in enumerate(zip(right, answer.ids, strict=False)) if a != b), None)
        if wrong is not None:
            problems.append(
                f"known answer {number} of {len(asked)} is wrong from token {wrong} on "
                f"({answer.ids[wrong]} instead of {right[wrong]})."
            )
    return problems


def to_json(each: Pass) -> list[dict[str, Any]]:
    """A pass as the record keeps it."""
    return [
        {"ids": list(a.ids), "logprobs": list(a.logprobs), "top": [[[i, p] for i, p in t.items()] for t in a.top]}
        for a in each
    ]


def from_json(data: Sequence[Mapping[str, Any]]) -> list[Answer]:
    """The reverse of `to_json`."""
    return [
        Answer(tuple(d["ids"]), tuple(d["logprobs"]), tuple({int(i): float(p) for i, p in t} for t in d["top"]))
        for d in data
    ]


def _near_tie(left: Answer, token: int, place: int, excuse: float) -> bool:
    if not left.top:
        return False
    chances = left.top[place]
    return token in chances and chances.get(left.ids[place], left.logprobs[place]) - chances[token] <= excuse


def _kl(left: Mapping[int, float], right: Mapping[int, float]) -> float:
    """Kullback-Leibler divergence of `right` from `left` in nats, at least: a token that `right` does not list may be
    as likely as the last one that it lists, and the rest of `right` may be where the rest of `left` is."""
    least = min(right.values())
    total = sum(math.exp(chance) * (chance - right.get(token, least)) for token, chance in left.items())
    rest = 1 - sum(map(math.exp, left.values()))
    rest_right = 1 - sum(math.exp(right[token]) for token in left if token in right)
    if rest > 0 and rest_right > 0:
        total += rest * math.log(rest / rest_right)
    return max(total, 0.0)


def _number(value: Any) -> float:
    """JSON has no NaN: servers write null."""
    return math.nan if value is None else float(value)


def _rounded(value: float) -> float:
    return value if isinstance(value, int) else round(value, 6)
