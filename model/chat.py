"""The prompt format of V4.1: messages to text, with thinking, effort, tools and images.

    BOS [System] system  User question  Assistant </think>answer EOS  User ...          nothing between the parts

`Assistant` with `</think>` (or `<think>`, where the model is to think) is written after a user turn, or after a system
message that is not the first, when an answer follows or when the turn is the last one. Turns of the user that follow
one another become one, joined by an empty line, and so do the blocks of a turn; results of tools are blocks of a user
turn. Nothing is trimmed and nothing is escaped. Source: V4.1 architecture, 12, and for tool markup the released encoder
as public ports describe it: the tag names begin with a space.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from model.tokenizer import CHAT_TOKENS, SPECIAL_TOKENS

BOS, EOS, PAD = SPECIAL_TOKENS
SYSTEM, USER, ASSISTANT, THINK, END_THINK, DSML, IMAGE = CHAT_TOKENS
CALLS, INVOKE, PARAMETER = f"{DSML} calls", f"{DSML} invoke", f"{DSML} parameter"

EFFORTS = {"low": 50, "high": 75, "xhigh": 75, "max": 100}
"""Names of the effort of thinking; any whole number from 1 to 100 is taken too."""

DEFAULT_EFFORT = "high"
ROLES = ("system", "user", "assistant", "tool")
_JOIN = "\n\n"  # between blocks and between joined turns


class ChatError(ValueError):
    """A conversation that the prompt format cannot express: names the message and what is accepted."""


def render(
    messages: Sequence[Mapping[str, Any]],
    *,
    thinking: bool = False,
    effort: str | int | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    drop_thinking: bool | None = None,
) -> str:
    """The prompt of a conversation, to be encoded without adding anything.

    Args:
        messages: each with `role` (`system`, `user`, `assistant`, `tool`) and `content`, a string or a list of blocks
            `{"type": "text", "text": ...}`, `{"type": "image"}` or `image_url`. An answer may have `reasoning_content`,
            `tool_calls` and `wo_eos` (no end token); a result of a tool has `tool_call_id`; a system message may have
            `tools` of its own.
        thinking: let the model think before it answers; says how hard after the begin token.
        effort: `low`, `high`, `xhigh`, `max` or 1 to 100; `high` by default. Of no effect without `thinking`.
        tools: functions that may be called, `{"type": "function", "function": {"name", "description", "parameters"}}`.
        add_generation_prompt: end with the opening of an answer where one is due.
        drop_thinking: leave out the reasoning of answers before the last turn; by default, unless there are tools.

    Raises:
        ChatError: naming the message and what is accepted.

    >>> render([{"role": "user", "content": "What is 2+2?"}])
    '<｜begin▁of▁sentence｜><｜User｜>What is 2+2?<｜Assistant｜></think>'
    """
    score = effort_score(effort)
    turns = _turns(messages)
    if tools:
        if not turns or turns[0]["role"] != "system":
            turns.insert(0, {"role": "system", "content": ""})
        turns[0]["tools"] = [*(turns[0].get("tools") or ()), *tools]
    with_tools = [turn for turn in turns if turn.get("tools")]
    for turn in with_tools:
        turn["content"] += _JOIN + render_tools(turn["tools"])
    drop = not with_tools if drop_thinking is None else drop_thinking
    last = max((i for i, turn in enumerate(turns) if _asks(i, turn)), default=-1)

    text = BOS
    if thinking and turns:
        text += SYSTEM + effort_line(score)
    for i, turn in enumerate(turns):
        if turn["role"] == "system":
            text += ("" if thinking and i == 0 else SYSTEM) + turn["content"]
        elif turn["role"] == "user":
            text += USER + turn["content"]
        else:
            if thinking and (i > last or not drop):
                text += turn["reasoning"] + END_THINK
            text += turn["content"] + turn["calls"] + ("" if turn["wo_eos"] else EOS)
        answered = turns[i + 1]["role"] == "assistant" if i + 1 < len(turns) else add_generation_prompt
        if answered and _asks(i, turn):
            text += ASSISTANT + (THINK if thinking and (i >= last or not drop) else END_THINK)
    return text


def effort_score(effort: str | int | None) -> int:
    """The number, 1 to 100, that an effort means.

    Raises:
        ChatError: another name or number.

    >>> effort_score(None), effort_score("low"), effort_score(42)
    (75, 50, 42)
    """
    effort = DEFAULT_EFFORT if effort is None else effort
    if isinstance(effort, str) and effort in EFFORTS:
        return EFFORTS[effort]
    if isinstance(effort, int) and not isinstance(effort, bool) and 1 <= effort <= 100:
        return effort
    raise ChatError(f"effort is {effort!r}; accepted: {', '.join(EFFORTS)}, or a whole number from 1 to 100")


def effort_line(score: int) -> str:
    """What a thinking prompt says first."""
    return f"Reasoning Effort: {score} (range 1-100, the higher the value, the more thorough the reasoning){_JOIN}"


def parse_answer(text: str, *, thinking: bool = False) -> dict[str, Any]:
    """A generated answer taken apart: `content`, `reasoning_content`, `tool_calls`. Undoes `render` for one turn.

    Args:
        text: what came after the prompt, with or without the end token.
        thinking: whether the prompt ended with `<think>`.

    Raises:
        ChatError: calls of tools that are not closed or not JSON.
    """
    text = text.removesuffix(EOS)
    reasoning = ""
    if thinking:
        reasoning, closed, text = text.partition(END_THINK)
        if not closed:
            return {"role": "assistant", "content": "", "reasoning_content": reasoning, "tool_calls": []}
    content, opened, calls = text.partition(f"{_JOIN}<{CALLS}>\n")
    result = {"role": "assistant", "content": content, "reasoning_content": reasoning, "tool_calls": []}
    if opened:
        result["tool_calls"] = _parse_calls(calls)
    return result


# --- turns ------------------------------------------------------------------------------------------------------------


def _turns(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages with contents as text; what follows one another on the user's side is one turn."""
    turns: list[dict[str, Any]] = []
    call_ids: list[str] = []  # of the last answer with calls: results are put in that order
    for place, message in enumerate(messages):
        if not isinstance(message, Mapping) or message.get("role") not in ROLES:
            role = message.get("role") if isinstance(message, Mapping) else message
            raise ChatError(f"message {place} has role {role!r}; accepted: {', '.join(ROLES)}")
        role = message["role"]
        if role in ("user", "tool"):
            if not turns or turns[-1]["role"] != "user":
                turns.append({"role": "user", "blocks": []})
            text = _content(place, message)
            result = role == "tool"
            call_id = str(message.get("tool_call_id", "")) if result else None
            block = (call_id, f"<tool_result>{text}</tool_result>" if result else text)
            turns[-1]["blocks"].append(block)
            turns[-1]["content"] = _JOIN.join(_in_call_order(turns[-1]["blocks"], call_ids))
        elif role == "system":
            turns.append({"role": "system", "content": _content(place, message), "tools": message.get("tools")})
        else:
            calls = message.get("tool_calls") or []
            if calls:
                call_ids = [str(call.get("id", "")) for call in calls if isinstance(call, Mapping)]
            reasoning = message.get("reasoning_content") or ""
            if not isinstance(reasoning, str):
                raise ChatError(f"message {place} has reasoning_content {reasoning!r}; accepted: a string")
            turns.append(
                {
                    "role": "assistant",
                    "content": _content(place, message, optional=True),
                    "reasoning": reasoning,
                    "calls": render_calls(calls) if calls else "",
                    "wo_eos": bool(message.get("wo_eos", False)),
                }
            )
    return turns


def _in_call_order(blocks: list[tuple[str | None, str]], call_ids: list[str]) -> list[str]:
    """The texts of a turn's blocks; results of tools change places among themselves."""
    rank = {call_id: i for i, call_id in enumerate(call_ids)}
    results = sorted((b for b in blocks if b[0] is not None), key=lambda block: rank.get(block[0], 0))
    results = iter(results)
    return [text if call_id is None else next(results)[1] for call_id, text in blocks]


def _asks(place: int, turn: Mapping[str, Any]) -> bool:
    """Whether a turn calls for an answer: the user's, or a system message that is not the first."""
    return turn["role"] == "user" or (turn["role"] == "system" and place > 0)


def _content(place: int, message: Mapping[str, Any], *, optional: bool = False) -> str:
    content = message.get("content")
    if content is None and optional:
        return ""
    if isinstance(content, str):
        return _text(place, content)
    if not isinstance(content, Sequence):
        raise ChatError(f"message {place} has content {content!r}; accepted: a string or a list of blocks")
    return _JOIN.join(_block(place, block) for block in content)


def _block(place: int, block: Any) -> str:
    kind = block.get("type") if isinstance(block, Mapping) else None
    if kind == "text" and isinstance(block.get("text"), str):
        return _text(place, block["text"])
    if kind in ("image", "image_url"):
        return IMAGE
    raise ChatError(f"message {place} has a block {block!r}; accepted: type text with a text, image, image_url")


def _text(place: int, text: str) -> str:
    if IMAGE in text:
        raise ChatError(f"message {place} has {IMAGE} in its text; accepted: a block of type image")
    return text


# --- tools ------------------------------------------------------------------------------------------------------------


def render_tools(tools: Sequence[Mapping[str, Any]]) -> str:
    """What the system turn says about tools: how to call them, and their schemas, one JSON a line."""
    schemas = []
    for place, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ChatError(f"tool {place} is {tool!r}; accepted: an object with a function that has a name")
        schemas.append(_json(function))
    return _TOOLS.format(schemas="\n".join(schemas))


def render_calls(calls: Sequence[Mapping[str, Any]]) -> str:
    """The calls of an answer. String arguments stand as they are, others as JSON."""
    return f"{_JOIN}<{CALLS}>\n" + "\n".join(_call(place, call) for place, call in enumerate(calls)) + f"\n</{CALLS}>"


def _call(place: int, call: Mapping[str, Any]) -> str:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ChatError(f"tool call {place} is {call!r}; accepted: an object with a function that has a name")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = None
    if not isinstance(arguments, Mapping):
        raise ChatError(f"tool call {place} has arguments {function.get('arguments')!r}; accepted: a JSON object")
    lines = []
    for name, value in arguments.items():
        text, string = (value, "true") if isinstance(value, str) else (_json(value), "false")
        lines.append(f'<{PARAMETER} name="{name}" string="{string}">{text}</{PARAMETER}>')
    return f'<{INVOKE} name="{function["name"]}">\n' + "\n".join(lines) + f"\n</{INVOKE}>"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


_TOOLS = f"""## Tools

To call a tool, write a block in this form; several calls may stand in one block:

<{CALLS}>
<{INVOKE} name="NAME">
<{PARAMETER} name="PARAMETER" string="true|false">VALUE</{PARAMETER}>
</{INVOKE}>
</{CALLS}>

Text values stand as they are, with string="true"; every other value is JSON, with string="false".
Reasoning, where it is asked for, comes first, between {THINK} and {END_THINK}.

### Schemas

{{schemas}}
"""
"""How to call tools, in words of our own around the markup of section 12. The wording that the model was trained with
is not reproduced here, so a released checkpoint may follow it less well."""


def _parse_calls(text: str) -> list[dict[str, Any]]:
    body, closed, _ = text.rpartition(f"\n</{CALLS}>")
    if not closed:
        raise ChatError(f"the answer opens <{CALLS}> and does not close it")
    calls = []
    for part in body.split(f"<{INVOKE} name=")[1:]:
        head, opened, rest = part.partition(">\n")
        inner, ended, _ = rest.rpartition(f"</{INVOKE}>")
        if not opened or not ended:
            raise ChatError(f"the answer has a call that is not closed: {part[:60]!r}")
        arguments = {}
        for piece in inner.split(f"<{PARAMETER} name=")[1:]:
            attributes, opened, rest = piece.partition(">")
            value, ended, _ = rest.rpartition(f"</{PARAMETER}>")
            name, _, string = attributes.rpartition(" string=")
            if not opened or not ended or string not in ('"true"', '"false"'):
                raise ChatError(f"the answer has a parameter that is not closed or not marked: {piece[:60]!r}")
            try:
                arguments[name.strip('"')] = value if string == '"true"' else json.loads(value)
            except ValueError:
                raise ChatError(f"the answer has a parameter that is not JSON: {value[:60]!r}") from None
        calls.append({"type": "function", "function": {"name": head.strip('"'), "arguments": arguments}})
    return calls
