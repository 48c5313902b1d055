"""Policies as people write them: `PROPOSE[+ALLOCATE]/DESIGN/CORRECTION[+STAND_IN]@BUDGET[, every=N, sinks=N, ...]`.

A part is `name` or `name(argument, key=value)`; arguments are numbers, True, False, None, words, or other parts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from difflib import get_close_matches
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

from kvest.allocate import ALLOCATIONS, Allocate, UniformAllocation
from kvest.budget import read_budget
from kvest.correct import CORRECTIONS, Correct
from kvest.named import NAMED
from kvest.propose import PROPOSALS, Propose
from kvest.sample import DESIGNS, Design
from kvest.stand_in import STAND_INS, NoStandIn

if TYPE_CHECKING:
    from kvest.policy import Policy

TABLES: dict[str, Mapping[str, type]] = {
    "proposal": PROPOSALS,
    "allocation": ALLOCATIONS,
    "design": DESIGNS,
    "correction": CORRECTIONS,
    "stand-in": STAND_INS,
}
_PARTS = {Propose: "proposal", Allocate: "allocation", Design: "design", Correct: "correction"}
_SHAPE = "PROPOSE[+ALLOCATE]/DESIGN/CORRECTION[+STAND_IN]@BUDGET[, every=N], like snapkv/top_k/none@0.25"
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?", re.IGNORECASE)


class PolicyError(ValueError):
    """A policy that cannot be read: says what is wrong, and shows where."""

    def __init__(self, message: str, text: str, at: int) -> None:
        super().__init__(f"{message}\n  {text}\n  {' ' * at}^")


def unknown(kind: str, name: str, known: Mapping[str, object]) -> str:
    """`no proposal 'snapk'. Did you mean 'snapkv'? Known: ... (kvest ls proposals)`"""
    near = get_close_matches(name, known, n=1, cutoff=0.5)
    guess = f" Did you mean {near[0]!r}?" if near else ""
    return f"no {kind} {name!r}.{guess} Known: {', '.join(known)} (kvest ls {kind}s)"


def parse(text: str) -> dict[str, Any]:
    """The fields of a Policy, `NAME@BUDGET` for a named one among them; raises PolicyError."""
    name, at, rest = text.partition("@")
    if at and name.strip() in NAMED:
        text = f"{NAMED[name.strip()]}{at}{rest}"
    return _Reader(text).policy()


def write(policy: Policy) -> str:
    """The text that `parse` reads back to an equal policy."""
    allocate = "" if policy.allocate == UniformAllocation() else f"+{say(policy.allocate)}"
    stand_in = "" if policy.stand_in == NoStandIn() else f"+{say(policy.stand_in)}"
    options = [
        f", {f.name}={getattr(policy, f.name)}" for f in fields(policy) if f.name in _OPTIONS and _changed(policy, f)
    ]
    parts = f"{say(policy.propose)}{allocate}/{say(policy.design)}/{say(policy.correct)}{stand_in}"
    return f"{parts}@{policy.budget}{''.join(options)}"


_OPTIONS = ("every", "sinks", "window")


def say(part: Any) -> str:
    """One part as it is written in a policy; arguments at their default are left out, leading ones lose their key.

    A part that is in no table, and cannot be written, is its repr.
    """
    kind = type(part)
    name = next((name for table in TABLES.values() for name, known in table.items() if known is kind), None)
    if name is None:
        return repr(part)
    said, bare = [], True
    for f in fields(part):
        required = f.default is MISSING and f.default_factory is MISSING
        if not required and (name, f.name) not in _SAID and not _changed(part, f):
            bare = False
            continue
        value = getattr(part, f.name)
        text = say(value) if any(type(value) in table.values() for table in TABLES.values()) else str(value)
        said.append(text if bare and f.name not in _KEYED else f"{f.name}={text}")
        bare = bare and f.name not in _KEYED
    return f"{name}({', '.join(said)})" if said else name


_SAID = {("tempered", "tau"), ("mixed", "eps"), ("with_certain", "share"), ("centroids", "count")}
"""Part of the record even at their default."""
_KEYED = (
    "by",
    "share",
    "values",
    "divide",
    "layer",
    "form",
    "rows",
    "of",
    "raw",
    "at",
    "keys",
    "importance",
    "power",
)  # clearer with their key


def _changed(part: Any, f: Field[Any]) -> bool:
    value = getattr(part, f.name)
    return bool(value != f.default) if f.default is not MISSING else True


def _readable(options: tuple[Any, ...]) -> str:
    """`a whole number or None`"""
    names = {int: "a whole number", float: "a number", bool: "True or False", type(None): "None"}
    return " or ".join(names.get(o) or " or ".join(map(str, get_args(o))) for o in options)


class _Reader:
    """Recursive descent over one policy; `at` is where the next token starts."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def fail(self, message: str, at: int | None = None) -> PolicyError:
        return PolicyError(message, self.text, self.at if at is None else at)

    def policy(self) -> dict[str, Any]:
        out: dict[str, Any] = {"propose": self.part("proposal")}
        if self.took("+"):
            out["allocate"] = self.part("allocation")
        self.expect("/", "a design, after '/'")
        out["design"] = self.part("design")
        self.expect("/", "a correction, after '/'")
        out["correct"] = self.part("correction")
        if self.took("+"):
            out["stand_in"] = self.part("stand-in")
        self.expect("@", "a budget, after '@': 0.25 of the tokens, 2048 entries, or 512MiB")
        out["budget"] = self.budget()
        while self.took(","):
            key, at = self.word(), self.at
            if key not in _OPTIONS:
                raise self.fail(f"no option {key!r}. Known: {', '.join(_OPTIONS)}", at - len(key))
            self.expect("=", f"a number, after '{key}='")
            at = self.at
            value = self.value()
            if not isinstance(value, int) or isinstance(value, bool):
                raise self.fail(f"{key} must be a whole number, not {value!r}", at)
            out[key] = value
        self.skip()
        if self.at < len(self.text):
            raise self.fail(f"cannot read the rest: a policy is {_SHAPE}")
        return out

    def budget(self) -> Any:
        self.skip()
        start = self.at
        end = self.text.find(",", start)
        self.at = len(self.text) if end < 0 else end
        try:
            return read_budget(self.text[start : self.at])
        except ValueError as error:
            raise self.fail(str(error), start) from None

    def part(self, kind: str) -> Any:
        """`name` or `name(argument, key=value)`"""
        self.skip()
        start = self.at
        name = self.word(f"a {kind}")
        table = TABLES[kind]
        if name not in table:
            raise self.fail(unknown(kind, name, table), start)
        return self.build(table[name], name, start)

    def build(self, kind: type, name: str, start: int) -> Any:
        known = [f.name for f in fields(kind)]
        given: dict[str, Any] = {}
        if self.took("("):
            while not self.took(")"):
                self.argument(kind, known, given, name)
                if not self.took(","):
                    self.expect(")", f"',' or ')' in the arguments of {name}")
                    break
        try:
            return kind(**given)
        except (TypeError, ValueError) as error:
            message = str(error).replace(f"{kind.__name__}.__init__()", name)
            raise self.fail(message, start) from None

    def argument(self, kind: type, known: list[str], given: dict[str, Any], name: str) -> None:
        self.skip()
        at = self.at
        key = re.compile(r"([A-Za-z_]\w*)\s*=").match(self.text, at)
        if key is not None:
            self.at = key.end()
            if key[1] not in known:
                guess = get_close_matches(key[1], known, n=1)
                hint = f" Did you mean {guess[0]!r}?" if guess else ""
                raise self.fail(f"{name} has no argument {key[1]!r}.{hint} Known: {', '.join(known) or 'none'}", at)
            target = key[1]
        else:
            free = [k for k in known if k not in given]
            if not free:
                raise self.fail(f"{name} takes {len(known)} arguments at most ({', '.join(known) or 'none'})", at)
            target = free[0]
        if target in given:
            raise self.fail(f"{target} is given twice", at)
        holds = get_type_hints(kind)[target]
        if holds in _PARTS:
            given[target] = self.part(_PARTS[holds])
            return
        value = self.value()
        options = get_args(holds) if get_origin(holds) in (Union, UnionType) else (holds,)
        if type(value) is int and float in options:
            value = float(value)
        if not any(value in get_args(o) if get_origin(o) is Literal else type(value) is o for o in options):
            raise self.fail(f"{target} of {name} must be {_readable(options)}, not {value!r}", at)
        given[target] = value

    def value(self) -> Any:
        self.skip()
        number = _NUMBER.match(self.text, self.at)
        if number is not None:
            self.at = number.end()
            return int(number[0]) if re.fullmatch(r"[+-]?\d+", number[0]) else float(number[0])
        start = self.at
        word = self.word("a value")
        if word in ("True", "False", "None"):
            return {"True": True, "False": False, "None": None}[word]
        if self.peek() == "(":
            raise self.fail(f"expected a number or a word here, not a call of {word!r}", start)
        return word

    def word(self, what: str = "a name") -> str:
        self.skip()
        match = re.compile(r"[A-Za-z_]\w*").match(self.text, self.at)
        if match is None:
            raise self.fail(f"expected {what} here: a policy is {_SHAPE}")
        self.at = match.end()
        return match[0]

    def skip(self) -> None:
        while self.at < len(self.text) and self.text[self.at].isspace():
            self.at += 1

    def peek(self) -> str:
        self.skip()
        return self.text[self.at : self.at + 1]

    def took(self, symbol: str) -> bool:
        if self.peek() != symbol:
            return False
        self.at += 1
        return True

    def expect(self, symbol: str, what: str) -> None:
        if not self.took(symbol):
            raise self.fail(f"expected {what}: a policy is {_SHAPE}")
