"""Texts by name and by file, and a text that begins anew at its end."""

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from sinkring.exporter import long_text
from sinkring.exporter.long_text import read_long_ids, read_text, text_at
from sinkring.runtime import Manifest
from sinkring.runtime.errors import InputError


def test_a_text_begins_anew_at_its_end() -> None:
    ids = np.arange(10, 15)
    assert text_at(ids, 3, 4).tolist() == [13, 14, 10, 11]
    assert text_at(ids, 12, 1).tolist() == [12]
    assert text_at(ids, -2, 3).tolist() == [13, 14, 10]


def test_a_file_is_read_as_it_stands(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("é\nb\n", encoding="utf-8")
    assert read_text(str(tmp_path / "a.txt")) == "é\nb\n"


def test_what_is_no_text_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "latin").write_bytes(b"\xe9")
    for source, says in ((tmp_path / "latin", "it is no UTF-8"), (tmp_path / "none", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(InputError, match=says):
            read_text(str(source))
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(InputError, match="apt-get install bible-kjv"):
        read_text("kjv")


def test_the_king_james_bible_is_asked_of_its_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: "/usr/bin/bible")
    done = subprocess.CompletedProcess([], 0, stdout="In the beginning")
    monkeypatch.setattr(long_text.subprocess, "run", lambda command, **_: done if command[0] == "bible" else None)
    assert read_text("kjv") == "In the beginning"


def test_a_text_has_the_ids_of_a_prompt(speaking_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("ab", encoding="utf-8")
    found = read_long_ids(speaking_bundle, Manifest.read(speaking_bundle), str(tmp_path / "a.txt"))
    assert len(found.ids) == 2, "a token for each byte, and this tokenizer puts nothing in front"
    assert found.ids[1] != found.ids[0]
