from __future__ import annotations

import os

import pytest

from pdecay.deployment.export.target import check_target


def test_only_regular_files_are_replaced(tmp_path):
    path = tmp_path / "model.onnx"
    assert check_target(path, (".onnx",)) == path
    path.write_bytes(b"old")
    assert check_target(path, (".onnx",)) == path
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ValueError, match="is a pipe or a device"):
        check_target(path, (".onnx",))
