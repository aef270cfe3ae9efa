"""`make test` runs what is marked `quick`: a part of every folder, whatever else is added or renamed."""

from pathlib import Path

import pytest

pytestmark = pytest.mark.quick

TESTS = Path(__file__).parent
FOLDERS = sorted({path.parent for path in TESTS.rglob("test_*.py")})


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: str(path.relative_to(TESTS)))
def test_every_folder_has_a_quick_test(folder):
    assert any("mark.quick" in path.read_text() for path in folder.glob("test_*.py"))


def test_no_test_is_both_quick_and_slow():
    """`slow` tests need a switch, so a newcomer would see them skipped."""
    modules = [path.read_text() for path in TESTS.rglob("test_*.py") if path != Path(__file__)]
    assert not [text for text in modules if "pytestmark = pytest.mark.quick" in text and "mark.slow" in text]
