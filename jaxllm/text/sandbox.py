"""Running a stranger's chat template: no files, no way into Python, and bounded work.

jinja2's sandbox keeps a template away from Python's internals; it does not keep it from running for ever or from
filling the memory. Here every template is rewritten after parsing so that each loop turn, each value it makes and
each piece it writes is counted, on whatever thread it runs. Single operations whose result may be far larger than
what goes in ("a" * 10**9, padding, formatting, `**`) are sized before they run. The limits are far above what the
longest conversation needs.
"""

import json
import re
import time
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

MAX_SOURCE = 1_000_000
"""Characters of a template."""
MAX_OUTPUT = 16_000_000
"""Characters that a template may write, captured text included."""
MAX_VALUE = 16_000_000
"""Size of one value: characters, and entries counted through all levels."""
MAX_MADE = 400_000_000
"""Size of all values made on the way."""
MAX_STEPS = 1_000_000
"""Turns of loops, calls and operations."""
MAX_SECONDS = 10.0
MAX_WIDTH = 100_000
"""A number given to a function that pads, repeats or formats."""
MAX_BITS = 10_000
"""Bits of a whole number."""

# Filters that take their time over each character.
_SLOW = frozenset({"pprint", "striptags", "title", "urlize", "wordcount", "wordwrap", "xmlattr"})
_MAX_SLOW = 1_000_000
# Filters that make more than they are given, by a number or a text among their arguments.
_WIDENING = frozenset({"batch", "center", "format", "indent", "replace", "round", "slice", "tojson", "urlize"})
_WIDENING_METHODS = frozenset({"center", "expandtabs", "format", "format_map", "ljust", "rjust", "to_bytes", "zfill"})


class LimitExceeded(jinja2.TemplateError):
    """A template does more than any conversation needs."""


class TemplateRefused(jinja2.TemplateError):
    """The template itself refuses the conversation, by `raise_exception`."""


class Meter:
    """What one rendering has used."""

    def __init__(self) -> None:
        self._steps = self._made = self._written = 0
        self._deadline = time.monotonic() + MAX_SECONDS
        self._sizes: dict[int, tuple[Any, int]] = {}  # with the value itself, so that no other gets its id

    def step(self) -> None:
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise LimitExceeded(f"it does not come to an end: more than {MAX_STEPS:,} steps")
        if self._steps % 64 == 0 and time.monotonic() > self._deadline:
            raise LimitExceeded(f"it runs for more than {MAX_SECONDS:g} s")

    def made(self, value: Any) -> Any:
        """Counts a value that the template made, and hands it on."""
        self.step()
        size = self.size(value)
        self._made += size
        if size > MAX_VALUE or self._made > MAX_MADE:
            raise LimitExceeded(f"it makes too much on the way: a value of size {size:,}, {self._made:,} in all")
        return value

    def written(self, value: Any) -> Any:
        """Counts what is written, and hands it on."""
        self.step()
        self._written += self.size(value)
        if self._written > MAX_OUTPUT:
            raise LimitExceeded(f"it writes more than {MAX_OUTPUT:,} characters")
        return value

    def size(self, value: Any) -> int:
        """Characters of a text; for a list or mapping the sum over its entries, as if they were written out."""
        if isinstance(value, str | bytes):
            return len(value)
        if isinstance(value, int):
            if value.bit_length() > MAX_BITS:
                raise LimitExceeded(f"it makes a number of {value.bit_length():,} bits")
            return 1
        if isinstance(value, type({}.items()) | type({}.keys()) | type({}.values())):
            value = value.mapping
        if not isinstance(value, list | tuple | Mapping):
            return 1
        if (known := self._sizes.get(id(value))) is not None:
            return known[1]
        entries = [*value.keys(), *value.values()] if isinstance(value, Mapping) else value
        total = 1 + len(entries) + sum(self.size(one) for one in entries)
        self._sizes[id(value)] = (value, total)
        return total

    def check_widening(self, arguments: Iterable[Any], times: int) -> None:
        """Sizes in advance what padding or formatting makes: at most the widest argument, `times` times."""
        widest = 1
        for argument in arguments:
            if isinstance(argument, int | float) and abs(argument) > MAX_WIDTH:
                raise LimitExceeded(f"it asks for a width of {argument:g}")
            widest = max(widest, abs(int(argument)) if isinstance(argument, int | float) else self.size(argument))
        self.check_size(widest * max(times, 1))

    def check_size(self, size: int) -> None:
        if size > MAX_VALUE:
            raise LimitExceeded(f"it would make a value of size {size:,}")


_METER: ContextVar[Meter] = ContextVar("meter")


def run(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    """Renders a template of `environment()`.

    Raises:
        jinja2.TemplateError: what the template did wrong, or that it refuses the variables.
    """
    meter = Meter()
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

    # What the rewritten template calls.

    def step(self) -> None:
        _METER.get().step()

    def made(self, value: Any) -> Any:
        return _METER.get().made(value)

    def written(self, value: Any) -> Any:
        return _METER.get().written(value)

    # What jinja2's sandbox asks.

    def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
        raise SecurityError(
            f"it reaches for {attribute!r} of a {type(obj).__name__}, which is outside what a template may see"
        )

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        meter = _METER.get()
        if operator == "**" and isinstance(left, int) and isinstance(right, int) and abs(left) > 1:
            if left.bit_length() * abs(right) > MAX_BITS:
                raise LimitExceeded(f"it makes a number of {left.bit_length() * abs(right):,} bits")
        elif operator == "%" and isinstance(left, str):
            _check_format(meter, left, right if isinstance(right, tuple) else (right,))
        elif operator == "*":
            for many, times in ((left, right), (right, left)):
                if isinstance(times, int) and not isinstance(many, int | float):
                    meter.check_size(meter.size(many) * max(times, 0))
        return super().call_binop(context, operator, left, right)

    def call(self, context: jinja2.runtime.Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        method = getattr(function, "__wrapped__", function)  # jinja2 wraps str.format
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(owner, str | bytes | int | float):
            args = _check_method(_METER.get(), owner, name, args, kwargs)
        return super().call(context, function, *args, **kwargs)


def _check_method(
    meter: Meter, owner: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...]:
    """Sizes what a method of a text or number would make; the arguments, with iterators written out."""
    given = [*args, *kwargs.values()]
    if name in ("format", "format_map"):
        _check_format(meter, owner, given)
    elif name in _WIDENING_METHODS:
        meter.check_widening(given, owner.count("\t") if name == "expandtabs" else 1)
    elif name == "replace" and len(args) > 1:
        meter.check_size(len(owner) + owner.count(args[0]) * len(args[1]))
    elif name == "join" and args:
        return (_joinable(meter, owner, args[0]), *args[1:])
    elif name == "translate" and args:
        meter.check_size(len(owner) * meter.size(args[0]))
    return args


def _check_format(meter: Meter, text: str, arguments: Iterable[Any]) -> None:
    """Widths stand in the format itself or among the arguments; each field may use the widest."""
    widths = [int(digits[:9]) for digits in re.findall(r"\d+", text)]
    meter.check_widening([*widths, *arguments], text.count("%") + text.count("{"))


def _joinable(meter: Meter, separator: Any, entries: Iterable[Any]) -> list[Any]:
    listed = list(entries)
    meter.check_size(meter.size(listed) + len(listed) * meter.size(separator))
    return listed


def _metered_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter, with what it is given and what it makes counted."""
    skip = 1 if hasattr(function, "jinja_pass_arg") else 0  # context or environment comes first

    def filtered(*args: Any, **kwargs: Any) -> Any:
        meter = _METER.get()
        value, given = args[skip], [*args[skip + 1 :], *kwargs.values()]
        if name in _SLOW and meter.size(value) > _MAX_SLOW:
            raise LimitExceeded(f"it gives {name} a text of {meter.size(value):,} characters")
        if name == "format":
            _check_format(meter, str(value), given)
        elif name == "replace" and len(given) > 1:
            meter.check_size(meter.size(value) + str(value).count(str(given[0])) * len(str(given[1])))
        elif name == "join":
            separator = given[0] if given else ""
            args = (*args[:skip], _joinable(meter, separator, value), *args[skip + 1 :])
        elif name in _WIDENING:
            meter.check_widening(given, str(value).count("\n") + 1 if name == "indent" else meter.size(value))
        return meter.made(function(*args, **kwargs))

    if skip:
        filtered.jinja_pass_arg = function.jinja_pass_arg  # pyright: ignore[reportFunctionMemberAccess]
    return filtered


class _Metered(NodeTransformer):
    """Rewrites a parsed template so that its turns, values and output are counted."""

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
        """Text between the tags, as an expression like the others."""
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

    # The compiler wants these calls and filters to stay what they are.

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
    """`{% generation %}`, which marks what the model writes; rendered, it is only its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Dict:
    """`dict(...)` in a template: makes one, and is no class that leads elsewhere."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class _Namespace(Namespace):
    """`namespace(...)` in a template, without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # a template may call one of its names `self`
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
    """jinja2's own would write `<` as an HTML escape."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def environment() -> jinja2.Environment:
    """Where chat templates run: transformers' settings, filters and globals, with limits."""
    made = _Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        optimized=False,  # constants would be computed while compiling, before anything is counted
        extensions=[_Generation, jinja2.ext.loopcontrols],
    )
    made.filters["tojson"] = _tojson
    made.filters = {name: _metered_filter(name, function) for name, function in made.filters.items()}
    del made.globals["lipsum"]  # random filler text, of any length
    functions = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    made.globals |= {**functions, "dict": _Dict(), "namespace": _Namespace}
    return made
