"""One live server: the clients' examples as users run them, and the page under real clicks."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from browser import NO_BROWSER, Browser, browser, has_browser
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys
from serving import GREEDY, NAME, connect, sample, serving, xargs

CLIENTS = Path(__file__).parents[2] / "example" / "clients"
SIZES = {"wide": (1280, 900), "middle": (820, 1100), "narrow": (390, 844)}
DONE = "Done."

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def url(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(smollm2, tmp_path_factory.mktemp("server"), {}, page=True, parts=False) as url:
        yield url


# --- clients --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["openai_rag", "http_rag", "langchain_rag", "llama_index_rag"])
def test_an_example_reuses_its_documents(
    url: str, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(CLIENTS)
    library = importlib.import_module("library")
    # so that vLLM's prefix cache has nothing of the examples before
    monkeypatch.setattr(library, "INSTRUCTION", f"{name}: {library.INSTRUCTION}")
    monkeypatch.setattr(library, "QUESTIONS", library.QUESTIONS[-2:])
    monkeypatch.setattr(sys, "argv", [name, "--url", f"{url}/v1"])
    importlib.import_module(name).main()
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["TTFT", "before", "after", "reused", "answer"]
    found = [re.fullmatch(r" *(\d+\.\d{3}) s +(\d+\.\d{3}) s +(\d+)   \w.+", row) for row in rows]
    assert len(found) == 2 and all(found), rows
    reused = [int(row[3]) for row in found if row]
    assert reused[-1] > 200  # of documents that the question before had, in another order


def test_examples_are_short() -> None:
    for path in CLIENTS.glob("*_rag.py"):
        assert len(path.read_text().splitlines()) < 70


@pytest.mark.parametrize("way", ["chat", "completion"])
def test_streams_tell_what_answers_tell(url: str, way: str) -> None:
    client = connect(url)
    texts, question = sample(2)
    texts = [f"{text} ({way})" for text in texts]

    def ask(texts: list[str], stream: bool, field: Any) -> Any:
        more: Any = dict(model=NAME, stream=stream, extra_body=xargs(field), **GREEDY)
        if way == "chat":
            parts: Any = [{"type": "text", "text": text} for text in [*texts, question]]
            return client.chat.completions.create(messages=[{"role": "user", "content": parts}], **more)
        return client.completions.create(prompt="<|8c1f|>".join(["", *texts, question]), **more)

    marks: dict[str, Any] = {} if way == "chat" else {"separator": "<|8c1f|>"}
    ask(texts, False, marks)
    asked = list(ask(texts[::-1], True, marks | {"report": True}))
    *others, last = [chunk.model_extra.get("kv_transfer_params") for chunk in asked]
    assert others == [None] * len(others) and len(others) > 1
    report = last["blend"]
    reused = [end - start for start, end, state in report["spans"] if state == "reused"]
    assert report["chunks"] == len(reused) > 0 and report["reused_tokens"] == sum(reused)
    again = report["recomputed_spans"]
    assert sum(end - start for start, end in again) == report["recomputed_tokens"] > 0
    *_, sign = ask([texts[1], texts[0], texts[2]], True, marks)
    told = sign.model_extra["kv_transfer_params"]["blend"]
    assert set(told) == {"reused_tokens", "recomputed_tokens"}


# --- the page -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def opened(url: str) -> Iterator[Browser]:
    if not has_browser():
        pytest.skip(NO_BROWSER)
    with browser() as made:
        yield made


@pytest.fixture
def page(opened: Browser, url: str) -> Iterator[Browser]:
    """The page anew; whatever a test does, it asks for nothing elsewhere."""
    opened.emulate(prefers_color_scheme="light")
    opened.resize(*SIZES["wide"])
    opened.driver.get(f"{url}/blend")
    opened.wait("#model", f"Model: {NAME}.")
    yield opened
    addresses = opened.addresses()
    assert f"{url}/blend" in addresses
    assert [a for a in addresses if not a.startswith((f"{url}/", "data:"))] == []
    assert [c for c in opened.complaints() if "status of 400" not in c] == []


def ask(page: Browser, status: str = DONE) -> None:
    page.write("#length", "8")
    page["#ask"].click()
    page.wait("#status", status)


def test_documents_are_asked_twice_and_what_was_computed_is_shown(page: Browser, url: str) -> None:
    page.all("button[data-name=Remove]")[3].click()
    page["#add"].click()
    own = "Ada Lindqvist came from Uppsala. She founded the bakery on Mill Street in 1921."
    page.driver.switch_to.active_element.send_keys(own)
    page.write("#question", "Who founded the bakery?")
    ask(page)
    assert page.texts(".state")[3].endswith("tokens, fresh")
    assert "New documents: 4" in page["#notice"].text
    page.all("button[data-name='Move up']")[3].click()
    page.all("button[data-name='Move up']")[2].click()
    assert own in [area.get_property("value") for area in page.all("#documents textarea")][1]
    page["summary"].click()
    page["#system"].send_keys(" Be brief.")  # so that vLLM's prefix cache has nothing of it
    ask(page)
    states = page.texts(".state")
    assert sum(state.endswith("tokens, reused") for state in states) >= 3, states
    for answer in ("#full", "#blended"):
        pieces = page.run("return arguments[0].childNodes.length", page[f"{answer} .text"])
        assert pieces > 1  # it came piece by piece
        assert re.fullmatch(r"\d+\.\d+ s", page[f"{answer} .time"].text)
        assert page.run("return arguments[0].clientWidth", page[f"{answer} i"]) > 0
    assert re.fullmatch(r"· \d+\.\d×", page["#gain"].text)
    counts = {key: int(page[f"#{key}"].text) for key in ("reused", "recomputed", "cached", "fresh")}
    assert 0 < counts["recomputed"] < counts["reused"]
    for state in ("recomputed", "cached", "fresh"):
        painted = [part.get_attribute("title") for part in page.all(f"#tokens .{state}")]
        assert sum(int(title.split()[0]) for title in painted) == counts[state], state
    strip = "\n".join(part.get_attribute("title") for part in page.all("#strip span"))
    assert sum(map(int, re.findall(r", (\d+) of them recomputed", strip))) == counts["recomputed"]
    colours = set()
    for scheme in ("light", "dark"):
        page.emulate(prefers_color_scheme=scheme)
        for state in ("reused", "recomputed"):
            colours.add(page[f"#tokens .{state}"].value_of_css_property("background-color"))
    assert len(colours) == 4
    told = re.findall(r" · (\d+) tokens, reused", "\n".join(states))
    assert 0 <= counts["reused"] - sum(map(int, told)) < 20  # the blank lines between two
    prompt = page["#tokens"].get_property("textContent")
    assert own in prompt and prompt.startswith("<|im_start|>system")
    parts = page.all("#tokens .reused, #tokens .recomputed")
    assert own in "".join(part.get_property("textContent") for part in parts)


def test_the_page_and_the_api_give_one_answer(page: Browser, url: str) -> None:
    ask(page)
    texts = [area.get_property("value") for area in page.all("#documents textarea")]
    question = page["#question"].get_property("value")
    parts: Any = [{"type": "text", "text": f"{text}\n\n"} for text in texts]
    parts.append({"type": "text", "text": f"Question: {question}"})
    system: Any = {"role": "system", "content": page["#system"].get_property("value")}
    answer = connect(url).chat.completions.create(
        model=NAME, messages=[system, {"role": "user", "content": parts}], temperature=0, max_tokens=8
    )
    assert page["#full .text"].text == (answer.choices[0].message.content or "").strip()


def test_it_is_used_by_keyboard_alone(page: Browser) -> None:
    def order() -> list[str]:
        return [str(area.get_property("value"))[:12] for area in page.all("#documents textarea")]

    before = order()
    page.all("#documents textarea")[0].click()
    ActionChains(page.driver).key_down(Keys.ALT).send_keys(Keys.ARROW_DOWN).key_up(Keys.ALT).perform()
    assert order() == [before[1], before[0], *before[2:]]
    active = page.driver.switch_to.active_element
    assert active.get_attribute("aria-label") == "Document 2"
    assert page.run("return getComputedStyle(arguments[0]).outlineStyle", active) == "solid"
    active.send_keys(Keys.TAB)
    names = []
    for _ in range(40):
        active = page.driver.switch_to.active_element
        names.append(active.accessible_name)
        active.send_keys(Keys.TAB)
    assert {"Question", "Ask", "Which tokens are recomputed", "Longest answer"} <= set(names)
    assert {"Move up: document 3", "Remove: document 4", "Document 4"} <= set(names)
    page.write("#length", "4")
    page["#question"].send_keys(Keys.CONTROL, Keys.ENTER)
    page.wait("#status", DONE)
    assert page["#full .text"].text


def test_what_the_server_refuses_is_shown_as_it_says_it(page: Browser, url: str) -> None:
    wrong = "arguments[0].append(new Option('nonsense')); arguments[0].value = 'nonsense'"
    page.run(wrong, page["#policy"])
    ask(page, "Not both were answered.")
    body = {"model": NAME, "messages": [{"role": "user", "content": "?"}]}
    said = httpx.post(
        f"{url}/v1/chat/completions", json=body | xargs({"policy": "nonsense"}), timeout=30
    ).json()["error"]["message"]
    assert "nonsense" in said and page["#blended .text"].text == f"HTTP 400: {said}"
    assert page["#full .text"].text and not page["#prompt"].is_displayed()


def test_an_answer_can_be_stopped_and_nothing_is_asked_of_nothing(page: Browser) -> None:
    page.write("#length", "400")
    page["#ask"].click()
    page["#stop"].click()
    page.wait("#status", "Stopped.")
    assert page["#ask"].is_enabled()
    for button in reversed(page.all("button[data-name=Remove]")):
        button.click()
    assert page.driver.switch_to.active_element == page["#add"]
    page["#ask"].click()
    assert page["#status"].text == "It takes a document and a question."


def test_settings_reach_the_server(page: Browser) -> None:
    page.run("arguments[0].value = 1; arguments[0].dispatchEvent(new Event('input'))", page["#ratio"])
    assert page["#percent"].text == "100%"
    for text in page.all("#policy option"):
        if text.text == "static":
            text.click()
    assert json.loads(page.run("return blendField()")) == {
        "report": True,
        "keep": True,
        "policy": "static",
        "recomp_ratio": 1,
    }


@pytest.mark.parametrize("size", SIZES)
def test_it_fits_every_screen_light_and_dark(page: Browser, size: str) -> None:
    page.resize(*SIZES[size])
    width = SIZES[size][0]
    assert page.run("return document.documentElement.scrollWidth") <= width
    for element in page.all("input, textarea, select, button"):
        assert not element.is_displayed() or element.accessible_name
        box = element.rect
        assert box["x"] >= 0 and box["x"] + box["width"] <= width
    colours = []
    for scheme in ("light", "dark"):
        page.emulate(prefers_color_scheme=scheme)
        colours.append(page.run("return getComputedStyle(document.documentElement).backgroundColor"))
    assert colours[0] != colours[1]
    columns = page.run("return getComputedStyle(document.querySelector('main')).gridTemplateColumns")
    assert len(columns.split()) == (2 if size == "wide" else 1)
