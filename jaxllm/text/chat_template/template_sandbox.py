"""Sandbox for untrusted chat templates: no files, no access to Python's internals, bounded time and memory.

jinja2's sandbox denies access to Python's internals, but not endless loops or memory exhaustion. Here the parsed
template is rewritten so that each loop iteration, intermediate value and output is counted (`template_limits.py`), on
any thread. The result size of operations that may amplify ("a" * 10**9, padding, formatting, `**`) is checked first.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from datetime import datetime
from typing import Any, cast

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from jaxllm.text.chat_template.template_limits import (
    MAX_BITS,
    MAX_SOURCE,
    LimitExceeded,
    ResourceMeter,
    check_format,
    check_method,
    joinable,
)

# Filters that are slow per character.
_SLOW = frozenset({"pprint", "striptags", "title", "urlize", "wordcount", "wordwrap", "xmlattr"})
_MAX_SLOW = 1_000_000
# Filters whose result may be larger than their input: by a width or text among the arguments (`_WIDENING`), or by a
# text inserted at every character (`_INSERTING`).
_WIDENING = frozenset({"batch", "center", "indent", "round", "slice"})
_INSERTING = frozenset({"urlize", "wordwrap"})


class TemplateRefused(jinja2.TemplateError):
    """The template refuses the conversation by calling `raise_exception`."""


# JSON escapes of the characters that mark content (`content_marks.py`), which stay as they are.
_MARK_ESCAPE = re.compile(r"\\(?:u(fd[de][0-9a-f]|e[0-9a-f]{3}|f[0-8][0-9a-f]{2})|.)")

_METER: ContextVar[ResourceMeter] = ContextVar("meter")


def run(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    """Renders a template of `environment()` within the limits.

    Raises:
        jinja2.TemplateError: the template fails, exceeds a limit, or refuses the conversation.
    """
    meter = ResourceMeter()
    token = _METER.set(meter)
    try:
        return "".join(template.generate(variables))
    except RecursionError:
        raise LimitExceeded("it calls itself without end") from None
    except MemoryError:
        raise LimitExceeded("it needs more memory than there is") from None
    finally:
        _METER.reset(token)


class _Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**", "%"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        if len(source) > MAX_SOURCE:
            raise LimitExceeded(f"it is {len(source):,} characters long; at most {MAX_SOURCE:,}")
        tree = super()._parse(source, name, filename)
        for node in tree.find_all((nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)):
            raise jinja2.TemplateSyntaxError("it asks for another file; a chat template is one text", node.lineno)
        return _Metered(self).visit(tree)

    # Called by the rewritten template.

    def step(self) -> None:
        _METER.get().step()

    def made(self, value: Any) -> Any:
        return _METER.get().made(value)

    def written(self, value: Any) -> Any:
        return _METER.get().written(value)

    # Hooks of jinja2's sandbox.

    def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
        raise SecurityError(
            f"it reaches for {attribute!r} of a {type(obj).__name__}, which is outside what a template may see"
        )

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        meter = _METER.get()
        if operator == "**" and isinstance(left, int) and isinstance(right, int) and abs(left) > 1:
            if left.bit_length() * abs(right) > MAX_BITS:
                raise LimitExceeded(f"it makes a number of {left.bit_length() * abs(right):,} bits")
        elif operator == "%" and isinstance(left, str | bytes):
            check_format(meter, str(left), right if isinstance(right, tuple) else (right,))
        elif operator == "*":
            for many, times in ((left, right), (right, left)):
                if isinstance(times, int) and not isinstance(many, int | float):
                    meter.check_size(meter.size(many) * max(times, 0))
        return super().call_binop(context, operator, left, right)

    def call(self, context: jinja2.runtime.Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        if getattr(function, "__self__", None) is self:  # step, made, written: a template cannot name them itself
            return function(*args)
        method = getattr(function, "__wrapped__", function)  # jinja2 wraps str.format
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(owner, str | bytes | int | float):
            args = check_method(_METER.get(), owner, name, args, kwargs)
        return super().call(context, function, *args, **kwargs)


def _metered_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter with its input checked and its result counted."""
    skip = 1 if hasattr(function, "jinja_pass_arg") else 0  # the first argument is the context or environment

    def filtered(*args: Any, **kwargs: Any) -> Any:
        meter = _METER.get()
        value, given = args[skip], [*args[skip + 1 :], *kwargs.values()]
        if name in _SLOW and meter.size(value) > _MAX_SLOW:
            raise LimitExceeded(f"it gives {name} a text of {meter.size(value):,} characters")
        if name == "format":
            check_format(meter, str(value), given)
        elif name == "replace" and len(given) > 1:
            meter.check_size(meter.size(value) + str(value).count(str(given[0])) * len(str(given[1])))
        elif name == "join":
            separator = given[0] if given else ""
            args = (*args[:skip], joinable(meter, separator, value), *args[skip + 1 :])
        elif name == "sum":
            listed = list(value)
            args = (*args[:skip], listed, *args[skip + 1 :])
            if any(isinstance(one, list | tuple) for one in given):  # each addition of lists copies the sum so far
                meter.check_size(len(listed) * meter.size(listed))
        elif name in _WIDENING:
            meter.check_width(given, str(value).count("\n") + 1 if name == "indent" else 1)
        elif name in _INSERTING:
            meter.check_width([one for one in given if isinstance(one, str)], meter.size(value))
        return meter.made(function(*args, **kwargs))

    if skip:
        filtered.jinja_pass_arg = function.jinja_pass_arg  # pyright: ignore[reportFunctionMemberAccess]
    return filtered


class _Metered(NodeTransformer):
    """Rewrites a parsed template so that its steps, values and output are counted."""

    _MAKING = (nodes.Call, nodes.Filter, nodes.BinExpr, nodes.Concat, nodes.Compare, nodes.Getitem)
    _MAKING_LITERALS = (nodes.List, nodes.Dict)

    def __init__(self, environment: jinja2.Environment):
        self._environment = environment

    def _call(self, name: str, *arguments: nodes.Node, at: nodes.Node) -> nodes.Call:
        call = nodes.Call(
            nodes.EnvironmentAttribute(name), cast(list[nodes.Expr], list(arguments)), [], None, None, lineno=at.lineno
        )
        call.set_environment(self._environment)
        return call

    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        node = super().generic_visit(node, *args, **kwargs)
        making = isinstance(node, self._MAKING + self._MAKING_LITERALS)
        making = making or (isinstance(node, nodes.Tuple) and node.ctx == "load")
        if making and not (isinstance(node, nodes.Getitem) and node.ctx != "load"):
            assert isinstance(node, nodes.Expr)
            return self._call("made", node, at=node)
        return node

    def _step(self, node: nodes.Node) -> nodes.Node:
        step = nodes.ExprStmt(self._call("step", at=node), lineno=node.lineno)
        step.set_environment(self._environment)
        return step

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        super().generic_visit(node)
        node.nodes = [self._call("written", self._constant(child), at=child) for child in node.nodes]
        return node

    def _constant(self, node: nodes.Expr) -> nodes.Expr:
        """Literal text between tags as a constant expression."""
        if not isinstance(node, nodes.TemplateData):
            return node
        constant = nodes.Const(node.data, lineno=node.lineno)
        constant.set_environment(self._environment)
        return constant

    def visit_For(self, node: nodes.For) -> nodes.Node:
        super().generic_visit(node)
        node.body.insert(0, self._step(node))
        if node.test is not None:
            node.test = self._call("made", node.test, at=node)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        super().generic_visit(node)
        node.body.insert(0, self._step(node))
        return node

    # jinja2's compiler requires the call or filter of these nodes to stay unwrapped.

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        super().generic_visit(node.call)
        for name in ("args", "defaults", "body"):
            setattr(node, name, [self.visit(one) for one in getattr(node, name)])
        return node

    def visit_FilterBlock(self, node: nodes.FilterBlock) -> nodes.Node:
        super().generic_visit(node.filter)
        node.body = [self.visit(one) for one in node.body]
        return node

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.Node:
        if node.filter is not None:
            super().generic_visit(node.filter)
        node.body = [self.visit(one) for one in node.body]
        return node


class _Generation(jinja2.ext.Extension):
    """Jinja tag `{% generation %}`, which marks generated text for loss masks; rendering gives its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Dict:
    """Template function `dict(...)`; not the class, through which a template could reach Python's internals."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class _Namespace(Namespace):
    """Template function `namespace(...)`; names must not begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # no named self: a template may use `self` as a key
        self, *given = args
        attributes = dict(*given, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"it keeps {name!r} in a namespace; names there do not begin with '_'")


def _raise_exception(message: Any) -> None:
    raise TemplateRefused(str(message))


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Filter `tojson` without HTML escapes of `<`, which jinja2's own filter writes."""
    meter = _METER.get()
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    meter.check_width([indent or 0, *(separators or ())], 1)
    if indent is None and separators is None:
        return _MARK_ESCAPE.sub(_unescaped, encoder.encode(value))
    parts, size = [], 0
    for part in encoder.iterencode(value):
        parts.append(_MARK_ESCAPE.sub(_unescaped, part))
        size += len(part)
        meter.check_size(size)
    return "".join(parts)


def _unescaped(found: re.Match[str]) -> str:
    return chr(int(found[1], 16)) if found[1] else found[0]


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def environment() -> jinja2.Environment:
    """Jinja environment of chat templates: transformers' settings, filters and globals, with limits."""
    made = _Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        optimized=False,  # constant folding at compile time would not be counted
        extensions=[_Generation, jinja2.ext.loopcontrols],
    )
    made.filters["tojson"] = _tojson
    made.filters = {name: _metered_filter(name, function) for name, function in made.filters.items()}
    del made.globals["lipsum"]  # generates random text of any length
    functions = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    made.globals |= {**functions, "dict": _Dict(), "namespace": _Namespace}
    return made
