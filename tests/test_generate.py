"""Text made with a cache is the text that full forwards make, token by token, until something ends it."""

from itertools import islice
from typing import Any

import pytest
import torch

from brigata.model.decoder import Decoder
from brigata.model.generate import generate, generate_cached
from test_decoder import FAMILIES, decoder

PROMPT = [5, 17, 3]


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest) -> Decoder:
    return decoder(str(request.param))


@torch.no_grad()
def test_greedy_text_is_that_of_full_forwards(model: Decoder) -> None:
    expected, model = list(PROMPT), model.eval()
    for _ in range(10):
        expected.append(int(model(torch.tensor([expected]))[-1].argmax()))
    assert list(generate_cached(model, PROMPT, 10)) == expected[3:]


def test_sampled_text_follows_the_seed(model: Decoder) -> None:
    def sample(seed: int) -> list[int]:
        return list(generate_cached(model, PROMPT, 13, temperature=1.5, seed=seed))

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)


def test_the_windowed_and_the_cached_way_agree_where_one_token_has_all_probability() -> None:
    llama = decoder("llama").eval()
    windowed = generate(lambda tokens: llama(tokens), PROMPT, 8, 16, 0, temperature=1e-6)
    assert windowed[3:] == list(generate_cached(llama, PROMPT, 8))


def test_tokens_are_drawn_as_often_as_the_model_says_and_from_the_nucleus_only() -> None:
    llama = decoder("llama").eval()
    with torch.no_grad():
        probability = (llama(torch.tensor([PROMPT]))[-1] / 0.5).softmax(-1)
    likeliest, order = probability.sort(descending=True)
    nucleus = int((likeliest.cumsum(-1) < 0.6).sum()) + 1
    expected = torch.zeros(61, dtype=torch.float64)
    expected[order[:nucleus]] = likeliest[:nucleus] / likeliest[:nucleus].sum()
    drawn = torch.zeros(61, dtype=torch.float64)
    draws = 300
    for seed in range(draws):
        drawn[next(generate_cached(llama, PROMPT, 1, temperature=0.5, top_p=0.6, seed=seed))] += 1
    assert 1 < nucleus < 61
    assert not drawn[expected == 0].any()
    assert ((drawn / draws - expected).abs() < 5 * (expected * (1 - expected) / draws).sqrt() + 1e-9).all()


def test_text_ends_before_a_stop_token() -> None:
    text = list(generate_cached(decoder("llama"), PROMPT, 12))
    stop = text[4]
    assert list(generate_cached(decoder("llama"), PROMPT, 12, stop={stop})) == text[: text.index(stop)]


def test_tokens_arrive_as_they_are_made_and_the_mode_is_left_alone() -> None:
    llama, calls = decoder("llama").train(), []
    llama.embed.register_forward_hook(lambda module, inputs, output: calls.append(llama.training))
    stream = generate_cached(llama, PROMPT, 1000)
    assert len(list(islice(stream, 3))) == 3
    assert calls == [False] * 3
    assert llama.training


def test_nothing_is_made_where_nothing_is_asked_for() -> None:
    assert list(generate_cached(decoder("llama"), PROMPT, 0)) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompt": []}, "the prompt has no tokens"),
        ({"length": -1}, "length = -1"),
        ({"temperature": -0.5}, "temperature = -0.5 is below 0"),
        ({"top_p": 0.0}, "top_p = 0.0"),
        ({"top_p": 1.5}, "top_p = 1.5"),
        ({"length": 15}, "model.max_positions = 16; use a length of 14 or less"),
    ],
)
def test_a_request_that_cannot_be_met_is_refused_at_once(changes: dict[str, Any], words: str) -> None:
    request: dict[str, Any] = {"prompt": PROMPT, "length": 4} | changes
    with pytest.raises(ValueError, match=words):
        generate_cached(decoder("gpt2"), request.pop("prompt"), request.pop("length"), **request)


def test_a_learned_table_may_be_used_to_its_end() -> None:
    assert len(list(generate_cached(decoder("gpt2"), PROMPT, 14))) == 14
