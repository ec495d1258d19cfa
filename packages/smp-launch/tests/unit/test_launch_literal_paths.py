"""Scripts that have ``/opt/ml`` in their own text."""

from __future__ import annotations

from pathlib import Path

import pytest

from smdistributed.modelparallel.launch.job import literal_paths


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        ("train.py", "open('/opt/ml/model/x')", True),
        ("deep/config.yaml", "path: /opt/ml", True),
        ("train.py", "os.environ['SM_MODEL_DIR']", False),
        ("weights.bin", "/opt/ml", False),
    ],
)
def test_texts_are_looked_through(tmp_path: Path, name: str, text: str, wanted: bool) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(text)
    assert literal_paths.are_in(tmp_path) is wanted


def test_large_and_broken_files_do_no_harm(tmp_path: Path) -> None:
    (tmp_path / "large.py").write_text("#" * (1 << 20) + "/opt/ml")
    (tmp_path / "broken.py").write_bytes(b"\xff\xfe")
    (tmp_path / "gone.py").symlink_to("nowhere")
    assert not literal_paths.are_in(tmp_path)


def test_only_root_can_show_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(literal_paths.os, "geteuid", lambda: 1000)
    assert not literal_paths.can_be_shown()
