"""The page of tools/serve.py in a real browser: Debian's chromium, driven over WebDriver."""

import json
import shutil
import threading
import time
import urllib.request

import pytest

from tests.unit.generation.toy import CHAT_TEMPLATE, ToyCodec, ToyModel, next_letter, shouting

pytest.importorskip("starlette", reason="starlette (requirements/requirements-serve.txt) is not installed")
pytest.importorskip("uvicorn", reason="uvicorn (requirements/requirements-serve.txt) is not installed")
if shutil.which("chromedriver") is None:
    pytest.skip("chromedriver (Debian: chromium-driver) is not installed", allow_module_level=True)

from neox.generation.chat_format import ChatFormat
from neox.generation.server import make_app
from neox.tokenizer import build_tokenizer
from neox.tokenizer.chat import ChatTemplate
from tests.end_to_end.browser import Page, browser, wait
from tests.unit.generation.served import served


def test_text_comes_into_the_page_and_stops_when_told(tmp_path):
    slow = threading.Event()

    def rule(ids):
        if slow.is_set():
            time.sleep(0.02)
            return next_letter([1])
        return next_letter(ids)

    app = make_app(ToyModel(rule, max_length=2000), ToyCodec(), name="toy")
    with served(app) as address, browser(tmp_path) as session:
        page = Page(session, address)
        page.fill("#prompt", "abc")
        page.fill("#max_tokens", "4")
        page.fill("#temperature", "0")
        page.click("#go")
        wait(lambda: page.text("#status") == "ended: length")
        assert page.text("#out") == "abcdefg"
        wait(lambda: page.text("#settings").startswith("4 tokens in "))
        assert page.text("#settings").endswith("tokens/s; max_tokens 4, temperature 0, top_p 0.95, top_k 0")
        wait(lambda: page.text("#model") == "toy, 2000 tokens of context")
        assert not page.shows("#chat_link")  # there is no chat template

        page.fill("#max_tokens", "9999")
        page.click("#go")
        wait(lambda: "`max_tokens` must be an integer from 1 to 1024" in page.text("#status"))

        slow.set()
        page.fill("#max_tokens", "1000")
        page.click("#go")
        wait(lambda: len(page.text("#out")) > 8)
        page.click("#stop")
        wait(lambda: page.text("#status") == "stopped")
        assert page.text("#out").startswith("abcbbbb")
        health = f"{address}health"
        wait(lambda: json.load(urllib.request.urlopen(health, timeout=9)) == {"status": "ok", "waiting": 0})


def test_a_conversation_in_the_page_keeps_its_history(tmp_path):
    slow = threading.Event()

    def rule(ids):
        if slow.is_set():
            time.sleep(0.1)
        return shouting(ids)

    codec = build_tokenizer("CharLevelTokenizer", None)
    chat = ChatFormat(ChatTemplate(CHAT_TEMPLATE, {}), codec)
    app = make_app(ToyModel(rule, vocab_size=512, max_length=400), codec, name="toy", chat=chat)
    with served(app) as address, browser(tmp_path) as session:
        page = Page(session, f"{address}chat")
        page.fill("#system", "Be loud.")
        page.fill("#question", "one\ue008\ue007\ue008&")  # Shift and Enter
        page.type("#question", "\ue007")
        wait(lambda: page.text("#settings").endswith("tokens/s"))
        assert page.texts("#log div") == ["one\n&", "1ONE\n&"]
        page.fill("#question", "two")
        page.click("#go")
        wait(lambda: page.texts("#log div")[2:] == ["two", "2TWO"])

        page.fill("#question", "x" * 400)
        page.click("#go")
        wait(lambda: "context is 400" in page.text("#status"))
        assert len(page.texts("#log div")) == 4

        slow.set()
        page.fill("#question", "a long question, of many letters")
        page.click("#go")
        wait(lambda: "3A" in page.texts("#log div")[-1])
        page.click("#stop")
        wait(lambda: page.text("#status") == "stopped")
        slow.clear()
        assert page.texts("#log div")[-1].startswith("3A")
        page.click("#reset")
        assert page.texts("#log div") == []
        page.fill("#question", "new")
        page.click("#go")
        wait(lambda: page.texts("#log div") == ["new", "1NEW"])
        page.click("nav a")
        wait(lambda: page.shows("#chat_link"))
