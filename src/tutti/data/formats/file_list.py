"""Text files that list the files of a data set, one a line."""

from __future__ import annotations

from pathlib import Path

from tutti.data.contents import Contents
from tutti.data.formats import Format, read_files
from tutti.errors import BadData
from tutti.records.npz import open_data_file
from tutti.registry import part


@part("list")
class FileList(Format):
    """Text files with the path of a file in each line; the samples of all of them are one data set."""

    endings = (".txt", ".list", ".lst")

    @staticmethod
    def read(path: Path, missing: str = "error", **options: object) -> Contents[object]:
        """Read the files of a list; further options are those of their format.

        Args:
            path: of the list. Paths in it count from its folder; after # a line may say anything.
            missing: as for each file.
            options: likewise.
        """
        with open_data_file(path) as file:
            try:
                lines = file.read(1 << 26).decode("utf-8-sig").splitlines()
            except UnicodeDecodeError as error:
                raise BadData(
                    f"{path} is no text in UTF-8, so no list of files; name it by its format"
                ) from error
        names = [name for line in lines if (name := line.partition("#")[0].strip())]
        if not names:
            raise BadData(f"{path} lists no files; write the path of one in each line")
        files = [path.parent / Path(name).expanduser() for name in names]
        for number, one in enumerate(files, 1):
            if one.resolve() == path.resolve() or one.name.lower().endswith(FileList.endings):
                raise BadData(f"{path} lists {names[number - 1]}, which is a list itself; list its files")
        contents = read_files(files, {**options, "missing": missing})
        return Contents(path.stem, contents.parts, contents.classes, contents.labels, contents.columns)
