"""The demo's data."""

from pathlib import Path

import pytest

from examples.demo_data import prepare

pytestmark = pytest.mark.quick


def test_a_folder_with_other_files_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match=r"contains thesis.txt, which is not demo data: name an empty folder"):
        prepare(tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"
