"""What new processes import."""

import os

from pdecay._utils.imports import safe_path


def test_safe_path_in_a_deleted_folder(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    folder = tmp_path / "deleted"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    with safe_path():
        pass
    assert "PYTHONSAFEPATH" not in os.environ
