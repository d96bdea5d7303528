"""Files, folders and hub ids to records, each with the place it came from.

A record is unchecked file content; what cannot be read is always a DataError that names file and line.
"""

from __future__ import annotations

import csv
import errno
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeft import config
from edgeft.errors import DataError
from edgeft.host import offline
from edgeft.host.offline import go_offline_if_unreachable

Record = tuple[str, Any]  # source ("train.jsonl:12") and content

TEXT_ENDINGS = (".txt", ".md", ".markdown")
TABLE_ENDINGS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
HELDOUT_NAMES = ("heldout", "dev", "valid", "validation", "val", "eval", "test")  # the first that exists is used
LIST_KEYS = ("data", "rows", "train", "examples", "items", "records")  # where a JSON object may keep its rows
NOT_ROWS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
KNOWN_HINT = f"known endings: {' '.join(TABLE_ENDINGS + TEXT_ENDINGS)}"
ROW_HINT = 'one row per line, for example {"question": "…", "answer": "…"}'
UTF8_HINT = "save the file as UTF-8 (`iconv -f latin1 -t utf-8 OLD > NEW`)"

MAX_LINE_BYTES = 16 << 20  # a line is read whole: one of 16 MiB is a book, and takes 0.3 GiB at the worst
MAX_WHOLE_BYTES = 256 << 20  # of a file that is read whole
MAX_FILE_BYTES = 2 << 30  # of any: all rows are in memory before they are tokens
MAX_ROWS = 1 << 24


class Unusable(Exception):
    """Why a record cannot become a row."""


@dataclass
class Paragraph:
    """A piece of a text file between blank lines."""

    text: str
    follows: str  # where the paragraph before it stands; "" for the first


@dataclass
class Source:
    name: str  # short, for messages
    file: str  # path, or hub id and split
    records: Iterable[Record]


def _lines(path: Path, name: str) -> Iterator[str]:
    """Lines with their endings; a BOM is fine, anything but UTF-8 is an error with its line number."""
    with path.open("rb") as file:
        for number, raw in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), 1):
            if len(raw) > MAX_LINE_BYTES:
                raise DataError(f"{name}, line {number}: longer than {MAX_LINE_BYTES >> 20} MiB", ROW_HINT)
            if number > MAX_ROWS:
                raise DataError(f"{name} has more than {MAX_ROWS:,} lines", "use a part of it")
            try:
                yield raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError:
                raise DataError(f"{name}, line {number}: not UTF-8 text", UTF8_HINT) from None


def _parse(text: str, name: str, first_line: int = 1) -> Any:
    try:
        return json.loads(text.rstrip("\r\n"))  # so that an error at a row's end is on the row's line
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        hint = "check the quotes and commas there; every row of a .jsonl file is one complete object on one line"
        raise DataError(f"{name}, line {line}: broken JSON ({error.msg}, column {error.colno})", hint) from None
    except (RecursionError, ValueError) as error:  # nested too deeply; a number of thousands of digits
        raise DataError(f"{name}, line {first_line}: JSON that cannot be read ({error})") from None


def _read_jsonl(path: Path, name: str) -> Iterator[Record]:
    for number, line in enumerate(_lines(path, name), 1):
        if line.strip():
            yield f"{name}:{number}", _parse(line, name, number)


def _read_json(path: Path, name: str) -> Iterator[Record]:
    if path.stat().st_size > MAX_WHOLE_BYTES:
        what = f"{name} has more than {MAX_WHOLE_BYTES >> 20} MiB, and JSON is read whole"
        raise DataError(what, "write it as .jsonl, one row per line")
    text = "".join(_lines(path, name))
    try:
        value = _parse(text, name)
    except DataError:
        first = text.lstrip().partition("\n")[0].strip()
        if first.startswith("{") and first.endswith("}"):  # JSON Lines under the wrong ending
            yield from _read_jsonl(path, name)
            return
        raise
    if isinstance(value, dict):
        lists = [value[key] for key in LIST_KEYS if isinstance(value.get(key), list)]
        value = lists[0] if lists else [value]  # an object without a list is one row
    if not isinstance(value, list):
        raise DataError(f"{name} holds no list of rows", 'a list of objects: [{"question": "…", "answer": "…"}]')
    for number, record in enumerate(_flat(value), 1):
        yield f"{name}:row {number}", record


def _flat(records: list[Any]) -> Iterator[Any]:
    """SQuAD's original nesting (articles, paragraphs, questions) opened up; anything else as it is."""
    for record in records:
        if not (isinstance(record, dict) and isinstance(record.get("paragraphs"), list)):
            yield record
            continue
        for paragraph in record["paragraphs"]:
            asked = paragraph.get("qas") if isinstance(paragraph, dict) else None
            if not isinstance(asked, list) or not all(isinstance(one, dict) for one in asked):
                yield Unusable("a paragraph without a list of questions")
                continue
            for one in asked:
                yield {"context": paragraph.get("context"), **one}


def _read_csv(path: Path, name: str) -> Iterator[Record]:
    csv.field_size_limit(MAX_LINE_BYTES)
    header = next(_lines(path, name), "")
    delimiter = "\t" if path.suffix.lower() == ".tsv" else max(",;\t|", key=header.count)
    table = csv.DictReader(_lines(path, name), delimiter=delimiter)
    try:
        for record in table:
            source = f"{name}:{table.line_num}"
            yield source, Unusable("more fields than the header") if None in record else record
    except csv.Error as error:
        what = f"{name}, line {table.line_num}: broken CSV ({error})"
        raise DataError(what, "fields with commas or quotes need quotes") from None


def _read_parquet(path: Path, name: str) -> Iterator[Record]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise DataError(f"{name}: reading Parquet needs pyarrow", "pip install pyarrow") from None
    try:
        with parquet.ParquetFile(path, memory_map=False) as file:
            if file.metadata.num_rows > MAX_ROWS:
                raise DataError(f"{name} claims {file.metadata.num_rows:,} rows", "use a part of it")
            number = 0
            for batch in file.iter_batches(batch_size=256, use_threads=False):
                if batch.nbytes > MAX_WHOLE_BYTES:
                    raise DataError(f"{name}, from row {number + 1}: 256 rows of {batch.nbytes >> 20} MiB", ROW_HINT)
                for record in batch.to_pylist():
                    number += 1
                    yield f"{name}:row {number}", record
    except (pyarrow.ArrowException, OSError, OverflowError, ValueError) as error:
        if isinstance(error, OSError) and error.errno:  # the file system's; pyarrow's own have no number
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise DataError(f"{name} is not a readable Parquet file: {reason}", "write the file again") from None


def _read_text(path: Path, name: str) -> Iterator[Record]:
    """Paragraphs between blank lines."""
    before, start, part = "", 1, list[str]()
    for number, line in enumerate([*_lines(path, name), ""], 1):
        if line.strip():
            start = start if part else number
            part.append(line.rstrip("\r\n"))
        elif part:
            source = f"{name}:{start}"
            yield source, Paragraph("\n".join(part), before)
            before, part = source, []


READERS = {".jsonl": _read_jsonl, ".ndjson": _read_jsonl, ".json": _read_json, ".csv": _read_csv, ".tsv": _read_csv}
READERS |= {".parquet": _read_parquet, **dict.fromkeys(TEXT_ENDINGS, _read_text)}


def _read_file(path: Path, name: str) -> Iterator[Record]:
    read = READERS.get(path.suffix.lower())
    if read is None:
        raise DataError(f"{name}: unknown file ending `{path.suffix}`", KNOWN_HINT)
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # a pipe would block, a device would never end
            raise DataError(f"{name} is not a regular file", KNOWN_HINT)
        if status.st_size == 0:
            raise DataError(f"{name} is empty", ROW_HINT)
        if status.st_size > MAX_FILE_BYTES:
            raise DataError(f"{name} has more than {MAX_FILE_BYTES >> 30} GiB", "use a part of it: `head -n 100000`")
        yield from read(path, name)
    except OSError as error:
        raise os_error(error, name) from None


def os_error(error: OSError, name: str) -> DataError:
    if error.errno == errno.ENOENT:
        return DataError(f"no file or folder {name}", "give a file, a folder or a hub id (owner/name)")
    if error.errno in (errno.EACCES, errno.EPERM):
        return DataError(f"no permission to read {name}", "check with `ls -l`; `chmod u+r` grants it")
    if error.errno == errno.ELOOP:
        return DataError(f"{name} is a symbolic link that leads back to itself", "give the file itself")
    return DataError(f"cannot read {name}: {error.strerror or error}")


def _check_inside(path: Path, folders: list[Path]) -> None:
    """A downloaded folder may hold links to private files, which must not become training data."""
    real = path.resolve()
    if not any(real.is_relative_to(folder) for folder in folders):
        raise DataError(f"{path} is a link that leads out of its folder, to {real}", "give that file or folder itself")


def _walk(folder: Path) -> list[Path]:
    """Data files under a folder, in name order; each folder once, even when links lead around in circles."""
    files: list[Path] = []
    seen: set[tuple[int, int]] = set()
    inside = [folder.resolve()]
    if inside[0].parent.name == "snapshots":  # in the hub's cache, files are links to their content beside it
        inside.append(inside[0].parent.parent / "blobs")

    def refuse(error: OSError) -> None:
        raise os_error(error, str(error.filename))

    for root, folders, names in os.walk(folder, followlinks=True, onerror=refuse):
        status = os.stat(root)
        if (status.st_dev, status.st_ino) in seen:
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        _check_inside(Path(root), inside)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        usable = [Path(root, name) for name in sorted(names) if not name.startswith(".") and name not in NOT_ROWS]
        readable = [path for path in usable if path.suffix.lower() in READERS and path.is_file()]
        for path in readable:
            _check_inside(path, inside)
        files += readable
    tables = [path for path in files if path.suffix.lower() in TABLE_ENDINGS]
    if not files:
        raise DataError(f"{folder} holds no data files", KNOWN_HINT)
    return tables or files  # a README.md beside tables is no data


def _named(files: list[Path], name: str) -> list[Path]:
    """train.csv, or train-00000-of-00002.parquet."""
    return [path for path in files if re.match(rf"{name}([-_.]|$)", path.stem.lower())]


def _hub(name: str) -> dict[str, Source]:
    """Splits of a data set on the hub, `owner/name` or `owner/name:config`."""
    hint = "check the spelling and the network; a data set downloaded earlier is found offline too"
    try:
        go_offline_if_unreachable()  # before datasets is imported, which asks once
        import datasets

        datasets.disable_progress_bars()
        identifier, _, part = name.partition(":")
        splits = datasets.load_dataset(identifier, part or None)
    except ImportError:
        raise DataError(f"{name}: hub ids need `datasets`", "pip install datasets") from None
    except Exception as error:  # the hub client, its transport and the files raise many kinds
        if offline.on():
            what = f"{name} is neither a file nor in the hub's cache, and the network is disabled"
            raise DataError(what, offline.HINT) from None
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        if "onfig name is missing" in str(error):
            hint = f"choose a configuration: `{name}:NAME`"
        raise DataError(f"no file or folder {name}, and no such data set on the hub: {reason}", hint) from None
    return {
        str(split): Source(name, f"{name}/{split}", hub_records(f"{name}/{split}", table))
        for split, table in splits.items()
    }


def hub_records(name: str, table: Any) -> Iterator[Record]:
    labels = {column: feature for column, feature in table.features.items() if hasattr(feature, "int2str")}
    for number, record in enumerate(table, 1):
        for column, feature in labels.items():  # kept as numbers; -1 stands for unknown
            value = record[column]
            record[column] = feature.int2str(value) if isinstance(value, int) and value >= 0 else None
        yield f"{name}:row {number}", record


def find(path: str, without: str | None = None) -> tuple[list[Source], list[Source]]:
    """(sources, held-out sources); the second is empty unless names in a folder or on the hub tell them apart."""
    place = config.place(path)
    try:
        place.stat()
    except FileNotFoundError:
        hub_id = re.fullmatch(r"[\w-][\w.-]*/[\w.-]+(:[\w.-]+)?", path) and place.suffix.lower() not in READERS
        if not hub_id:
            raise os_error(FileNotFoundError(errno.ENOENT, ""), path) from None
        splits = _hub(path)
        held = [splits[name] for name in HELDOUT_NAMES if name in splits][:1]
        return ([splits["train"]], held) if "train" in splits and held else (list(splits.values()), [])
    except OSError as error:
        raise os_error(error, path) from None
    excluded = config.place(without).resolve() if without else None
    if not place.is_dir():
        if place.resolve() == excluded:
            raise DataError(f"{path} is both the training and the held-out file", "name another file with data.heldout")
        return [Source(place.name, str(place), _read_file(place, place.name))], []
    files = [file for file in _walk(place) if file.resolve() != excluded]
    train = _named(files, "train")
    heldout = next((matching for name in HELDOUT_NAMES if (matching := _named(files, name))), [])
    if not (train and heldout):
        train, heldout = files, []

    def opened(files: list[Path]) -> list[Source]:
        names = [str(file.relative_to(place)) for file in files]
        return [Source(name, str(file), _read_file(file, name)) for name, file in zip(names, files, strict=True)]

    return opened(train), opened(heldout)
