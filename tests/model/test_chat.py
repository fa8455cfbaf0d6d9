"""The prompt format: 25 golden conversations without thinking, and section 12 of the architecture for the rest."""

import copy
import json
from pathlib import Path

import pytest

from model.chat import EFFORTS, EOS, IMAGE, ChatError, effort_score, parse_answer, render
from model.tokenizer import byte_tokenizer, encode

CASES = json.loads((Path(__file__).resolve().parents[1] / "data" / "golden" / "chat.json").read_text())["cases"]

BOS = "<｜begin▁of▁sentence｜>"
EFFORT = "<｜System｜>Reasoning Effort: {} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"
ASK = {"role": "user", "content": "q"}


def answer(content="a", **more):
    return {"role": "assistant", "content": content} | more


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_golden_conversations(case):
    messages = copy.deepcopy(case["messages"])
    text = render(messages, thinking=case["thinking"], add_generation_prompt=case["add_generation_prompt"])
    assert text == case["text"]
    assert messages == case["messages"]  # the caller's list is left alone
    assert text.count(IMAGE) == case["images"]


def test_ids_of_a_prompt():
    """One id for each special token, the bytes between, and nothing in front or behind."""
    tokenizer = byte_tokenizer(512)
    ids = encode(tokenizer, render([{"role": "user", "content": "2+2"}]))
    special = [i for i in ids if i < 3 or i > 258]
    assert tokenizer.decode(special, skip_special_tokens=False) == f"{BOS}<｜User｜><｜Assistant｜></think>"
    assert len(ids) == 4 + 3 and ids[0] == 0


# --- thinking ---------------------------------------------------------------------------------------------------------


def test_thinking_begins_with_the_effort():
    assert render([ASK], thinking=True) == BOS + EFFORT.format(75) + "<｜User｜>q<｜Assistant｜><think>"
    system = {"role": "system", "content": "Be brief."}
    assert render([system, ASK], thinking=True) == (
        BOS + EFFORT.format(75) + "Be brief.<｜User｜>q<｜Assistant｜><think>"
    )


@pytest.mark.parametrize(
    ("effort", "score"),
    [("low", 50), ("high", 75), ("xhigh", 75), ("max", 100), (1, 1), (42, 42), (100, 100), (None, 75)],
)
def test_efforts(effort, score):
    assert effort_score(effort) == score
    assert render([ASK], thinking=True, effort=effort).startswith(BOS + EFFORT.format(score))
    assert render([ASK], effort=effort) == render([ASK])


@pytest.mark.parametrize("effort", [0, 101, -1, "medium", "", True, 2.5, "50", [50]])
def test_efforts_that_do_not_exist(effort):
    for thinking in (True, False):
        with pytest.raises(ChatError, match=f"effort is .*; accepted: {', '.join(EFFORTS)}, or a whole number"):
            render([ASK], thinking=thinking, effort=effort)


def test_earlier_reasoning_is_dropped():
    messages = [ASK, answer(reasoning_content="because"), {"role": "user", "content": "again"}]
    head = BOS + EFFORT.format(75)
    tail = "<｜User｜>again<｜Assistant｜><think>"
    assert render(messages, thinking=True) == head + f"<｜User｜>q<｜Assistant｜></think>a{EOS}" + tail
    assert render(messages, thinking=True, drop_thinking=False) == (
        head + f"<｜User｜>q<｜Assistant｜><think>because</think>a{EOS}" + tail
    )
    assert render(messages) == BOS + f"<｜User｜>q<｜Assistant｜></think>a{EOS}<｜User｜>again<｜Assistant｜></think>"


def test_reasoning_of_the_last_answer_is_kept():
    messages = [ASK, answer(reasoning_content="because")]
    assert render(messages, thinking=True).endswith(f"<｜Assistant｜><think>because</think>a{EOS}")
    assert render(messages).endswith(f"<｜Assistant｜></think>a{EOS}")


def test_a_system_message_in_the_middle_asks_too():
    messages = [ASK, answer(reasoning_content="because"), {"role": "system", "content": "Rule."}]
    assert render(messages, thinking=True).endswith(f"</think>a{EOS}<｜System｜>Rule.<｜Assistant｜><think>")
    assert "because" not in render(messages, thinking=True)


def test_reasoning_is_kept_with_tools():
    messages = [ASK, answer(reasoning_content="because"), ASK]
    assert "<think>because</think>a" in render(messages, thinking=True, tools=[TOOL])
    assert "because" not in render(messages, thinking=True, tools=[TOOL], drop_thinking=True)


# --- tools ------------------------------------------------------------------------------------------------------------

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Le temps qu'il fait",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def call(name="get_weather", arguments=None, call_id=""):
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments or {}}}


def test_tools_follow_the_system_text():
    text = render([{"role": "system", "content": "S"}, ASK], tools=[TOOL, TOOL])
    assert text.startswith(BOS + "<｜System｜>S\n\n## Tools\n\n")
    assert text.count(json.dumps(TOOL["function"], ensure_ascii=False)) == 2
    assert '<｜DSML｜ invoke name="NAME">' in text
    assert text.endswith("<｜User｜>q<｜Assistant｜></think>")
    own = render([{"role": "system", "content": "S", "tools": [TOOL, TOOL]}, ASK])
    assert own == text
    assert render([ASK], tools=[TOOL]).startswith(BOS + "<｜System｜>\n\n## Tools")
    thinking = render([ASK], tools=[TOOL], thinking=True)
    assert thinking.startswith(BOS + EFFORT.format(75) + "\n\n## Tools")


def test_calls_and_results():
    messages = [
        ASK,
        answer("Let me look.", tool_calls=[call(arguments='{"city": "Köln", "days": 3, "raw": {"a": [1, null]}}')]),
        {"role": "tool", "content": "sunny"},
    ]
    assert render(messages) == (
        BOS + "<｜User｜>q<｜Assistant｜></think>Let me look.\n\n<｜DSML｜ calls>\n"
        '<｜DSML｜ invoke name="get_weather">\n'
        '<｜DSML｜ parameter name="city" string="true">Köln</｜DSML｜ parameter>\n'
        '<｜DSML｜ parameter name="days" string="false">3</｜DSML｜ parameter>\n'
        '<｜DSML｜ parameter name="raw" string="false">{"a": [1, null]}</｜DSML｜ parameter>\n'
        f"</｜DSML｜ invoke>\n</｜DSML｜ calls>{EOS}"
        "<｜User｜><tool_result>sunny</tool_result><｜Assistant｜></think>"
    )


def test_a_call_without_arguments_keeps_its_empty_line():
    text = render([ASK, answer("", tool_calls=[call("f")])])
    assert f'<｜DSML｜ invoke name="f">\n\n</｜DSML｜ invoke>\n</｜DSML｜ calls>{EOS}' in text


def test_results_stand_in_the_order_of_the_calls():
    calls = [call(call_id=i) for i in ("a", "b", "c")]
    results = [{"role": "tool", "tool_call_id": i, "content": i.upper()} for i in ("c", "a", "b")]
    text = render([ASK, answer("", tool_calls=calls), *results, {"role": "user", "content": "go on"}])
    turn = text.rpartition("<｜User｜>")[2]
    assert turn == (
        "<tool_result>A</tool_result>\n\n<tool_result>B</tool_result>\n\n<tool_result>C</tool_result>\n\ngo on"
        "<｜Assistant｜></think>"
    )
    mixed = [ASK, answer("", tool_calls=calls), results[0], {"role": "user", "content": "and"}, results[1]]
    assert render(mixed).rpartition("<｜User｜>")[2] == (
        "<tool_result>A</tool_result>\n\nand\n\n<tool_result>C</tool_result><｜Assistant｜></think>"
    )


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize(
    "message",
    [
        answer("plain"),
        answer(" spaces \n\n kept\n"),
        answer("", tool_calls=[call("f", {}), call("g", {"x": "two\nlines <b>", "y": [1, {"z": None}], "w": "3"})]),
        answer("then", reasoning_content="think <hard>\n", tool_calls=[call("ns::f", {"a": True, "b": 1.5})]),
    ],
)
def test_parsing_is_the_inverse(message, thinking):
    prompt = render([ASK], thinking=thinking, drop_thinking=False)
    text = render([ASK, message], thinking=thinking, drop_thinking=False)
    assert text.startswith(prompt)
    parsed = parse_answer(text[len(prompt) :], thinking=thinking)
    assert parsed["content"] == message["content"]
    assert parsed["reasoning_content"] == (message.get("reasoning_content", "") if thinking else "")
    assert [c["function"] for c in parsed["tool_calls"]] == [c["function"] for c in message.get("tool_calls", [])]


def test_answers_that_stop_early():
    assert parse_answer("still thinking", thinking=True)["reasoning_content"] == "still thinking"
    for cut in ("<｜DSML｜ calls>\n", '<｜DSML｜ calls>\n<｜DSML｜ invoke name="f">\n'):
        with pytest.raises(ChatError, match="does not close it"):
            parse_answer("\n\n" + cut)
    bad = '\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="f">\n{}</｜DSML｜ invoke>\n</｜DSML｜ calls>'
    for parameter, pattern in (
        ('<｜DSML｜ parameter name="a" string="false">{</｜DSML｜ parameter>\n', "not JSON"),
        ('<｜DSML｜ parameter name="a">1</｜DSML｜ parameter>\n', "not marked"),
        ('<｜DSML｜ parameter name="a" string="true">1\n', "not closed"),
    ):
        with pytest.raises(ChatError, match=pattern):
            parse_answer(bad.format(parameter))


# --- what cannot be said ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "pattern"),
    [
        ({"role": "developer", "content": "x"}, "message 1 has role 'developer'; accepted: system, user"),
        ({"content": "x"}, "has role None"),
        ("hello", "has role 'hello'"),
        ({"role": "user"}, "message 1 has content None; accepted: a string or a list of blocks"),
        ({"role": "user", "content": 3}, "has content 3"),
        ({"role": "user", "content": [{"type": "audio"}]}, "has a block .*accepted: type text"),
        ({"role": "user", "content": [{"type": "text"}]}, "has a block"),
        ({"role": "user", "content": ["x"]}, "has a block 'x'"),
        ({"role": "user", "content": f"a {IMAGE} b"}, "accepted: a block of type image"),
        ({"role": "user", "content": [{"type": "text", "text": IMAGE}]}, "accepted: a block of type image"),
        (answer(reasoning_content=3), "has reasoning_content 3"),
        (answer(tool_calls=[{"id": "x"}]), "tool call 0 is"),
        (answer(tool_calls=[call(arguments="[1]")]), "accepted: a JSON object"),
        (answer(tool_calls=[call(arguments="{")]), "accepted: a JSON object"),
    ],
)
def test_messages_that_cannot_be_rendered(message, pattern):
    with pytest.raises(ChatError, match=pattern):
        render([ASK, message])


def test_tools_that_are_none():
    for tool in ({}, {"function": {}}, {"function": {"name": 3}}, "f"):
        with pytest.raises(ChatError, match="tool 0 is"):
            render([ASK], tools=[tool])
