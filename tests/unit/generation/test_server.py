"""The completions protocol over HTTP: answers, streams, limits, refusals."""

import asyncio
import json
import threading

import pytest

from neox.errors import GenerationError
from neox.generation.completions_api import parse_request
from neox.generation.request_fields import BadRequest, RequestLimits
from tests.errors import raises_naming
from tests.unit.generation.toy import ToyCodec, ToyModel, hashed, next_letter

pytest.importorskip("starlette", reason="starlette (requirements/requirements-serve.txt) is not installed")
httpx = pytest.importorskip("httpx", reason="httpx, which the tests speak to the server with, is not installed")

from neox.generation.server import GenerationQueue, make_app  # noqa: E402 (after the skips)

CODEC = ToyCodec()


def client(model=None, **limits):
    app = make_app(model or ToyModel(next_letter), CODEC, name="toy", limits=RequestLimits(**limits))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")


def post(body, *, model=None, headers=None, **limits):
    async def call():
        async with client(model, **limits) as http:
            return await http.post("/v1/completions", json=body, headers=headers)

    return asyncio.run(call())


def events(answer):
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_a_completion():
    answer = post({"model": "any", "prompt": "abc", "max_tokens": 3, "temperature": 0})
    assert answer.status_code == 200
    body = answer.json()
    assert body["object"] == "text_completion"
    assert body["choices"] == [{"index": 0, "text": "def", "logprobs": None, "finish_reason": "length"}]
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}


def test_top_p_0_leaves_the_most_probable_token_alone():
    body = {"prompt": "abc", "max_tokens": 3}
    greedy = post({**body, "temperature": 0}, model=ToyModel(hashed)).json()["choices"]
    assert post({**body, "top_p": 0}, model=ToyModel(hashed)).json()["choices"] == greedy


def test_several_prompts_n_echo_and_stop():
    body = {"prompt": ["ab", [24]], "n": 2, "echo": True, "stop": "ef", "temperature": 0, "max_tokens": 9}
    answer = post(body).json()
    choices = answer["choices"]
    assert answer["usage"]["prompt_tokens"] == 3  # each prompt once, as with OpenAI's own server
    assert [(c["index"], c["text"], c["finish_reason"]) for c in choices] == [
        (0, "abcd", "stop"),
        (1, "abcd", "stop"),
        (2, "xyz", "stop"),
        (3, "xyz", "stop"),
    ]


def test_a_stream_gives_the_text_of_a_whole_answer():
    body = {"prompt": ["a", "h"], "max_tokens": 5, "temperature": 1.0, "seed": 4}
    whole = post(body, model=ToyModel(hashed)).json()["choices"]
    answer = post({**body, "stream": True}, model=ToyModel(hashed))
    assert answer.headers["content-type"].startswith("text/event-stream")
    *texts, last = events(answer)
    streamed = ["", ""]
    for event in texts:
        assert event["choices"][0]["finish_reason"] is None
        streamed[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert streamed == [choice["text"] for choice in whole]
    assert [choice["finish_reason"] for choice in last["choices"]] == [choice["finish_reason"] for choice in whole]


def test_a_stream_ends_with_the_counts_of_tokens_where_they_are_asked_for():
    body = {"prompt": "abc", "max_tokens": 3, "temperature": 0, "stream": True}
    *_, last, counts = events(post({**body, "stream_options": {"include_usage": True}}))
    assert last["choices"][0]["finish_reason"] == "length"
    assert counts["choices"] == []
    assert counts["usage"] == {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}
    assert all("usage" not in event for event in events(post({**body, "stream_options": {}})))


def test_the_seed_decides_what_is_drawn():
    body = {"prompt": "a", "max_tokens": 12, "seed": 1}
    one, two = (post(body, model=ToyModel(hashed)).json()["choices"][0]["text"] for _ in range(2))
    other = post({**body, "seed": 2}, model=ToyModel(hashed)).json()["choices"][0]["text"]
    assert one == two != other


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ([], "must be a JSON object"),
        ({"prompt": 3}, "`prompt` must be"),
        ({"prompt": ["a", 3]}, "`prompt` must contain"),
        ({"prompt": []}, "`prompt` must be"),
        ({"prompt": [400]}, "outside 0..26"),
        ({"prompt": "a" * 64}, "context is 64"),
        ({"prompt": "a", "max_tokens": 0}, "`max_tokens` must be an integer from 1 to 1024"),
        ({"prompt": "a", "max_tokens": 2.5}, "`max_tokens` must be an integer"),
        ({"prompt": "a", "temperature": "hot"}, "`temperature` must be a number"),
        ({"prompt": "a", "top_p": True}, "`top_p` must be a number"),
        ({"prompt": "a", "n": 9}, "`n` must be an integer from 1 to 8"),
        ({"prompt": ["a"] * 5, "n": 2}, "more than 8 sequences"),
        ({"prompt": "a", "best_of": 3}, "`best_of`"),
        ({"prompt": "a", "logprobs": 2, "stream": True}, "`logprobs` of a stream"),
        ({"prompt": "a", "logprobs": 21}, "`logprobs` must be an integer from 0 to 20"),
        ({"prompt": [5, -1]}, "`prompt` has token ids outside 0..26"),
        ({"prompt": [2**33]}, "`prompt` has token ids outside 0..26"),
        ({"prompt": [[3], [2**70]]}, "`prompt` has token ids outside 0..26"),
        ({"prompt": "a", "stop_token_ids": [-1]}, "`stop_token_ids` has token ids outside 0..26"),
        ({"prompt": "a", "stop_token_ids": [2**70]}, "`stop_token_ids` has token ids outside 0..26"),
        ({"prompt": "a", "max_tokens": 0}, "`max_tokens` must be an integer from 1"),
        ({"prompt": "a", "max_tokens": 2**70}, "`max_tokens` must be an integer from 1"),
        ({"prompt": "a", "temperature": 10**400}, "`temperature` must be a number"),
        ({"prompt": "a", "seed": 2**70}, "`seed` must be an integer"),
        ({"prompt": "a", "frequency_penalty": 0.5}, "`frequency_penalty` is not supported"),
        ({"prompt": "a", "stop": [""]}, "empty stop string"),
        ({"prompt": "a", "stop": 3}, "`stop` must be"),
        ({"prompt": "a", "seed": -1}, "`seed` must be"),
        ({"prompt": "a", "stream": 1}, "`stream` must be true or false"),
        ({"prompt": "a", "temprature": 1}, "unknown fields: temprature"),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, "requires `stream: true`"),
        ({"prompt": "a", "stream": True, "stream_options": {"x": 1}}, "may contain only `include_usage`"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(body, message):
    answer = post(body)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


def test_neutral_values_of_what_does_not_exist_pass():
    body = {"prompt": "a", "logprobs": None, "presence_penalty": 0, "logit_bias": {}, "best_of": 1, "user": "me"}
    assert parse_request(body, ToyModel(next_letter), CODEC, RequestLimits()).prompts == ((1,),)
    with pytest.raises(BadRequest):
        parse_request({**body, "suffix": "x"}, ToyModel(next_letter), CODEC, RequestLimits())


def test_the_time_limit_ends_a_generation_with_what_there_is():
    choice = post({"prompt": "a", "max_tokens": 20, "temperature": 0}, seconds=0.0).json()["choices"][0]
    assert choice == {"index": 0, "text": "b", "logprobs": None, "finish_reason": "timeout"}


def test_large_and_foreign_requests_are_turned_away():
    assert post({"prompt": "a" * 200}, body_bytes=100).status_code == 413
    assert post({"prompt": "a"}, headers={"content-type": "text/plain"}).status_code == 415
    assert post({"prompt": "a"}, headers={"host": "evil.example"}).status_code == 400


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"[" * 100_000, "not JSON"),
        (b'{"a":' * 50_000, "not JSON"),
        (b'{"prompt": "\\ud800"}', "UTF-16"),
        (b'{"prompt": "a", "\\ud800": 1}', "unknown fields: '\\ud800'"),
        (b"\xff\xfe", "not JSON"),
        (b'{"prompt": "a", "temperature": NaN}', "`temperature`"),
        (b'{"prompt": "a", "max_tokens": 1e400}', "`max_tokens`"),
    ],
)
def test_hostile_bodies_are_refused_and_not_an_error_of_the_server(body, message):
    async def call():
        async with client() as http:
            return await http.post("/v1/completions", content=body, headers={"content-type": "application/json"})

    answer = asyncio.run(call())
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


def test_a_body_that_does_not_come_and_a_sender_that_leaves():
    def answer(*messages, **limits):
        """Speak ASGI by hand: the messages, then silence; return the status of the answer."""
        app = make_app(ToyModel(next_letter), CODEC, name="toy", limits=RequestLimits(**limits))
        left, sent = list(messages), []

        async def receive():
            return left.pop(0) if left else await asyncio.sleep(60)

        async def send(message):
            sent.append(message)

        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers, "query_string": b""}
        asyncio.run(app(scope, receive, send))
        return sent[0]["status"]

    begun = {"type": "http.request", "body": b'{"pro', "more_body": True}
    assert answer(begun, body_seconds=0.05) == 408
    assert answer(begun, {"type": "http.disconnect"}) == 400


def test_nan_is_an_error_of_the_server_and_it_lives_on():
    model = ToyModel(lambda ids: next_letter(ids) * (float("nan") if ids[-1] == 3 else 1))

    async def call():
        async with client(model) as http:
            bad = await http.post("/v1/completions", json={"prompt": "c"})
            streamed = await http.post("/v1/completions", json={"prompt": "c", "stream": True})
            good = await http.post("/v1/completions", json={"prompt": "d", "temperature": 0, "max_tokens": 1})
            return bad, streamed, good, await http.get("/health")

    bad, streamed, good, health = asyncio.run(call())
    assert bad.status_code == 500
    assert "not finite" in bad.json()["error"]["message"]
    assert "not finite" in streamed.text
    assert "[DONE]" not in streamed.text
    assert good.json()["choices"][0]["text"] == "e"
    assert health.json() == {"status": "ok", "waiting": 0}


def test_one_generates_some_wait_more_are_refused():
    gate, running = threading.Event(), []

    def rule(ids):
        running.append(threading.get_ident())
        assert gate.wait(20)
        return next_letter(ids)

    async def call():
        async with client(ToyModel(rule), waiting=1) as http:
            body = {"prompt": "a", "max_tokens": 2, "temperature": 0}
            first, second = (asyncio.create_task(http.post("/v1/completions", json=body)) for _ in range(2))
            while not running:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            refused = await http.post("/v1/completions", json=body)
            waiting = (await http.get("/health")).json()["waiting"]
            gate.set()
            return refused, waiting, await first, await second

    refused, waiting, first, second = asyncio.run(call())
    assert (refused.status_code, waiting) == (429, 1)
    assert first.json()["choices"][0]["text"] == second.json()["choices"][0]["text"] == "bc"
    assert len(set(running)) == 1


def test_a_reader_that_leaves_a_stream_ends_its_work():
    steps = []

    def rule(ids):
        steps.append(len(ids))
        return next_letter([1])

    async def call():
        from neox.generation.server import _stream

        model = ToyModel(rule, max_length=100_000)
        queue = GenerationQueue(model, CODEC, RequestLimits(max_tokens=90_000))
        body = {"prompt": "a", "max_tokens": 90_000, "temperature": 0, "stream": True}
        stream = _stream(queue, parse_request(body, model, CODEC, queue.limits), "toy")
        first = await anext(stream)
        await stream.aclose()
        await asyncio.wait_for(queue.lock.acquire(), 20)
        return first, queue.size

    first, inside = asyncio.run(call())
    assert '"text": "b"' in first
    assert inside == 0
    assert len(steps) < 90_000


def test_whatever_is_refused_is_told_in_openais_form():
    async def call():
        async with client() as http:
            return (
                await http.post("/v1/embeddings", json={}),
                await http.get("/v1/completions"),
                await http.get("/health", headers={"host": "evil.example"}),
            )

    for answer, status, message in zip(
        asyncio.run(call()),
        (404, 405, 400),
        ("Not Found", "Method Not Allowed", "'evil.example' is not accepted"),
        strict=True,
    ):
        assert answer.status_code == status
        assert message in answer.json()["error"]["message"]


def test_names_of_this_machine_are_known_with_and_without_a_port():
    async def call(host):
        async with client() as http:
            return (await http.get("/health", headers={"host": host})).status_code

    for host in ("localhost", "LOCALHOST:8000", "127.0.0.1:80", "[::1]", "[::1]:8000"):
        assert asyncio.run(call(host)) == 200, host
    for host in ("", "localhost.evil.example", "[::2]:8000", "evil:80:localhost"):
        assert asyncio.run(call(host)) == 400, host


def test_a_mistake_of_ours_is_told_too():
    def rule(ids):
        raise KeyError("ours")

    async def call():
        app = make_app(ToyModel(rule), CODEC, name="toy")
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            return await http.post("/v1/completions", json={"prompt": "a"})

    answer = asyncio.run(call())
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "KeyError: see the server's log"


def test_limits_that_allow_nothing_are_refused():
    with raises_naming(GenerationError, "max_tokens"):
        RequestLimits(max_tokens=0)


def test_models_and_the_page():
    async def call():
        async with client() as http:
            return await http.get("/v1/models"), await http.get("/"), await http.get("/pages/prompt.js")

    models, page, script = asyncio.run(call())
    assert models.json()["data"][0]["id"] == "toy"
    assert page.headers["content-type"].startswith("text/html")
    assert "/pages/prompt.js" in page.text
    assert "/v1/completions" in script.text
    assert script.headers["content-type"].startswith("text/javascript")
    assert "default-src 'none'" in page.headers["content-security-policy"]


def test_logprobs_of_prompt_and_continuation():
    """As OpenAI's completions: none for the first token of all, one for the end token, offsets in the text."""
    model = ToyModel(hashed)
    body = {"prompt": "abc", "max_tokens": 2, "temperature": 0, "logprobs": 2}
    shown = post({**body, "echo": True}, model=model).json()["choices"][0]
    hidden = post(body, model=model).json()["choices"][0]
    found = shown["logprobs"]
    ids = CODEC.encode("".join(found["tokens"]))
    assert "".join(found["tokens"]).startswith(shown["text"])
    assert found["text_offset"] == list(range(len(ids)))
    assert found["token_logprobs"][0] is None
    assert found["top_logprobs"][0] is None
    for place in range(1, len(ids)):
        expected = hashed(ids[:place]).log_softmax(-1)
        assert found["token_logprobs"][place] == pytest.approx(expected[ids[place]].item())
        best = expected.topk(2)
        named = set(map(CODEC.decode, best.indices[:, None].tolist()))
        assert set(found["top_logprobs"][place]) == named | {found["tokens"][place]}
    for key in ("tokens", "token_logprobs", "top_logprobs"):
        assert hidden["logprobs"][key] == found[key][3:]
    assert hidden["logprobs"]["text_offset"] == [0, 1]


def test_a_prompt_is_scored_without_generation():
    """lm-evaluation-harness reads `token_logprobs[context:-1]` of `max_tokens: 1`; others ask for 0 tokens."""
    body = {"prompt": [[1, 2, 3], [4]], "temperature": 0, "echo": True, "logprobs": 1}
    none = post({**body, "max_tokens": 0}).json()
    one = post({**body, "max_tokens": 1}).json()
    assert none["usage"]["completion_tokens"] == 0
    for before, after in zip(none["choices"], one["choices"], strict=True):
        assert before["text"] + after["text"][-1] == after["text"]
        assert before["logprobs"]["token_logprobs"] == after["logprobs"]["token_logprobs"][:-1]
    ended = post({"prompt": [[25, 26]], "temperature": 0, "echo": True, "logprobs": 1, "max_tokens": 1}).json()
    assert len(ended["choices"][0]["logprobs"]["token_logprobs"]) == 3  # the end token is the third
    whole = list(range(1, 27)) * 2 + list(range(1, 13))  # as long as the context
    assert post({**body, "prompt": whole, "max_tokens": 0}).status_code == 200
