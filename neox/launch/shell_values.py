"""Lines of `NAME=VALUE` as a shell reads them, without a shell: quotes, `$NAME`, `export`, comments, continued lines.

Values without quotes may hold blanks, as in DeepSpeed's launcher, which puts them between double quotes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_A_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_NAME = re.compile(_A_NAME)
_BEGINNING = re.compile(rf"(?:export[ \t]+)?(?P<name>{_A_NAME})[ \t]*(?P<plus>\+?)=[ \t]*")
_NEXT_ASSIGNMENT = re.compile(rf"[ \t;]+(?:export[ \t]+)?{_A_NAME}\+?=")
_END = re.compile(r"[ \t]*;?[ \t]*(?=\n|\Z)|[ \t]*;?[ \t]+#[^\n]*")  # end of the line, or a comment behind a blank
_OPERATOR = re.compile(r":?[-+]")  # of `${NAME:-word}`
_TILDE = re.compile(r"~(?=[/:\s]|\Z)")  # `~USER` stays as it is
_ESCAPED_IN_QUOTES = '$`"\\'  # characters that a backslash escapes between double quotes
_COMMENTS = re.compile(r"(?:\s|#[^\n]*)*")


class ShellValueError(ValueError):
    """Text that this module does not read, or that a shell would not read either.

    Args:
        line: Number of the line, from 1.
        reason: What it is, and what to do. It holds nothing of the value, which may be a secret.
    """

    def __init__(self, line: int, reason: str) -> None:
        super().__init__(f"line {line}: {reason}")
        self.line = line
        self.reason = reason


@dataclass(frozen=True)
class Reference:
    """`$NAME`, or `${NAME:-word}` with one of the operators `-`, `:-`, `+` and `:+`."""

    name: str
    operator: str = ""
    word: tuple[str | Reference, ...] = ()


Parts = tuple[str | Reference, ...]


@dataclass(frozen=True)
class Assignment:
    """One `NAME=VALUE`.

    Attributes:
        name: Name of the variable.
        parts: The value: literal text, and references to variables.
        source: The value as it is written.
        line: Number of the line on which it begins, from 1.
    """

    name: str
    parts: Parts
    source: str
    line: int


def read_assignments(text: str) -> list[Assignment]:
    """Read the assignments of a file.

    Raises:
        ShellValueError: A line is no assignment, or needs a shell.
    """
    reader = _Reader(text.replace("\r\n", "\n"))
    assignments = []
    while reader.find_line():
        assignments.append(reader.assignment())
    return assignments


def read_value(source: str) -> Parts:
    """Read the value of one assignment, as `Assignment.source` holds it."""
    return _Reader(source).value()


def expand(parts: Parts, variables: Mapping[str, str]) -> str:
    """Return a value with its references replaced. As in a shell, a variable that is not set is empty."""
    texts = []
    for part in parts:
        if isinstance(part, str):
            texts.append(part)
            continue
        value = variables.get(part.name)
        if part.operator.startswith(":"):  # an empty value counts as none
            has_value = bool(value)
        else:
            has_value = value is not None
        #                set       not set
        #   $NAME        value     empty
        #   ${NAME-word} value     word
        #   ${NAME+word} word      empty
        if part.operator.endswith("+"):
            takes_word = has_value
            value = None
        else:
            takes_word = bool(part.operator) and not has_value
        texts.append(expand(part.word, variables) if takes_word else value or "")
    return "".join(texts)


def referenced_names(parts: Parts) -> Iterator[str]:
    """Yield the names of the variables on which a value depends."""
    for part in parts:
        if isinstance(part, Reference):
            yield part.name
            yield from referenced_names(part.word)


class _Reader:
    """A text and a position in it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0

    def error(self, reason: str, position: int | None = None) -> ShellValueError:
        """Return the error about what stands at a position, by default the present one."""
        end = self.position if position is None else position
        return ShellValueError(self.text.count("\n", 0, end) + 1, reason)

    def peek(self) -> str:
        """Return the next character; an empty text at the end."""
        return self.text[self.position : self.position + 1]

    def take(self) -> str:
        """Return the next character and go beyond it."""
        character = self.peek()
        self.position += 1
        return character

    def find_line(self) -> bool:
        """Go to the next line that is neither blank nor a comment; return whether there is one."""
        match = _COMMENTS.match(self.text, self.position)
        assert match is not None  # it matches nothing, too
        self.position = match.end()
        return self.position < len(self.text)

    def assignment(self) -> Assignment:
        """Read an assignment, to the end of its last line."""
        begin = self.position
        match = _BEGINNING.match(self.text, begin)
        if match is None:
            raise self.error("expected NAME=value")
        self.position = match.end()
        line = self.text.count("\n", 0, begin) + 1
        parts = self.value()
        source = self.text[match.end() : self.position]
        if match["plus"]:  # NAME+=value
            parts = (Reference(match["name"]), *parts)
            source = f"${{{match['name']}}}{source}"
        self.position = max(self.position, _end_of_line(self.text, self.position))
        return Assignment(match["name"], parts, source, line)

    def value(self) -> Parts:
        """Read a value up to the end of the line, or to a comment."""
        begin = self.position
        parts: list[str | Reference] = []
        has_quotes = False
        has_blanks = False
        while self.peek() and _END.match(self.text, self.position) is None:
            character = self.peek()
            if character in "\"'":
                self._check_quotes_here(begin, has_blanks)
                has_quotes = True
            if character in " \t;":
                self._check_separator_here(has_quotes)
                has_blanks = has_blanks or character != ";"
            is_word_start = self.position == begin or self.text[self.position - 1] == ":"
            if is_word_start and _TILDE.match(self.text, self.position):
                parts.append(Reference("HOME"))
                self.position += 1
            else:
                parts += self._piece()
        return tuple(parts)

    def _check_quotes_here(self, begin: int, has_blanks: bool) -> None:
        """Refuse quotes in the middle of a value whose reading by a shell nobody can have meant."""
        if self.position > begin and self.text[begin] in "{[":
            raise self.error("a shell drops the quotes inside of this value; put the whole value into single quotes")
        if has_blanks:
            raise self.error("a value with quotes after a blank; put the whole value into quotes")

    def _check_separator_here(self, has_quotes: bool) -> None:
        """Refuse what a shell takes for the next word or command."""
        if _NEXT_ASSIGNMENT.match(self.text, self.position):
            raise self.error("two assignments on one line; write one a line, or put the value into quotes")
        if has_quotes:
            raise self.error("a blank or `;` outside of the quotes; put the whole value into quotes")

    def _piece(self) -> list[str | Reference]:
        """Read a character outside of quotes, a quoted part or a reference."""
        begin = self.position
        character = self.take()
        if character == "'":
            end = self.text.find("'", self.position)
            if end < 0:
                raise self.error("the quote ' is not closed", begin)
            self.position = end + 1
            return [self.text[begin + 1 : end]]
        if character == '"':
            return self._in_double_quotes(begin)
        if character == "\\":
            if self.peek() == "\n":  # the line is continued
                self.position += 1
                return []
            return [self.take() or "\\"]
        return [self._character_or_reference(character)]

    def _in_double_quotes(self, begin: int) -> list[str | Reference]:
        """Read up to the closing double quote. The opening one stands at `begin`."""
        parts: list[str | Reference] = []
        while (character := self.take()) != '"':
            if not character:
                raise self.error('the quote " is not closed', begin)
            if character != "\\":
                parts.append(self._character_or_reference(character))
            elif self.peek() and self.peek() in _ESCAPED_IN_QUOTES:
                parts.append(self.take())
            elif self.peek() == "\n":
                self.position += 1
            else:
                parts.append(character)
        return parts

    def _character_or_reference(self, character: str) -> str | Reference:
        """Return a character that was just taken, or the reference that it begins."""
        if character == "`" or (character == "$" and self.peek() == "("):
            raise self.error("$( ) and backquotes run a command, and no shell reads this; write the value itself")
        if character != "$":
            return character
        following = self.peek()
        if following == "{":
            return self._in_braces()
        match = _NAME.match(self.text, self.position)
        if match is not None:
            self.position = match.end()
            return Reference(match[0])
        if following and (following.isdigit() or following in "?$!@*#'\""):
            raise self.error(f"`${following}` is not read; in single quotes it is plain text")
        return "$"

    def _in_braces(self) -> Reference:
        """Read `${NAME}` or `${NAME:-word}` from its opening brace."""
        begin = self.position
        unread = "only ${NAME}, ${NAME-word}, ${NAME:-word}, ${NAME+word} and ${NAME:+word} are read"
        match = _NAME.match(self.text, begin + 1)
        if match is None:
            raise self.error(unread)
        self.position = match.end()
        if self.peek() == "}":
            self.position += 1
            return Reference(match[0])
        operator = _OPERATOR.match(self.text, self.position)
        if operator is None:
            raise self.error(unread)
        self.position = operator.end()
        word: list[str | Reference] = []
        while self.peek() != "}":
            if not self.peek() or self.peek() == "\n":
                raise self.error("${ is not closed", begin)
            word += self._piece()
        self.position += 1
        return Reference(match[0], operator[0], tuple(word))


def _end_of_line(text: str, position: int) -> int:
    end = text.find("\n", position)
    return len(text) if end < 0 else end
