"""Chat templates: the text is transformers', and what computes without end or takes all memory ends alone."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from web_gateway import NAME, RunningGateway, running_gateway, wait_until

from swarmllm import LocalSwarm
from swarmllm.errors import ConfigurationError
from swarmllm.gateway.engine.chat_templates import MAX_CHARS, ChatTemplates

pytestmark = pytest.mark.rotates(6, whole_file=True)

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": '<Hällo> "you" 😀 \u2028'}]},
    {"role": "assistant", "content": "Yes ", "reasoning_content": "Hm."},
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}]
TEMPLATES = {
    "a loop": "{{ bos_token }}{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}",
    "all that transformers adds": "{% set ns = namespace(n=0) %}{% for m in messages %}{% if loop.first %}"
    "{% continue %}{% endif %}{% set ns.n = ns.n + 1 %}{% generation %}{{ m.content | tojson }}"
    "{% endgeneration %}{% endfor %}"
    "{{ ns.n }}{{ tools | tojson(indent=2) }}{{ strftime_now('%Y') }}{{ dict(a=1).items() | list }}",
    "options": "{% if not thinks is defined %}{% set thinks = true %}{% endif %}{{ thinks }}"
    "{{ effort | default('low') }}"
    "{% for m in messages %}{{ m.reasoning_content }}{{ m.content }}{% endfor %}",
}
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
HOSTILE = {
    "loops": (ENDLESS, "computed for more than"),
    "a constant, which the compiler would compute": ("{{ 'a' * 10**12 }}", "512 MiB of memory"),
    "a power": ("{{ (10 ** (10 ** 9)) > 1 }}", "computed for more than"),
    "doubling": (
        "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
        "512 MiB of memory",
    ),
    "a long text": (f"{{{{ 'a' * {MAX_CHARS + 1} }}}}", f"a text of more than {MAX_CHARS} characters"),
    "brackets": ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "can't take these messages"),
    "an error": ("{{ 1 / 0 }}", "can't take these messages: division by zero"),
    "a refusal": ("{{ raise_exception('no') }}", "can't take these messages: no"),
    "no template": ("{% for %}", "can't take these messages"),
    "the inside of Python": ("{{ messages.__class__.__base__.__subclasses__() }}", "can't take these messages"),
}


@pytest.fixture(scope="module")
def templates() -> Iterator[ChatTemplates]:
    """Which may compute for a short time only."""
    templates = ChatTemplates(limit_s=0.3)
    yield templates
    templates.close()


def rendered(templates: ChatTemplates, template: str, *, go_on: bool = False, **given: Any) -> str:
    own = {"bos_token": "<s>"}
    return templates.render(template, MESSAGES, TOOLS, given=given, own=own, go_on=go_on)


@pytest.mark.parametrize("go_on", [False, True])
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_text_is_transformers(templates: ChatTemplates, tokenizer: Any, name: str, *, go_on: bool) -> None:
    given: dict[str, Any] = {"thinks": {"a": [1, 2.5, None]}, "effort": "high"} if name == "options" else {}
    expected = tokenizer.apply_chat_template(
        MESSAGES,
        TOOLS,
        chat_template=TEMPLATES[name],
        tokenize=False,
        continue_final_message=go_on,
        add_generation_prompt=not go_on,
        **given,
    )
    assert rendered(templates, TEMPLATES[name], go_on=go_on, **given) == expected


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates_end(templates: ChatTemplates, name: str) -> None:
    template, words = HOSTILE[name]
    with pytest.raises(ConfigurationError, match=words):
        rendered(templates, template)
    assert rendered(templates, "{{ messages | length }}") == "3"


@pytest.mark.parametrize(
    "name", ["messages", "tools", "chat_template", "add_generation_prompt", "range", "bos_token", "x"]
)
def test_names_that_are_not_the_requests(templates: ChatTemplates, name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"can't hold {name}: this model's template knows effort, thinks$"):
        rendered(templates, TEMPLATES["options"] + "{{ bos_token }}", **{name: 1})
    with pytest.raises(ConfigurationError, match=f"can't hold {name}: leave it out"):
        rendered(templates, TEMPLATES["a loop"], **{name: 1})


def test_a_closed_one_leaves_nothing() -> None:
    templates = ChatTemplates()
    templates.start()
    (process,) = templates.processes
    templates.close()
    assert process.poll() is not None
    with pytest.raises(ConfigurationError, match="shutting down"):
        rendered(templates, "")


# ---------------------------------------------------------------------- messages that a template leaves out

SAID = "Tell me a story about a fox."
USER = {"role": "user", "content": SAID}
TOLD = {"role": "system", "content": "SYSTEM"}
ASKED: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "function": {"name": "f"}}]}
FOUND = {"role": "tool", "tool_call_id": "1", "content": "dry"}
NO_SYSTEM = "the chat template of embedded has no place for a system prompt: put its text into the user's message"


@pytest.mark.parametrize(
    ("path", "more", "words"),
    [
        ("/v1/chat/completions", {"messages": [TOLD, USER]}, NO_SYSTEM),
        ("/v1/chat/completions", {"messages": [{**TOLD, "role": "developer"}, USER]}, NO_SYSTEM),
        ("/v1/chat/completions", {"messages": [USER, TOLD, USER]}, "no place for system messages after the first"),
        ("/v1/chat/completions", {"messages": [USER, ASKED]}, "no place for earlier calls of tools"),
        (
            "/v1/chat/completions",
            {"messages": [USER, {"role": "assistant", "content": "Hm."}, FOUND]},
            "no place for results of tools",
        ),
        ("/v1/messages", {"messages": [USER], "system": "SYSTEM", "max_tokens": 2}, NO_SYSTEM),
        ("/v1/messages/count_tokens", {"messages": [USER], "system": "SYSTEM"}, NO_SYSTEM),
        ("/v1/responses", {"input": SAID, "instructions": "SYSTEM"}, NO_SYSTEM),
        ("/api/chat", {"messages": [TOLD, USER]}, NO_SYSTEM),
        ("/api/generate", {"prompt": SAID, "system": "SYSTEM"}, NO_SYSTEM),
        ("/tokenize", {"messages": [TOLD, USER]}, NO_SYSTEM),
    ],
)
def test_what_a_template_leaves_out_is_refused(
    gateway: RunningGateway, path: str, more: dict[str, Any], words: str
) -> None:
    for _ in range(2):  # a refusal is never forgotten
        response = gateway.http.post(path, json={"model": NAME, **more})
        assert response.status_code == 400, response.text
        found = response.json()
        assert words in (found["error"] if path.startswith("/api/") else found["error"]["message"])
        assert (found.get("type") == "error") == path.startswith("/v1/messages")


def test_an_empty_message_needs_no_place(gateway: RunningGateway) -> None:
    nothing: list[Any] = ["", " \n", [{"type": "text", "text": ""}]]
    for empty in nothing:
        asked = {"messages": [{"role": "system", "content": empty}, USER], "max_tokens": 1}
        assert gateway.http.post("/v1/chat/completions", json=asked).status_code == 200


PLACES = {
    "escaped and trimmed": "{% for m in messages %}{{ m.role }}: {{ m.content | trim | tojson }}"
    "{{ m.tool_calls }}\n{% endfor %}",
    "within the user's turn": "{% if messages[0].role == 'system' %}{% set told = messages[0].content %}{% endif %}"
    "{% for m in messages if m.role != 'system' %}{% if loop.first %}{{ told }}\n{% endif %}{{ m.content }}"
    "{{ m.tool_calls }}{% endfor %}",
    "only with the user's last turn": "{% if messages[0].role == 'system' %}{% set told = messages[0].content %}"
    "{% endif %}{% for m in messages if m.role != 'system' %}{% if m.role == 'user' and loop.last %}{{ told }}\n"
    "{% endif %}{{ m.content }}{{ m.tool_calls }}{% endfor %}",
    "refused by itself": "{% for m in messages %}{% if m.role == 'system' and m.content != '<told> ' %}"
    "{{ raise_exception('no') }}{% endif %}{{ m.content if m.role == 'user' }}{{ m.tool_calls }}"
    "{{ m.content if m.role == 'tool' }}{% endfor %}",
}


@pytest.mark.parametrize("name", PLACES)
def test_a_place_of_any_kind_is_a_place(name: str) -> None:
    templates, told = ChatTemplates(), {"role": "system", "content": "<told> "}
    try:
        for messages in ([told, USER, ASKED, FOUND], [told, USER]) * 2:
            render = partial(templates.render, PLACES[name], tools=(), given={}, own={}, go_on=False)
            assert templates.without_place(PLACES[name], messages, render(messages), render) is None
    finally:
        templates.close()


def test_a_place_is_looked_for_once(templates: ChatTemplates) -> None:
    calls = []

    def render(messages: Any) -> str:
        calls.append(messages)
        return str(messages)

    for _ in range(3):
        assert templates.without_place("any", [TOLD, USER], render([TOLD, USER]), render) is None
    assert len(calls) == 3 + 2


def test_a_shortened_result_has_a_place(templates: ChatTemplates) -> None:
    template = "{% for m in messages %}{{ '…' if m.role == 'tool' and not loop.last else m.content }}{{ m.tool_calls }}"
    render = partial(templates.render, template + "{% endfor %}", tools=(), given={}, own={}, go_on=False)
    for messages in ([USER, ASKED, FOUND] * 2, [USER, ASKED, FOUND]):
        assert templates.without_place("shortened", messages, render(messages), render) is None


def test_a_text_with_the_time_in_it_shows_no_place(templates: ChatTemplates) -> None:
    numbers = iter(range(100))
    left_out = [USER["content"]]
    for _ in range(2):  # nothing is taken for known
        assert templates.without_place("timed", [TOLD, USER], "", lambda _: f"{next(numbers)}{left_out}") is None
    assert templates.without_place("timed", [TOLD, USER], str(left_out), lambda _: str(left_out)) is not None


@pytest.fixture(scope="module")
def hostile(swarm: LocalSwarm) -> Iterator[RunningGateway]:
    """A gateway of a checkpoint whose template never ends."""
    with running_gateway(swarm.initial_peers, served_name=("embedded",), chat_template=ENDLESS) as gateway:
        model = gateway.gateway.models.first
        model.templates.close()
        model.templates = ChatTemplates(limit_s=0.3)
        yield gateway


def test_eight_endless_loops_end_no_gateway(hostile: RunningGateway) -> None:
    messages = [{"role": "user", "content": "?"}]
    asked: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {},
        "/tokenize": {},
        "/api/chat": {"model": "embedded"},
        "/v1/messages": {"model": "embedded", "max_tokens": 4},
    }

    def answer(path: str) -> str:
        return hostile.http.post(path, json={"messages": messages, **asked[path]}).text

    wait_until(lambda: hostile.http.get("/health").status_code == 200, "the gateway saw all blocks")
    with ThreadPoolExecutor(8) as threads:
        answers = threads.map(answer, [*asked] * 2)
        for _ in range(8):  # beside them
            health = hostile.http.get("/health")
            assert health.status_code == 200, health.text
            completion = hostile.http.post("/v1/completions", json={"prompt": "Once", "max_tokens": 1})
            assert completion.status_code == 200, completion.text
        for text in answers:
            assert "computed for more than 0.3 s" in text
