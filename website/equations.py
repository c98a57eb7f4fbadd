"""Equations of docstrings, set as mathematics.

A strategy's docstring says its equations as one would in a terminal: `x_i = 1/n sum over j of x_j`, with
remarks after two spaces. Here such lines become LaTeX, and LaTeX becomes SVG when the site is built: no
script and no font has to be loaded to read them.

    line ──▶ pieces: formula │ words ──▶ LaTeX of each formula ──▶ SVG
"""

from __future__ import annotations

import html
import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from typing import Final

GREEK: Final = frozenset(
    "alpha beta gamma delta epsilon eta theta kappa lambda mu pi rho sigma tau xi".split()  # noqa: SIM905
)
_ASSIGNED: Final = re.compile(r"^([A-Za-z]\w*'?(?:, [A-Za-z]\w*'?)*) = ")
_CALLED: Final = re.compile(r"^\w+\([^)]*\),?$")
_CONDITION: Final = re.compile(r"^(if|while) (.*[|^>].*):$")
_OPERAND_BEFORE: Final = re.compile(r"(?:\((?:[^()]|\([^()]*\))*\)|\w+)$")
_OPERAND_AFTER: Final = re.compile(r"(?:\((?:[^()]|\([^()]*\))*\)|\w+)(?:\^2)?")
_TOKEN: Final = re.compile(
    r"(?P<sum>sum over (?:the )?(?P<over>[\w ]+?) of )"
    r"|(?P<fraction>(?P<above>\b\w+)/(?P<below>\w+))"
    r"|(?P<code>`[^`]+`)"
    r"|(?P<number>\d+(?:\.\d+)?(?:e-?\d+)?)"
    r"|(?P<name>[A-Za-z]\w*(?:'s\b|'*))"
    r"|(?P<dots>\.{2,3})"
    r"|(?P<sign><=|>=|[-+*/=<>(),:^|.])"
    r"|(?P<space>\s+)"
)
_SIGNS: Final = {"<=": r"\le", ">=": r"\ge", "*": r"\cdot", "...": r"\ldots", "..": r"\;..\;"}


@dataclass(frozen=True)
class Piece:
    """A part of a line: a formula as LaTeX, or words."""

    text: str
    formula: bool


@dataclass(frozen=True)
class Line:
    """A line of an equation.

    Attributes:
        indent: how many spaces it begins with.
        pieces: its formulas and words.
        source: the line itself.
    """

    indent: int
    pieces: tuple[Piece, ...]
    source: str


def lines(block: str, options: Collection[str] = ()) -> list[Line]:
    """Read a block of equations.

    Args:
        block: the lines, as the docstring has them.
        options: names that are set upright, as they are those of options.
    """
    assigned = {
        name.rstrip("'")
        for line in re.sub(r"(?m)^( *\w+) += ", r"\1 = ", block).splitlines()
        for chunk in re.split(r"\s{2,}", line)
        if (match := _ASSIGNED.match(chunk))
        for name in match[1].split(", ")
    }
    found = []
    for line in block.splitlines():
        text = re.sub(r"^(\w+) += ", r"\1 = ", line.strip())
        pieces: list[Piece] = []
        for chunk in re.split(r"\s{2,}", text):
            pieces += _pieces(chunk, assigned, options)
        found.append(Line(len(line) - len(line.lstrip()), tuple(pieces), line.strip()))
    return found


def _pieces(chunk: str, assigned: Collection[str], options: Collection[str]) -> list[Piece]:
    condition = _CONDITION.match(chunk)
    if condition:
        return [Piece(condition[1], False), Piece(latex(condition[2], assigned, options), True)]
    if _CALLED.match(chunk):
        return [Piece(latex(chunk, assigned, options), True)]
    if _ASSIGNED.match(chunk) and not chunk.startswith(("for ", "if ", "while ")):
        return [Piece(latex(chunk, assigned, options), True)]
    return [Piece(chunk, False)]


def latex(formula: str, assigned: Collection[str] = (), options: Collection[str] = ()) -> str:
    """The LaTeX of a formula; words in it stay words.

    Args:
        formula: such as `x = x - eta g(x)`.
        assigned: names that stand for a quantity though they are longer than a letter.
        options: names that are those of options.
    """
    names = _Names(assigned, options)
    target, equals, rest = formula.partition(" = ")
    if not equals:
        return _expression(formula, names)
    sign = r"\leftarrow" if _moves_itself(target, rest) else "="
    return f"{_expression(target, names)} {sign} {_expression(rest, names)}"


def _expression(text: str, names: _Names) -> str:
    """The LaTeX of what is on one side of an equation; a quotient of operands in spaces is a fraction."""
    before, slash, after = text.partition(" / ")
    if slash:
        above, below = _OPERAND_BEFORE.search(before), _OPERAND_AFTER.match(after)
        if above is not None and below is not None:
            top, bottom = (_expression(_bare(found[0]), names) for found in (above, below))
            head, tail = (
                _expression(part, names) for part in (before[: above.start()], after[below.end() :])
            )
            return rf"{head} \frac{{{top}}}{{{bottom}}}\, {tail}".strip()
    out: list[str] = []
    words: list[str] = []
    bars = 0

    def put(piece: str) -> None:
        if words:
            out.append(r"\text{ " + " ".join(words) + " }")
            words.clear()
        out.append(piece)

    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise ValueError(f"'{text[position:]}' of the equation '{text}' is no mathematics that is known")
        position = match.end()
        kind, token = str(match.lastgroup), match[0]
        if match["sum"]:
            over = match["over"]
            put(rf"\sum_{{{names.latex(over) if len(over) == 1 else _words_of(over)}}}")
        elif match["fraction"]:
            put(rf"\frac{{{names.latex(match['above'])}}}{{{names.latex(match['below'])}}}\,")
        elif token == "grad":
            put(r"\nabla")
        elif kind == "name":
            called = text[position : position + 1] == "("
            if called or (names.quantity(token) and not (words and token == "a")):
                put(names.latex(token, called))
            else:
                words.append(token)
        elif kind == "code":
            put(_upright(token.strip("`")))
        elif kind == "number":
            put(re.sub(r"1e(-?\d+)", r"10^{\1}", token))
        elif token == "|":
            bars += 1
            put(r"\lvert" if bars % 2 else r"\rvert")
        elif token == "," and words:
            words[-1] += ","
        elif kind != "space":
            put(_SIGNS.get(token, token))
    put("")
    return " ".join(out).replace("^ 2", "^{2}").strip()


@dataclass(frozen=True)
class _Names:
    """The names that stand for a quantity.

    Attributes:
        assigned: those that the equations give a value.
        options: those of options.
    """

    assigned: Collection[str]
    options: Collection[str]

    def quantity(self, name: str) -> bool:
        bare = name.rstrip("'")
        known = {*GREEK, *self.assigned, *self.options}
        return len(bare) == 1 or "_" in bare or bare in known

    def latex(self, name: str, called: bool = False) -> str:
        bare = name.rstrip("'")
        primes = "'" * (len(name) - len(bare))
        stem, _, index = bare.partition("_")
        if name in self.options:
            return _upright(name)
        if bare in GREEK:
            return rf"\{bare}{primes}"
        if index:
            return rf"{stem}_{{{index if len(index) <= 2 else _words_of(index)}}}{primes}"
        if len(bare) == 1 or bare.isdecimal():
            return bare + primes
        return rf"\operatorname{{{bare}}}" if called else rf"\mathit{{{bare}}}{primes}"


def _moves_itself(target: str, rest: str) -> bool:
    return any(re.search(rf"(?<!\w){re.escape(name)}(?!\w)", rest) for name in target.split(", "))


def _bare(operand: str) -> str:
    return operand[1:-1] if operand.startswith("(") and operand.endswith(")") else operand


def _words_of(text: str) -> str:
    return rf"\text{{{text}}}"


def _upright(name: str) -> str:
    return r"\mathrm{" + name.replace("_", r"\_") + r"}\,"


@cache
def svg(formula: str, size: float = 18) -> str:
    """The picture of a formula, in the colour of the text around it."""
    # Imported here: it reads its font then.
    from ziamath.zmath import Latex

    drawn = Latex(formula, size=size, color="currentColor")
    return str(drawn.svg())


def block_html(block: str, options: Collection[str] = ()) -> str:
    """A block of equations as HTML: formulas are pictures whose text is what the docstring says."""
    rows = []
    for line in lines(block, options):
        pieces = "".join(
            f'<span class="formula">{svg(piece.text)}</span>'
            if piece.formula
            else f'<span class="words">{_words(piece.text, options)}</span>'
            for piece in line.pieces
        )
        label = html.escape(line.source, quote=True)
        about = f'role="math" aria-label="{label}" data-indent="{line.indent}"'
        rows.append(f'<div class="equation" {about}>{pieces}</div>')
    return '<div class="equations">' + "".join(rows) + "</div>"


def _words(text: str, options: Collection[str]) -> str:
    escaped = re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text, quote=False))
    for name in options:
        escaped = re.sub(rf"(?<![\w>`]){re.escape(name)}(?![\w<`])", f"<code>{name}</code>", escaped)
    return escaped
