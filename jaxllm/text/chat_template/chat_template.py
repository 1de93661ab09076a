"""Chat templates: render a list of messages as the prompt text that a model was trained on.

A chat template is a jinja2 program that comes with a model: in `chat_template.jinja`, `chat_template` of
`tokenizer_config.json`, `chat_template.json`, or a GGUF file's metadata. Settings, globals and filters are those of
transformers' `apply_chat_template`, so rendered text is the same; `template_sandbox.py` restricts what it may do.
"""

import contextlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxllm.files import DataError, atomic, digest
from jaxllm.text.chat_template.content_marks import ContentMarks
from jaxllm.text.gguf_special_tokens import special_id
from jaxllm.text.tokenizer import Tokenizer
from jaxllm.text.tokenizer_files import CONFIG_FILE, read_config, read_object, token_name

if TYPE_CHECKING:
    import jinja2

TEMPLATE_FILE = "chat_template.jinja"
JSON_FILE = "chat_template.json"
NAMED_FOLDER = "additional_chat_templates"

DEFAULT, TOOL_USE = "default", "tool_use"

# Message fields that hold reasoning. Templates read the first; gpt-oss reads the second.
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class TemplateError(DataError):
    """A chat template is invalid or refuses the conversation; the message says which and why."""


class ChatTemplate:
    """Chat template of a model.

    Args:
        source: the template, or several by name: "default", and "tool_use" for conversations with tools.
        bos, eos: names of the tokens that templates refer to as `bos_token` and `eos_token`.
        tokens: further special tokens, such as {"pad_token": "<pad>"}.
        where: name of the template in errors.
    """

    def __init__(
        self,
        source: str | Mapping[str, str],
        bos: str | None = None,
        eos: str | None = None,
        *,
        tokens: Mapping[str, str] | None = None,
        where: str = "chat template",
    ):
        self.sources = {DEFAULT: source} if isinstance(source, str) else dict(source)
        self.tokens = {"bos_token": bos, "eos_token": eos, **(tokens or {})}
        self._where = where

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Prompt text of a conversation; `encode` gives its token ids too.

        Args:
            messages: mappings with "role", "content", and other fields that the template reads ("tool_calls", ...).
            tools: JSON schemas of functions that the model may call.
            add_generation_prompt: end with the beginning of the assistant's turn.
            variables: further template variables, such as `enable_thinking`.

        Raises:
            TemplateError: a message is malformed, the template refuses the conversation, or rendering fails.
        """
        import jinja2

        from jaxllm.text.chat_template import template_sandbox

        for number, message in enumerate(messages, 1):
            if not isinstance(message, Mapping) or "role" not in message:
                raise TemplateError(f"{self._where}: message {number} is no mapping with a 'role'")
        chat = [_with_reasoning(message) for message in self._plain(list(messages))]
        given = {"messages": chat, "tools": self._plain(tools and list(tools)), "documents": None}
        named = {name: token for name, token in self.tokens.items() if token is not None}
        extra = self._plain(variables)
        try:
            template = self._compiled(TOOL_USE if tools is not None and TOOL_USE in self.sources else DEFAULT)
            return template_sandbox.run(
                template, {**given, "add_generation_prompt": add_generation_prompt, **named, **extra}
            )
        except template_sandbox.TemplateRefused as error:
            raise TemplateError(f"{self._where}: the model's template refuses this conversation: {error}") from None
        except jinja2.TemplateError as error:
            raise TemplateError(f"{self._where}: {_described(error)}") from None
        except Exception as error:  # the template's expressions may raise any Python exception
            raise TemplateError(
                f"{self._where}: it fails on this conversation: {type(error).__name__}: {error}"
            ) from None

    def content_marks(self, tokenizer: Tokenizer, *given: Any, parse_special: bool = False) -> ContentMarks:
        """Marks for a conversation; with ``parse_special`` its content may become control tokens, and is not marked.

        Args:
            tokenizer: tokenizer of the model.
            given: messages, tools and variables; each is marked before it is given to ``render``.
            parse_special: names of control tokens in content are those tokens.
        """
        return ContentMarks(frozenset() if parse_special else tokenizer.control_names, given, self._constants)

    def encode(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        *,
        parse_special: bool = False,
        **variables: Any,
    ) -> tuple[str, list[int]]:
        """(rendered text, token ids) of a conversation, in which names of control tokens in content are text.

        Raises:
            DataError: see ``render``, or the vocabulary cannot spell the text.
        """
        marks = self.content_marks(tokenizer, messages, tools, variables, parse_special=parse_special)
        chat, about = marks.mark(messages), marks.mark(variables)
        text = self.render(chat, marks.mark(tools), add_generation_prompt, **about)
        return marks.text(text), marks.encode(tokenizer, text)

    @cached_property
    def _constants(self) -> tuple[str, ...]:
        """Strings in the templates' source."""
        import jinja2
        import jinja2.nodes

        found = set[str]()
        for source in self.sources.values():
            with contextlib.suppress(jinja2.TemplateError):  # said where it is rendered
                nodes = self._environment.parse(source).find_all(jinja2.nodes.Const)
                found |= {node.value for node in nodes if isinstance(node.value, str)}
        return tuple(sorted(found))

    @cached_property
    def fingerprint(self) -> str:
        """Hash (sha256) over everything that determines the rendered text: templates and special tokens."""
        return digest([self.sources, self.tokens])

    def save(self, folder: Path | str) -> None:
        """Writes `chat_template.jinja`, and other named templates where transformers looks for them."""
        folder = Path(folder)
        for name, source in self.sources.items():
            file = folder / TEMPLATE_FILE if name == DEFAULT else folder / NAMED_FOLDER / f"{name}.jinja"
            with atomic(file) as opened:
                opened.write(source.encode())

    def _compiled(self, name: str) -> "jinja2.Template":
        if name not in self._templates:
            if name not in self.sources:
                raise TemplateError(f"{self._where}: there is no template {name!r}, only {sorted(self.sources)}")
            self._templates[name] = self._environment.from_string(self.sources[name])
        return self._templates[name]

    @cached_property
    def _templates(self) -> "dict[str, jinja2.Template]":
        return {}

    @cached_property
    def _environment(self) -> "jinja2.Environment":
        from jaxllm.text.chat_template import template_sandbox

        return template_sandbox.environment()

    def _plain(self, value: Any) -> Any:
        """Copy in plain JSON types, so that templates cannot reach objects with methods of their own."""
        if value is None or isinstance(value, bool):
            return value
        for kind in (str, int, float):
            if isinstance(value, kind):
                return kind(value)
        if isinstance(value, Mapping):
            return {self._plain(key): self._plain(one) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [self._plain(one) for one in value]
        raise TemplateError(f"{self._where}: messages are made of JSON's types; this has a {type(value).__name__}")


def load_template(path: Path | str) -> ChatTemplate | None:
    """Loads the chat template of a model's folder, or a template file; None where there is none.

    Raises:
        DataError: a file cannot be read.
    """
    path = Path(path).expanduser()
    folder = path if path.is_dir() else path.parent
    config = read_config(folder)
    tokens = {name: found for name in _TOKENS if (found := token_name(config.get(name))) is not None}
    sources = _sources(folder, config) if path.is_dir() else {DEFAULT: _text(path)}
    return ChatTemplate(sources, tokens=tokens, where=str(path)) if sources else None


def template_from_gguf(metadata: Mapping[str, Any], *, where: str = "GGUF metadata") -> ChatTemplate | None:
    """Chat template of a GGUF file's metadata (keys to values); None where there is none.

    Raises:
        TemplateError: the template is not text.
    """
    key, listed = "tokenizer.chat_template", metadata.get("tokenizer.ggml.tokens", ())
    found = {name: one for name, one in metadata.items() if _is_under(name, key)}
    for name, one in found.items():
        if not isinstance(one, str):
            raise TemplateError(f"{where}: {name} is a {type(one).__name__}; a template is text")
    sources = {name[len(key) + 1 :] or DEFAULT: one for name, one in found.items()}
    ids = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    tokens: dict[str, str] = {}
    for name, short in ids.items():
        with contextlib.suppress(DataError):  # invalid ids are reported when the tokenizer is opened
            if (found_id := special_id(metadata, short, where=where)) is not None:
                tokens[name] = str(listed[found_id])
    return ChatTemplate(sources, tokens=tokens, where=where) if sources else None


def _is_under(name: str, key: str) -> bool:
    return name == key or name.startswith(f"{key}.")


def _sources(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates of a folder by name; a file of its own takes precedence over the configuration."""
    found, file = config.get("chat_template"), folder / CONFIG_FILE
    if (folder / JSON_FILE).is_file() and found is None:
        file = folder / JSON_FILE
        found = read_object(file).get("chat_template")
    sources = _by_name(found, file)
    if (folder / TEMPLATE_FILE).is_file():
        sources[DEFAULT] = _text(folder / TEMPLATE_FILE)
    return sources | {one.stem: _text(one) for one in sorted((folder / NAMED_FOLDER).glob("*.jinja"))}


def _by_name(found: Any, file: Path) -> dict[str, str]:
    """Templates by name from `chat_template`: a text, a list of objects with name and template, or a mapping."""
    if isinstance(found, str):
        return {DEFAULT: found}
    if isinstance(found, list) and all(isinstance(one, dict) and {"name", "template"} <= one.keys() for one in found):
        found = {one["name"]: one["template"] for one in found}
    sources = {} if found is None else found
    if not isinstance(sources, dict) or not all(isinstance(one, str) for pair in sources.items() for one in pair):
        raise TemplateError(
            f"{file}: chat_template is invalid; legal: a text, or a list of objects with 'name' and 'template'"
        )
    return sources


def _text(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except FileNotFoundError:
        raise TemplateError(f"{file}: no such file") from None
    except UnicodeDecodeError as error:
        raise TemplateError(f"{file}: not a template ({error})") from None


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its reasoning, whatever the field's name, under every name that templates read."""
    reasoning = next((message[name] for name in _REASONING_FIELDS if message.get(name) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _described(error: "jinja2.TemplateError") -> str:
    import jinja2

    line = f" (line {error.lineno})" if isinstance(error, jinja2.TemplateSyntaxError) else ""
    return f"the template cannot be used{line}: {error.message}"
