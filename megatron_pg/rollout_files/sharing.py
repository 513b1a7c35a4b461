"""Rollout files that several ranks read together: each piece by one of them, which sends its rows to where they belong."""

import hashlib
import itertools
import pickle
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_pg.rollout_files.reader import FileAccount, check_num_rows, pieces_of
from megatron_pg.rollout_files.schema import ParseRow
from megatron_pg.step.agreement import compute_and_gather, deal

PlacedRow = tuple[int, int, ParseRow]
"""A row with its file in the list and its number there."""


def check_same_place(places: Sequence[Any], label: str) -> None:
    """Refuse ranks that read other files than the first, or from another place; `label` says what they are ranks of."""
    for rank, other in enumerate(places):
        if other != places[0]:
            raise ValueError(
                f"{label} {rank} reads other samples than rank 0: expected the same files on all nodes, with the same "
                "contents and read from the same place; list them there, and try again"
            )


@dataclass
class _OpenPiece:
    """A piece whose rows are not all passed, as every rank knows it."""

    reader: int
    file: int
    row: int  # the next of its rows
    end: int  # the row after its last
    rows: Iterator[ParseRow]  # from `row` on, at its reader; nothing on other ranks


class SharedReading:
    """The rows of a list of files from a place on, read by the ranks of a group together.

    The ranks open a piece each, in turn: a row group of Parquet, or a stretch of JSON Lines. They tell each other how many
    rows are in it, so that all know the number of every row. A row is parsed where it belongs.

    Args:
        paths: the files, with their `accounts`: the same on every rank.
        file: the file to begin with, and `row`: the row of it.
        data_parallel_rank: this rank's among `data_parallel_size`; several ranks of the group may have the same, and each of
            them gets its rows.
        group: the ranks that read together. All must construct one at a time and then call `pull` alike.

    Raises:
        ValueError: ranks that see other files or begin elsewhere, or a data-parallel rank that is not in the group; on all
            ranks alike.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        accounts: Sequence[FileAccount],
        file: int,
        row: int,
        *,
        data_parallel_rank: int,
        data_parallel_size: int,
        group: dist.ProcessGroup,
    ) -> None:
        self._paths, self._group, self._reader = paths, group, dist.get_rank(group)
        self._rank, self._size, self._start = data_parallel_rank, data_parallel_size, (file, row)
        place = hashlib.blake2b(repr((file, row, *accounts)).encode(), digest_size=16).digest()
        _, everyone = compute_and_gather(
            lambda: data_parallel_rank, lambda rank: (place, rank), group, "rank"
        )
        check_same_place([other for other, _ in everyone], "rank")
        self._rank_of_reader = [rank for _, rank in everyone]
        if missing := set(range(data_parallel_size)).difference(self._rank_of_reader):
            raise ValueError(
                f"reading_group lacks data-parallel rank {min(missing)} of {data_parallel_size}, whose rows would be lost: "
                "give a group with all of them"
            )
        self._pieces = (
            (at, piece)
            for at in range(file, len(paths))
            for piece in pieces_of(paths[at], accounts[at][1])
        )
        self._open: deque[_OpenPiece] = deque()
        self._num_rows = Counter({file: 0})

    def pull(self, count: int) -> tuple[list[PlacedRow], tuple[int, int]]:
        """Return this rank's rows of the next `count` times `data_parallel_size`, and the place after these.

        Raises:
            ValueError: a file cannot be read by the rank whose turn it is, or is shorter than the place that this began at; on
                all ranks alike.
        """
        wanted = count * self._size
        while sum(piece.end - piece.row for piece in self._open) < wanted and self._open_pieces():
            pass
        (mine, parts, place), _ = compute_and_gather(
            lambda: self._take(wanted), lambda _: None, self._group, "rank"
        )
        sent = [iter(pickle.loads(part)) for part in deal(parts, self._group)]
        return [(file, row, next(sent[reader])) for file, row, reader in mine], place

    def _open_pieces(self) -> bool:
        """Open the next piece on every rank; return False where no piece is left."""

        def open_mine() -> tuple[list[int], tuple[int, Iterator[ParseRow]]]:
            pieces = list(itertools.islice(self._pieces, len(self._rank_of_reader)))
            is_mine = self._reader < len(pieces)
            return [file for file, _ in pieces], pieces[self._reader][1]() if is_mine else _NO_PIECE

        (files, (_, rows)), sizes = compute_and_gather(
            open_mine, lambda opened: opened[1][0], self._group, "rank"
        )
        for reader, (file, size) in enumerate(zip(files, sizes, strict=False)):
            begin = self._num_rows[file]
            self._num_rows[file] = end = begin + size
            passed = min(max(self._start[1] - begin, 0), size) if file == self._start[0] else 0
            mine = itertools.islice(rows, passed, None) if reader == self._reader else iter(())
            self._open.append(_OpenPiece(reader, file, begin + passed, end, mine))
        file, row = self._start
        if row and (not files or files[-1] > file):
            check_num_rows(self._paths[file], self._num_rows[file], row)
        return bool(files)

    def _take(self, wanted: int) -> tuple[list[tuple[int, int, int]], list[bytes], tuple[int, int]]:
        """Take the next rows from the open pieces.

        Returns:
            The file, the number and the reader of each row of this rank; pickled for each rank of the group, its rows that were
            read here; the place after them.
        """
        mine: list[tuple[int, int, int]] = []
        parts: list[list[ParseRow]] = [[] for _ in range(self._size)]
        place, taken = (len(self._paths), 0), 0
        while self._open and taken < wanted:
            piece = self._open[0]
            count = min(piece.end - piece.row, wanted - taken)
            first = (self._rank - taken) % self._size
            mine += (
                (piece.file, piece.row + at, piece.reader) for at in range(first, count, self._size)
            )
            if piece.reader == self._reader:
                for slot in range(taken, taken + count):
                    parts[slot % self._size].append(next(piece.rows))
            taken, piece.row = taken + count, piece.row + count
            if taken == wanted:
                place = piece.file, piece.row
            if piece.row == piece.end:
                self._open.popleft()
        pickled = list(map(pickle.dumps, parts))
        return mine, [pickled[rank] for rank in self._rank_of_reader], place


_NO_PIECE: tuple[int, Iterator[ParseRow]] = (0, iter(()))
