"""JSON files: an object for each sample, one a line or in a list.

Source: https://jsonlines.org, and RFC 8259 for JSON itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, TextIO

from tutti.data.contents import Contents
from tutti.data.formats import Format
from tutti.data.formats.texts import PACKED, lines_of, open_text, stem_of
from tutti.data.named_samples import NamedSamples
from tutti.errors import BadData
from tutti.records.untrusted import printable
from tutti.registry import part

_LIST: Final = tuple(f".json{packed}" for packed in PACKED)
"""The endings of files that are a list of samples, if they begin like one."""

_BLANK: Final = " \t\r\n"


@part("JSON lines")
class JsonLines(Format):
    """JSON lines: an object for each sample, whose keys are the columns; or a list of such objects."""

    endings = tuple(f".{form}{packed}" for form in ("jsonl", "ndjson", "json") for packed in PACKED)

    @staticmethod
    def read(
        path: Path,
        target: object = None,
        columns: object = None,
        missing: str = "error",
        labelled: bool = True,
        group: object = None,
    ) -> Contents[object]:
        """Read a table.

        Args:
            path: of the file.
            target: the key of what is to be predicted, or several.
            columns: those to predict it from: several of numbers, or one of lists of them; None: all others.
            missing: "drop" leaves out samples without a target.
            labelled: whether there must be a target.
            group: the key by which samples are grouped, which is no input.

        Raises:
            BadData: the file is broken, or there is a text where a number is due.
        """
        samples = NamedSamples(path, target, columns, labelled, group)
        with open_text(path) as file:
            for where, sample in _samples(file, path):
                samples.add(where, sample)
        return samples.contents(stem_of(path), missing)


def _samples(file: TextIO, path: Path) -> Iterator[tuple[str, dict[str, object]]]:
    """The samples in a file with their places; the values of a list are named by their positions."""
    width = 0
    for where, value in _values(file, path):
        if isinstance(value, list):
            width = width or len(value)
            if len(value) != width:
                raise BadData(
                    f"{path} has {len(value):,} values in {where}, where its first list has "
                    f"{width:,}; mend it"
                )
            value = {str(at): one for at, one in enumerate(value)}
        if not isinstance(value, dict) or not value:
            raise BadData(
                f"{path} has no object in {where}, but {printable(str(value)[:60])}; give one for "
                'each sample, such as {"x": [0.5, 2], "y": 1}'
            )
        yield where, value


def _values(file: TextIO, path: Path) -> Iterator[tuple[str, object]]:
    """The values in a file with their places: of each line, or of the list that is a file's content."""
    listed = path.name.lower().endswith(_LIST)
    for number, line in enumerate(lines_of(file, path), 1):
        text = line.strip(_BLANK)
        if not text:
            continue
        if text.startswith("[") and listed:
            samples = _parsed(line + file.read(), path, "its list")
            yield from ((f"object {at:,}", one) for at, one in enumerate(samples, 1))
            return
        yield f"line {number:,}", _parsed(text, path, f"line {number:,}")


def _parsed(text: str, path: Path, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = "it has too many levels" if isinstance(error, RecursionError) else str(error)[:200]
        raise BadData(f"{path} is broken in {where}: {printable(reason)}; mend it or leave it out") from error
