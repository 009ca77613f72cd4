"""Reading the files of a run's directory."""

from __future__ import annotations

from pathlib import Path

from elasticrt.event_log import PIECE_BYTES, added


def test_a_large_file_is_read_in_pieces(tmp_path: Path) -> None:
    """Logs may be larger than memory. No line is torn, however long; the last one is given when nothing follows."""
    path, offsets = tmp_path / "rank-0.n0.out", dict[Path, int]()
    lines = [*(f"line {number} \u20ac\n" for number in range(PIECE_BYTES // 4)), "\u20ac" * PIECE_BYTES + "\n", "half"]
    path.write_text("".join(lines), encoding="utf-8")
    pieces = list(added(path, offsets, whole=True))
    assert "".join(pieces) == "".join(lines[:-1])
    assert all(piece.endswith("\n") for piece in pieces)
    assert len(pieces[0].encode()) <= PIECE_BYTES
    assert list(added(path, offsets, whole=True)) == []
    assert list(added(path, offsets, whole=False)) == ["half"]
    assert offsets[path] == path.stat().st_size
