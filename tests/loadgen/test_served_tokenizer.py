"""Token-exact prompts from an engine's `/tokenize` alone, and what is said where that can't be."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest

from prefixwatch.documents import parse
from prefixwatch.documents.errors import InputError
from prefixwatch.kvcache.prompts.tokenizer import Tokenizer
from prefixwatch.kvcache.prompts.words import words
from prefixwatch.loadgen.plan.planner import make_plan
from prefixwatch.loadgen.plan.prompts import PromptError, PromptWriter
from prefixwatch.loadgen.scenario.model import Scenario
from prefixwatch.loadgen.sending.load_run import writer_for
from prefixwatch.loadgen.sending.run_config import RunConfig
from prefixwatch.loadgen.sending.served_tokenizer import ServedTokenizer, _doubled_tokens
from tests.loadgen.conftest import Connection, FakeServer

Serve = Callable[[Callable[[Connection, bytes], None]], FakeServer]

SCENARIO = """\
name: served
duration_seconds: 10
arrivals: {rate_per_second: 4}
groups: {count: 3, shared_tokens: {min: 40, max: 90}, unique_tokens: {min: 5, max: 30}, output_tokens: 4}
tools: {count: 2, tokens: 20, sent_as: field}
sessions: {turns: {1: 1, 3: 1}, think_seconds: 1}
"""


def engine(tokenizer: Tokenizer, *, chats: bool = True) -> Callable[[Connection, bytes], None]:
    """`/tokenize` as vLLM has it; without chats, as older SGLang."""

    def script(server: Connection, sent: bytes) -> None:
        head, _, body = sent.partition(b"\r\n\r\n")
        asked = json.loads(body)
        if not head.startswith(b"POST /tokenize "):
            server.answer("404 Not Found", {"detail": "Not Found"})
        elif "messages" in asked and not chats:
            server.answer("400 Bad Request", {"message": "prompt: Field required"})
        else:
            tokens = (
                tokenizer.encode_chat(asked["messages"], tools=asked.get("tools"))
                if "messages" in asked
                else tokenizer.encode(asked["prompt"], add_special_tokens=asked["add_special_tokens"])
            )
            server.answer("200 OK", {"count": len(tokens), "max_model_len": 9, "tokens": tokens.tolist()})

    return script


def test_prompts_of_a_served_tokenizer_are_as_exact_as_those_of_its_folder(serve: Serve, tokenizer: Tokenizer) -> None:
    """Nothing but the alphabet and the shapes of conversations is asked."""
    served = ServedTokenizer(serve(engine(tokenizer)).url, "tiny")
    writer = PromptWriter(served)
    asked_for_words = served.questions
    plan = make_plan(parse(SCENARIO, Scenario, name="s.yaml"), writer, seed=1, nonce="n", model="tiny")
    assert len(plan.requests) > 20
    for request in plan.requests:
        assert request.prompt_tokens == len(tokenizer.encode_chat(request.messages, tools=request.tools))
    assert sum(request.shared_tokens for request in plan.requests) > 0
    assert len(writer.alphabet.ids) > 1000
    assert asked_for_words <= 2 + len(words()) // 256 + 2 + 2
    assert served.questions - asked_for_words <= 6  # a shape and a check for each of three lengths


def test_an_address_with_v1_and_an_api_key_are_understood(serve: Serve, tokenizer: Tokenizer) -> None:
    server = serve(engine(tokenizer))
    assert ServedTokenizer(f"{server.url}/v1", "m", headers={"authorization": "Bearer k"}).encode(" the").tolist()
    assert b"Authorization: Bearer k" in server.requests[0]


def test_a_target_without_tokenize_says_what_to_give(serve: Serve) -> None:
    server = serve(lambda connection, _: connection.answer("404 Not Found", {}))
    with pytest.raises(PromptError, match=r"answers 404: .* give the folder .* as --model-dir, or name an engine"):
        PromptWriter(ServedTokenizer(server.url, "m"))


def test_a_key_that_is_refused_is_named(serve: Serve) -> None:
    server = serve(lambda connection, _: connection.answer("401 Unauthorized", {}))
    with pytest.raises(PromptError, match="answers 401: name the variable that holds its API key as --api-key-env"):
        PromptWriter(ServedTokenizer(server.url, "m"))


def test_an_engine_that_takes_no_chats_is_told_apart(serve: Serve, tokenizer: Tokenizer) -> None:
    with pytest.raises(Exception, match=r"refuses a question: .*takes texts but no chats"):
        PromptWriter(ServedTokenizer(serve(engine(tokenizer, chats=False)).url, "m"))


def test_nobody_there_and_nonsense_are_errors_of_input(serve: Serve) -> None:
    server = serve(lambda connection, _: connection.answer("200 OK", {"count": 3}))
    with pytest.raises(PromptError, match="answers without a list of tokens"):
        ServedTokenizer(server.url, "m").encode("x")
    server.close()
    with pytest.raises(PromptError, match=r"can't be asked .*: start the engine first"):
        ServedTokenizer(server.url, "m").encode("x")


def test_more_questions_than_a_run_is_worth_are_not_asked(serve: Serve, tokenizer: Tokenizer) -> None:
    served = ServedTokenizer(serve(engine(tokenizer)).url, "m", max_questions=2)
    for text in (" a", " b", " a"):
        served.encode(text)
    with pytest.raises(PromptError, match="more than 2 questions"):
        served.encode(" c")


@pytest.mark.parametrize(
    ("tokens", "found"),
    [
        ([1, 1, 2, 2, 3, 3], {" a": 1, " b": 2, " c": 3}),
        ([1, 1, 2, 9, 2, 9, 3, 3], {" a": 1, " c": 3}),
        ([1, 1, 2, 2, 3, 3, 4], None),
        ([1, 2, 3], None),
    ],
)
def test_words_of_one_token_are_found_in_a_text_that_says_each_twice(tokens: list[int], found: object) -> None:
    assert _doubled_tokens(["a", "b", "c"], tokens) == found


def test_a_run_takes_the_folder_first_and_generated_answers_need_it(
    serve: Serve, tokenizer: Tokenizer, model_dir: object
) -> None:
    server = serve(engine(tokenizer))
    scenario = parse(SCENARIO, Scenario, name="s.yaml")
    given = {"target": "http://gateway.invalid", "model": "m"}
    writer_for(RunConfig.model_validate({**given, "model_dir": model_dir}), scenario)
    assert not server.requests
    config = RunConfig.model_validate({**given, "tokenize_url": server.url, "headers": {"authorization": "Bearer k9"}})
    writer = writer_for(config, scenario)
    assert not any(b"k9" in request for request in server.requests)
    word = writer.alphabet.draw(4, "k")
    assert np.array_equal(writer.tokens([("user", word)]), tokenizer.encode_chat(writer.messages([("user", word)])))
    generated = parse(SCENARIO.replace("turns:", "answers: generated, turns:"), Scenario, name="s.yaml")
    with pytest.raises(InputError, match="answers: generated needs model_dir"):
        writer_for(config, generated)
