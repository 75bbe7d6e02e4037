import resource

import pytest

from asr.files import replacing


@pytest.fixture
def little_space():
    """Lets no file have more than 10 bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_file_is_replaced_once_all_is_written(tmp_path):
    path = tmp_path / "a.txt"
    for text in ("one", "two"):
        with replacing(path) as unfinished:
            unfinished.write_text(text)
            assert unfinished.suffix == ".txt" and (text == "one") != path.exists()
        assert path.read_text() == text and list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_an_error_that_names_the_file_which_is_as_it_was(tmp_path, little_space):
    path = tmp_path / "a.txt"
    path.write_text("before")
    with pytest.raises(OSError, match=r"File too large: '.*/a\.txt'"), replacing(path) as unfinished:
        unfinished.write_text("too much for the disk")
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]


def test_an_interrupt_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("before")
    with pytest.raises(KeyboardInterrupt), replacing(path) as unfinished:
        unfinished.write_text("half")
        raise KeyboardInterrupt
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]
