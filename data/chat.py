"""Conversations to token ids by a model's own chat template, in which nothing that a person typed becomes a control token.

A chat template is a program in Jinja that comes with a model's weights: it runs in jinja2's sandbox, with bounds on time
and size. While it runs, each character that the template itself writes is told apart from those of the messages, so that
`<|im_end|>` is the control token where the template put it and ordinary text where it was typed.
"""

import contextlib
import functools
import hashlib
import json
import re
import time
from dataclasses import dataclass
from datetime import datetime

import jinja2
import jinja2.ext
import jinja2.nodes
import numpy as np
from jinja2.compiler import CodeGenerator
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

from engine.errors import UserError

# What models without a template of their own are talked to in
CHATML = ("{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
          "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")

MAX_SECONDS = 5  # of computing, for one rendering; a thousand turns take Qwen3's template 0.1
MAX_LENGTH = 1 << 24  # characters of a text, or items of a list, that a template may build
MAX_WIDTH = 10_000  # a number that a template may hand to a method or filter of texts, such as a width to pad to
MAX_BITS = 4096  # of an integer


# --------------------------------------------------------------------------------------------- who wrote which character


class Marked(str):
    """A text and, in `own`, a byte for each of its characters: 1 where the template wrote it.

    What is done to it with other methods than these gives a plain str, which counts as written by others: a mark can get
    lost, never be made up.
    """

    own: bytes

    def __new__(cls, text, own=None):
        self = super().__new__(cls, text)
        self.own = bytes(len(text)) if own is None else own
        return self

    def __str__(self):
        return self

    def __add__(self, other):
        return concat((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other):
        return concat((other, self)) if isinstance(other, str) else NotImplemented

    def __getitem__(self, at):
        own = self.own[at]
        return Marked(super().__getitem__(at), own if isinstance(at, slice) else bytes([own]))

    def lstrip(self, chars=None):
        return self[len(self) - len(super().lstrip(chars)):]

    def rstrip(self, chars=None):
        return self[:len(super().rstrip(chars))]

    def strip(self, chars=None):
        return self.lstrip(chars).rstrip(chars)

    def join(self, parts):
        parts = list(parts)
        return concat([piece for part in parts for piece in (self, part)][1:])


def written(text):
    """Marked text all of which the model wrote."""
    return Marked(text, b"\1" * len(text))


def concat(parts):
    """The parts, str or Marked, as one Marked."""
    parts = list(map(str, parts))
    within(sum(map(len, parts)))
    return Marked("".join(parts), b"".join(p.own if isinstance(p, Marked) else bytes(len(p)) for p in parts))


class MarkingCode(CodeGenerator):
    """Compiles a template so that its own text is Marked."""

    def visit_Const(self, node, frame):
        if isinstance(node.value, str):
            self.write(f"environment.written({node.value!r})")
        else:
            super().visit_Const(node, frame)

    def visit_TemplateData(self, node, frame):
        self.write(f"environment.written({node.data!r})")

    def _output_const_repr(self, group):
        return f"environment.written({''.join(map(str, group))!r})"

    def visit_Concat(self, node, frame):
        self.write("environment.concat((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_NSRef(self, node, frame):
        if node.attr.startswith("_"):
            raise SecurityError(f"it sets the private attribute {node.attr}")
        super().visit_NSRef(node, frame)


# ------------------------------------------------------------------------------------------------------------ the sandbox


def within(size):
    """SecurityError where a text or list would be longer than MAX_LENGTH."""
    if size > MAX_LENGTH:
        raise SecurityError(f"it builds a text or list of {size:,} items; {MAX_LENGTH:,} are allowed")


def narrow(values):
    """SecurityError where a number among values would pad a text beyond MAX_WIDTH."""
    for value in values:
        if isinstance(value, int) and abs(value) > MAX_WIDTH:
            raise SecurityError(f"it asks for a text {value:,} wide; {MAX_WIDTH:,} is allowed")


class Sandbox(ImmutableSandboxedEnvironment):
    """jinja2's sandbox as chat templates expect it, and one that a template can neither hang nor fill the memory from."""

    code_generator_class = MarkingCode
    concat, written = staticmethod(concat), staticmethod(written)
    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self):
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, Generation])
        self.deadline = 0.0
        for name in ("lipsum", "cycler", "joiner"):
            del self.globals[name]
        self.globals.update(raise_exception=refuse, strftime_now=lambda form: datetime.now().strftime(form),
                            dict=lambda *args, **named: dict(*args, **named))
        del self.filters["sum"]  # of lists, it builds one
        self.filters = {name: self.bounded(f) for name, f in self.filters.items()}
        self.filters.update(tojson=self.bounded(tojson), counted=self.counted,
                            replace=lambda text, *args: self.call_method(str(text), "replace", args),
                            join=lambda parts, between="", attribute=None: self.joined(parts, between, attribute))

    def _parse(self, *source):
        tree = super()._parse(*source)
        for loop in tree.find_all(jinja2.nodes.For):
            loop.iter = jinja2.nodes.Filter(loop.iter, "counted", [], [], None, None, lineno=loop.lineno)
        return tree

    def bounded(self, f):
        @functools.wraps(f)  # with jinja's note on whether f wants the context
        def run(*args, **named):
            self.spend()
            narrow((*args, *named.values()))
            return f(*args, **named)
        return run

    def spend(self):
        if time.thread_time() > self.deadline:
            raise SecurityError(f"it does not come to an end in {MAX_SECONDS} seconds")

    def counted(self, iterable):
        """What a loop runs over, item by item, with an eye on the clock."""
        for n, item in enumerate(iterable):
            within(n)
            if n % 64 == 0:
                self.spend()
            yield item

    def joined(self, parts, between, attribute):
        parts = [str(part if attribute is None else self.getitem(part, attribute)) for part in self.counted(parts)]
        return self.call_method(str(between), "join", (parts,))

    def call_method(self, text, name, args):
        """A method of a text, once its result is known not to be too large."""
        if name == "replace" and len(args) > 1:
            within(len(text) + text.count(args[0]) * len(args[1]))
        elif name == "join":
            args = (list(args[0]),)
            within(sum(len(part) + len(text) for part in args[0]))
        else:
            narrow(args)
        return getattr(text, name)(*args)

    def call(self, context, f, *args, **named):
        self.spend()
        owner, name = getattr(f, "__self__", None), getattr(f, "__name__", "")
        if isinstance(owner, str) and name in ("replace", "join") and not named:
            return self.call_method(owner, name, args)
        if isinstance(owner, str) or name in ("format", "format_map"):
            narrow((*args, *named.values()))
        return super().call(context, f, *args, **named)

    def call_binop(self, context, operator, left, right):
        numbers = isinstance(left, int) and isinstance(right, int)
        if operator == "%" and isinstance(left, str):
            self.check_format(left)
        elif operator == "**" and numbers:
            if left.bit_length() * abs(right) > MAX_BITS:
                raise SecurityError(f"it raises a number to the power of {right:,}")
        elif operator == "*" and numbers:
            if left.bit_length() + right.bit_length() > MAX_BITS:
                raise SecurityError("it multiplies numbers without end")
        elif operator == "*":
            for sequence, times in ((left, right), (right, left)):
                if hasattr(sequence, "__len__") and isinstance(times, int):
                    within(len(sequence) * times)
        elif operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            within(len(left) + len(right))
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value):
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            self.check_format(value.__self__)
        return wrapped

    def check_format(self, form):
        if re.search(r"\d{5}|%[^%a-zA-Z]*\*", form):
            raise SecurityError(f"it formats with {form[:80]!r}, to any width")

    def unsafe_undefined(self, obj, attribute):
        raise SecurityError(f"it reaches for {attribute} of a {'str' if isinstance(obj, Marked) else type(obj).__name__}")


class Generation(jinja2.ext.Extension):
    """{% generation %} around what an assistant says, as some templates have it: the same text without it."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class Refused(Exception):
    """What a template says when it does not want a conversation."""


def refuse(message):
    """raise_exception of a chat template: Refused, with the template's own words."""
    raise Refused(message)


def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    """JSON as it is: jinja's own filter escapes what HTML would trip over."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


# --------------------------------------------------------------------------------------------------------- the templates


@dataclass
class Layout:
    """A conversation's text and (start, stop) of each control token in it."""

    text: str
    controls: list[tuple[int, int]]

    def begins(self, other):
        """Whether another layout goes on from this one, character by character and control token by control token."""
        return other.text.startswith(self.text) and [span for span in other.controls if span[0] < len(self.text)] == self.controls


@dataclass
class Rendered(Layout):
    """A conversation as the model reads it: its text, the control tokens in it, and its ids."""

    ids: list[int]


class ChatTemplate:
    """The chat template of a tokenizer, ChatML where it has none. UserError where it cannot be used."""

    def __init__(self, tokenizer):
        self.tokenizer, self.environment = tokenizer, Sandbox()
        self.name = f"the chat template of {tokenizer.name}" if tokenizer.chat_template else "ChatML"
        self.source = tokenizer.chat_template or CHATML
        with self.told():
            self.template = self.environment.from_string(self.source)

    @contextlib.contextmanager
    def told(self):
        """Turns whatever a template raises into one sentence."""
        try:
            yield
        except Refused as error:
            raise UserError(f"{self.name} refuses this conversation: {error}") from None
        except (SecurityError, OverflowError) as error:  # the latter for a range that is too long
            raise UserError(f"{self.name} is refused: {error}; it is a program that came with the weights, use weights that you trust") from None
        except jinja2.TemplateSyntaxError as error:
            raise UserError(f"{self.name} cannot be read: line {error.lineno}: {error.message}") from None
        except Exception as error:  # a program's fault can be any
            raise UserError(f"{self.name} fails on this conversation: {type(error).__name__}: {error}") from None

    def render(self, messages, add_generation_prompt=False, tools=None, **variables):
        """The Rendered conversation, its text encoded as one.

        messages: [{"role": str, "content": str, ...}], as the template wants them; add_generation_prompt opens the
        assistant's next turn; `variables` are the template's own (enable_thinking=False). The ids are transformers'
        apply_chat_template's, except that control tokens spelled in the messages or tools are ordinary text.
        """
        return self.encoded(self.lay_out(messages, add_generation_prompt, tools, variables))

    def prompt(self, messages, tools=None, **variables):
        """The Rendered conversation with the assistant's next turn open: what a model is given to answer.

        Each earlier answer is encoded by itself, as the model said it and as examples() has it: no merge of a byte-pair
        encoding joins it to what stands before. (render() cuts nowhere.)
        """
        layout = self.lay_out(messages, True, tools, variables)
        before = {k: self.prompts_before(messages, k, tools, variables) for k in answers_of(messages)}
        return self.encoded(layout, self.cuts(layout, before))

    def examples(self, messages, train_on="all", tools=None):
        """[(ids, labelled)] to learn a conversation's answers from: a list of ids and a bool array, True for the tokens to learn.

        Learnt are the answers, all or the last, each with the token that ends its turn. What stands before an answer is
        prompt() of the messages before it, id by id. One sequence has as many answers as the template leaves as they
        were when more is said; one that rewrites them (Qwen3 takes the reasoning out) gives an answer a sequence of its
        own. UserError where the template ends no turn, or opens an answer otherwise than it writes it.
        """
        self.require_end_of_turn()
        answers = answers_of(messages)
        before = {k: self.prompts_before(messages, k, tools, {}) for k in answers}
        groups = []  # of (layout, cuts) that go on from each other
        for k in answers if train_on == "all" else answers[-1:]:
            layout = self.lay_out(messages[:k + 1], False, tools, {})
            cuts, start = self.cuts(layout, {j: before[j] for j in answers if j < k}), self.cuts(layout, {k: before[k]})
            stops = [b for a, b in layout.controls if start and a >= start[0] and self.tokenizer.controls[layout.text[a:b]] == self.end_of_turn]
            if not stops:
                raise UserError(f"{self.name} does not write this answer behind the prompt that it opens for it, up to a token that ends the turn: "
                                "the model would not be trained on what it is asked")
            layout = Layout(layout.text[:stops[0]], [span for span in layout.controls if span[1] <= stops[0]])
            cuts = cuts + start
            if groups and groups[-1][-1][0].begins(layout) and cuts[:len(groups[-1][-1][1])] == groups[-1][-1][1]:
                groups[-1].append((layout, cuts))
            else:
                groups.append([(layout, cuts)])
        return [self.example(*group[-1], {cuts[-1] for _, cuts in group}) for group in groups]

    def example(self, layout, cuts, starts):
        """(ids, labelled) of a layout in which the answers that begin at `starts`, some of the cuts, are learnt."""
        ids, labelled = [], []
        for start, part in self.segments(layout, cuts):
            learnt = part.index(self.end_of_turn) + 1 if start in starts else 0
            ids += part
            labelled += [True] * learnt + [False] * (len(part) - learnt)
        return ids, np.array(labelled)

    def prompts_before(self, messages, k, tools, variables):
        """The Layouts that the template may open answer k by: reasoning, where it knows of it, left to the model or left out."""
        found = []
        for more in ({}, {"enable_thinking": False}) if "enable_thinking" in self.source else ({},):
            with contextlib.suppress(UserError):  # nothing stands before the answer, or nothing that the template takes
                found.append(self.lay_out(messages[:k], True, tools, {**variables, **more}))
        return found

    def cuts(self, layout, before):
        """Where in a layout the answers begin: behind the longest of the prompts before each that it begins with."""
        starts = {max((len(prompt.text) for prompt in prompts if prompt.begins(layout)), default=None) for prompts in before.values()}
        return sorted(starts - {None})

    def encoded(self, layout, cuts=()):
        return Rendered(layout.text, layout.controls, [i for _, part in self.segments(layout, cuts) for i in part])

    def segments(self, layout, cuts):
        """Yields (start, ids) of a layout's text from cut to cut, each encoded by itself."""
        borders = [0, *cuts, len(layout.text)]
        for start, stop in zip(borders, borders[1:]):
            inside = [(a - start, b - start) for a, b in layout.controls if start <= a < stop]
            yield start, (self.encode if start else self.tokenizer.encode_controls)(layout.text[start:stop], inside)

    def encode(self, text, controls):
        """Ids of a text within a conversation; sentencepiece's space before a text's beginning belongs to the whole alone."""
        if self.adds_space:
            line = self.tokenizer.encode("\n")
            ids = self.tokenizer.encode_controls("\n" + text, [(a + 1, b + 1) for a, b in controls])
            if ids[:len(line)] == line:
                return ids[len(line):]
        return self.tokenizer.encode_controls(text, controls)

    @functools.cached_property
    def adds_space(self):
        return self.tokenizer.decode(self.tokenizer.encode("\n")) == " \n"

    def lay_out(self, messages, add_generation_prompt, tools, variables):
        """The Layout of a conversation."""
        check_messages(messages)
        text = self.run(messages, tools, add_generation_prompt, variables)
        controls, spelled = self.own_controls(text), self.tokenizer.find_controls(text)
        if controls != spelled:  # so something is spelled in the messages; or the template's mark got lost on a way not traced
            harmless = self.run(self.without_controls(messages), self.without_controls(tools), add_generation_prompt, variables)
            untraced = self.tokenizer.find_controls(harmless)
            if self.own_controls(harmless) != untraced:
                if [text[a:b] for a, b in spelled] != [harmless[a:b] for a, b in untraced]:
                    raise UserError(f"{self.name} puts its control tokens together in a way that cannot be told from those spelled in a message: "
                                    "take the control tokens out of the messages")
                controls = spelled
        return Layout(str.__str__(text), controls)

    def run(self, messages, tools, add_generation_prompt, variables):
        messages = [{**m, "role": written(m["role"])} for m in messages]
        tokens = {name: written(token) for name, token in self.tokenizer.named_tokens.items()}
        with self.told():
            self.environment.deadline = time.thread_time() + MAX_SECONDS
            return self.template.render({**tokens, "messages": messages, "tools": tools, "documents": None,
                                         "add_generation_prompt": add_generation_prompt, **variables})

    def own_controls(self, text):
        """Where the control tokens stand that the template wrote from first to last character."""
        return [(run.start() + a, run.start() + b) for run in re.finditer(b"\1+", text.own)
                for a, b in self.tokenizer.find_controls(text[run.start():run.end()])]

    def without_controls(self, data):
        """The same messages with an x wherever a control token could begin."""
        if isinstance(data, str):
            return re.sub("|".join(map(re.escape, {token[0] for token in self.tokenizer.controls})), "x", data)
        if isinstance(data, dict):
            return {key: value if key == "role" else self.without_controls(value) for key, value in data.items()}
        return [self.without_controls(item) for item in data] if isinstance(data, list | tuple) else data

    @functools.cached_property
    def end_of_turn(self):
        """The id of the control token that the template puts behind an answer, None where it puts none."""
        answer = "The answer is 7"
        layout = self.lay_out([{"role": "user", "content": "Which?"}, {"role": "assistant", "content": answer}], False, None, {})
        behind = layout.text.find(answer) + len(answer)
        spelled = [layout.text[a:b] for a, b in layout.controls if a >= behind]
        return self.tokenizer.controls[spelled[0]] if spelled else None

    def require_end_of_turn(self):
        """UserError unless the template ends turns by a token, which training needs."""
        if self.end_of_turn is None:
            raise UserError(f"{self.name} puts no control token behind an answer: a model trained on it would not learn to stop; "
                            "give the tokenizer a chat_template that ends turns by one")

    @functools.cached_property
    def hash(self):
        """Tells this template from others."""
        return hashlib.sha256(self.source.encode()).hexdigest()[:16]

    @functools.cached_property
    def stop_ids(self):
        """Ids that end an answer: the template's end of a turn, the configured end of a sequence, the end of a text."""
        configured = self.tokenizer.controls.get(self.tokenizer.named_tokens.get("eos_token"))
        return sorted({self.end_of_turn, configured, self.tokenizer.eot_id} - {None})


def answers_of(messages):
    """Which of the messages the assistant says."""
    return [k for k, message in enumerate(messages) if message["role"] == "assistant"]


def with_turns(tokenizer):
    """The tokenizer that a conversation is trained with: itself, or, where it has neither a chat template nor ChatML's tokens, one
    that has these behind its ids."""
    if tokenizer.chat_template or all(token in tokenizer.controls for token in CHATML_TOKENS):
        return tokenizer
    return tokenizer.with_controls(CHATML_TOKENS)


def check_messages(messages):
    """UserError unless messages are what a chat template takes."""
    if not isinstance(messages, list) or not messages:
        raise UserError('messages: expected a list of {"role": "user", "content": "..."}, and at least one')
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or not re.fullmatch(r"[a-zA-Z_]\w*", message["role"]):
            raise UserError(f"message {i + 1}: expected a role such as system, user or assistant and a content, got {json.dumps(message)[:100]}")
        content = message.get("content")
        if not isinstance(content, str | list) and not (content is None and "tool_calls" in message):
            raise UserError(f"message {i + 1}: expected its content to be text, got {json.dumps(content)[:100]}")
