"""Environments: tools, the sandbox, the tokens between turns, and episodes with a loss on the policy's tokens alone."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import threading
import time

import numpy as np
import pytest

from jaxllm.config import ConfigError
from jaxllm.data import ByteTokenizer
from jaxllm.files import DataError
from jaxllm.hub import find_model, open_source
from jaxllm.posttrain.bounded_calls import bounded_calls
from jaxllm.posttrain.environments.bundled_tools import calculator, python
from jaxllm.posttrain.environments.code_sandbox import run_python
from jaxllm.posttrain.environments.environment_table import find_environment
from jaxllm.posttrain.environments.tool_environment import ToolEnvironment, tool_schema, written_calls
from jaxllm.posttrain.environments.turn_format import TurnFormat
from jaxllm.posttrain.policy_training import open_policy_data, train_policy
from jaxllm.posttrain.prompts import Prompt, load_prompts
from jaxllm.posttrain.rollout_batch import Judgement, judged_group, rollout_batch
from jaxllm.posttrain.rollouts import Rollout
from jaxllm.text import ChatTemplate
from tests.posttrain import environments
from tests.posttrain.tiny_policy import policy_run

HERE = "tests.posttrain.environments:"


def test_tools_are_called_and_their_failures_are_read():
    tools = ToolEnvironment(environments.add, environments.fails)

    def said(call: object) -> tuple[str, int]:
        text = call if isinstance(call, str) else json.dumps(call)
        found = tools.step(f"Let me see. <tool_call>\n{text}\n</tool_call>")
        assert not found.done
        assert found.calls == 1
        return found.text, found.flaws

    assert said({"name": "add", "arguments": {"first": 2, "second": 3}}) == ("5", 0)
    assert said({"name": "add", "arguments": {"first": 2}}) == ("3", 0)
    assert said({"name": "fails", "arguments": {"text": "x"}}) == ("error: LookupError: x", 1)
    assert said({"name": "ad", "arguments": {}}) == ("error: there is no tool 'ad'; legal: add, fails", 1)
    assert said({"name": "add", "arguments": {"third": 1}})[1] == 1
    assert "missing a required argument: 'first'" in said({"name": "add", "arguments": {}})[0]
    assert "not valid JSON" in said("{add(1)}")[0]
    assert "is an object" in said([1])[0]
    assert tools.step("The sum is 5.").done
    assert tools.step('{"a": 1}').done, "an object that is no call"
    both = tools.step(
        '<tool_call>{"name": "add", "arguments": {"first": 1}}</tool_call><tool_call>{"name": "x"}</tool_call>'
    )
    assert both.text.splitlines()[0] == "2"
    assert (both.calls, both.flaws) == (2, 1)
    assert written_calls('{"name": "add", "arguments": {}}') == ['{"name": "add", "arguments": {}}']
    assert written_calls('<tool_call>{"name": "add"') == ['{"name": "add"'], "a call that is cut is a failed call"


def test_schemas_of_tools():
    function = tool_schema(environments.add)["function"]
    assert function == {
        "name": "add",
        "description": "Sum of two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"first": {"type": "integer"}, "second": {"type": "integer"}},
            "required": ["first"],
        },
    }
    with pytest.raises(ConfigError, match="annotate its parameter value with one of str, int"):
        find_environment(f"tools:{HERE}unannotated")


def test_calculator():
    assert calculator("2 + 3*(4-1)") == "11"
    assert calculator("-7 // 2") == "-4"
    assert calculator("1/4") == "0.25"
    assert calculator("6/3") == "2"
    for bad in ("2**9", "a", "(1", "1" * 300, "len('a')"):
        with pytest.raises(ValueError, match=r"arithmetic expression|takes numbers|more than 200"):
            calculator(bad)


@pytest.mark.parametrize(
    ("code", "result"),
    [
        ("import json, math; print(json.dumps(math.floor(2.5)))", "2"),
        ("open('x', 'w').write('a'); print(open('x').read())", "a"),
        ("print('a'); 1/0", "a\nZeroDivisionError: division by zero"),
        ("x = ", "SyntaxError: invalid syntax"),
        ("import socket", "PermissionError: the sandbox has no module socket"),
        ("import subprocess", "PermissionError: the sandbox has no module subprocess"),
        ("import ctypes", "PermissionError: the sandbox has no module ctypes"),
        ("import os; os.fork()", "PermissionError: the sandbox does not allow os.fork"),
        ("import os; os.system('true')", "PermissionError: the sandbox does not allow os.system"),
        ("print(open('/etc/passwd').read())", "PermissionError: the sandbox has no access to /etc/passwd"),
        ("import os; print(os.listdir('/'))", "PermissionError: the sandbox has no access to /"),
        ("open('../x', 'w')", "PermissionError: the sandbox has no access to ../x"),
        ("import os; os.mkdir('../x')", "PermissionError: the sandbox does not allow os.mkdir"),
        ("import sqlite3; sqlite3.connect('../x')", "PermissionError: the sandbox does not allow sqlite3.connect"),
        ("x = 'a' * 10**10", "MemoryError"),
        ("raise SystemExit", ""),
    ],
)
def test_sandbox(code, result):
    assert run_python(code, seconds=10) == result


def test_sandbox_stops_what_runs_on_and_cuts_what_is_long():
    assert run_python("print(1, flush=True)\nwhile True: pass", seconds=1) == "1\n[stopped after 1 s]"
    assert run_python("print('a' * 99)", output=10) == "a" * 10 + "\n[cut]"
    assert python("print(6 * 7)") == "42"


def test_bounded_calls():
    waiting = threading.Event()
    results = bounded_calls([lambda: 1, lambda: 1 / 0, lambda: waiting.wait(30), *([lambda: 2] * 20)], 0.3)
    waiting.set()
    assert results[0].value == 1
    assert results[1].failure == "raised ZeroDivisionError: division by zero"
    assert results[2].failure == "took longer than rollout.reward_timeout = 0.3 s"
    assert [one.value for one in results[3:]] == [2] * 20
    began = time.monotonic()
    assert bounded_calls([lambda: time.sleep(0.01) or 3], 0)[0].value == 3
    assert time.monotonic() - began < 20


def test_names_of_environments():
    assert isinstance(find_environment("python")(), ToolEnvironment)
    assert isinstance(find_environment(f"{HERE}Echo")(), environments.Echo)
    for spec, message in [
        ("calculater", "Did you mean 'calculator'"),
        ("python:x", "takes no argument"),
        ("tools:", "has no function"),
        ("nowhere:f", "cannot be imported"),
        ("math:pi", "is a float, which cannot be called"),
    ]:
        with pytest.raises(ConfigError, match=message):
            find_environment(spec)


def test_turns_are_separated_as_the_chat_template_does():
    """Tokens of turns and of what is between them are those of the conversation; text is never a control token."""
    source = open_source(find_model("smollm2"))
    tokenizer, template = source.tokenizer, source.template
    assert template is not None
    tools = ToolEnvironment(calculator)
    form = TurnFormat(tokenizer, template, tools)
    chat = [
        {"role": "user", "content": "What is 2 + 3?"},
        {"role": "assistant", "content": "Let me add them."},
        {"role": "tool", "content": "5"},
    ]

    def ids(text: str, *, specials: bool = True) -> list[int]:
        return [int(i) for i in tokenizer.encode(text, specials=specials)]

    prompt, whole = (ids(template.render(part, list(tools.tools))) for part in (chat[:1], chat))
    turn = [*ids(chat[1]["content"], specials=False), *ids("<|im_end|>")]
    assert [*prompt, *turn, *form.between("5", turn[-1])] == whole
    assert [*prompt, *turn[:-1], *form.between("5", turn[-2])] == whole, "a turn that was cut is ended"
    (end,) = ids("<|im_end|>")
    forged = form.between("<|im_end|>", turn[-1])
    assert list(forged).count(end) == list(form.between("", turn[-1])).count(end)
    assert len(forged) > len(form.between("", turn[-1]))
    with pytest.raises(DataError, match="no conversations with an environment"):
        TurnFormat(tokenizer, ChatTemplate("{{ messages[0].content }}"), tools).between("x", 0)
    plain = TurnFormat(ByteTokenizer(), None, tools)
    assert list(plain.between("ab", 0)) == list(ByteTokenizer().encode("ab"))


def test_tools_are_described_where_the_template_leaves_them_out(tmp_path):
    source = open_source(find_model("smollm2"))
    tools = ToolEnvironment(calculator).tools
    (found, *_), _ = load_prompts("arithmetic:1", source.tokenizer, source.template, 400, tools)
    assert found.text.count("<|im_start|>system") == 1
    assert '"name": "calculator"' in found.text
    assert "<tool_call>" in found.text
    knows = ChatTemplate("{% if tools %}{{ tools[0].function.name }}:{% endif %}{{ messages[0].content }}")
    (found, *_), _ = load_prompts("arithmetic:1", ByteTokenizer(), knows, 400, tools)
    assert found.text.startswith("calculator:What is"), "a template with tools says so itself"


@pytest.mark.drawn(3)
def test_only_what_the_policy_wrote_is_a_target(tmp_path):
    """Whole runs: every episode of a step, its targets and log-probabilities; the environment's tokens are context."""
    config = policy_run(
        tmp_path, environment=f"{HERE}Echo", rewards=(), max_tokens=20, steps=2, group=4,
    )  # fmt: skip
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, batch_size=16))
    result = train_policy(config)
    rows = [json.loads(line) for line in (result.directory / "episodes.jsonl").read_text().splitlines()]
    assert len(rows) == 32
    assert {row["finish"] for row in rows} <= {"stop", "length"}
    two = [row for row in rows if row["turns"] == 2]
    assert two
    for row in two:
        assert row["written_tokens"] < row["tokens"], "the observation is no token of the policy"
        assert row["completion"].count("<") >= 1
        assert row["terms"]["environment"] == row["reward"]
    metrics = [json.loads(line) for line in (result.directory / "metrics.jsonl").read_text().splitlines()]
    last = [row for row in metrics if "turns" in row][-1]
    assert 1 <= last["turns"] <= 2
    assert last["mismatch"] < 1e-5, "on-policy: log-probabilities of both turns are those of the training forward pass"


def test_batches_of_episodes():
    written = (True, True, False, False, True)
    one = Rollout(
        Prompt((7, 8), "p", {}), (1, 2, 3, 4, 5), (-1.0, -2.0, 0.0, 0.0, -5.0), (1,) * 5, "t", "stop", written,
        2, 2, 1, 1.0,
    )  # fmt: skip
    from jaxllm.posttrain.algorithms import ALGORITHMS
    from jaxllm.posttrain.rollout_batch import Episode

    batch = rollout_batch([Episode(one, Judgement(1.0, {}), 1.0, 0.5)], ALGORITHMS["grpo"], 1, 8, 8).batch
    assert batch.old_logprobs is not None
    assert batch.advantages is not None
    assert batch.tokens[0, :6].tolist() == [7, 8, 1, 2, 3, 4]
    assert batch.targets[0].tolist() == [-1, 1, 2, -1, -1, 5, -1, -1]
    assert batch.old_logprobs[0].tolist() == [0, -1, -2, 0, 0, -5, 0, 0]
    assert batch.advantages[0].tolist() == [0, 0.5, 0.5, 0, 0, 0.5, 0, 0]
    clean = dataclasses.replace(one, flaws=0)
    kept = judged_group([one, clean, one, one], [Judgement(1.0, {})] * 4, ALGORITHMS["grpo_roc"], 1, 8, 0)
    assert kept[0].rollout.flaws == 0, "the success without a failed call is kept"


@pytest.mark.drawn(0.6)
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Raises", "the environment raised KeyError: 'no such state'"),
        ("Slow", "the environment took longer than rollout.reward_timeout = 0.05 s"),
        ("Wrong", "the environment gave a str, no Observation"),
    ],
)
def test_environments_that_fail_are_named(tmp_path, name, message):
    from jaxllm.posttrain.rewards import RewardError

    timeout = 0.05 if name == "Slow" else 9.0
    config = policy_run(tmp_path, environment=f"{HERE}{name}", rewards=(), max_tokens=12, reward_timeout=timeout)
    with pytest.raises(RewardError, match="completions have no reward") as caught:
        train_policy(config)
    assert message in str(caught.value)


def test_settings_of_environments(tmp_path):
    with pytest.raises(ValueError, match=r"rollout\.max_turns = 0"):
        policy_run(tmp_path, max_turns=0)
    with pytest.raises(ConfigError, match="environment = 'nothing'"):
        policy_run(tmp_path, environment="nothing")
    with pytest.raises(ConfigError, match="rewards is empty"):
        policy_run(tmp_path, rewards=())
    one, other = (
        open_policy_data(policy_run(tmp_path, environment=spec)).source.identity for spec in ("", "calculator")
    )
    assert one != other


def test_tasks_of_reasoning_gym():
    if importlib.util.find_spec("reasoning_gym") is None:
        with pytest.raises(DataError, match=r"pip install 'jaxllm\[gym\]'"):
            load_prompts("gym:chain_sum:3", ByteTokenizer(), None, 500)
        return
    from jaxllm.posttrain.reasoning_gym_tasks import gym_score

    found, _ = load_prompts("gym:chain_sum,leg_counting:3", ByteTokenizer(), None, 900)
    assert len(found) == 6
    assert [gym_score("", one.row["answer"], one.row) for one in found] == [1.0] * 6
    assert gym_score("", f"So <answer>{found[0].row['answer']}</answer>.", found[0].row) == 1.0
    assert gym_score("", "x", found[0].row) < 0.5
    with pytest.raises(DataError, match=r"has no task 'chain_sums'\. Did you mean 'chain_sum'"):
        load_prompts("gym:chain_sums", ByteTokenizer(), None, 500)
    with pytest.raises(DataError, match="no number of questions"):
        load_prompts("gym:chain_sum:x", ByteTokenizer(), None, 500)


def test_rewards_are_added_to_those_of_the_environment(tmp_path):
    from jaxllm.posttrain.policy_training import RolloutFeed

    config = policy_run(tmp_path, environment=f"{HERE}Echo")
    feed = RolloutFeed(config, open_policy_data(config))
    rollout = Rollout(Prompt((1,), "p", {}), (1,), (-1.0,), (1,), "ab", "stop", environment_reward=0.5)
    found = feed._judge(rollout)
    assert found.reward == 1.5
    assert found.terms["environment"] == 0.5
    assert "which is not finite" in feed._judge(dataclasses.replace(rollout, environment_reward=math.inf)).failure
    assert feed._judge(dataclasses.replace(rollout, failure="broke")).failure == "broke"
    assert np.isnan(feed._judge(dataclasses.replace(rollout, failure="broke")).reward)
