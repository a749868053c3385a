import errno

import pytest

from fedcross.core.errors import UploadError, one_line, remedy


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("out of memory: 3 GiB – \u00e4", "out of memory: 3 GiB – \u00e4"),
        ("first\n\nsecond\n", "first second"),
        ("ok\n\x1b[2J\rround 99/99\x00", "ok \\x1b[2J\\rround 99/99\\x00"),
        ("\u202eesrever\u2028line", "\\u202eesrever\\u2028line"),
        ("", ""),
    ],
)
def test_a_device_s_words_are_one_line_that_no_terminal_obeys(text, shown):
    assert one_line(text) == shown
    assert one_line(shown) == shown
    assert str(UploadError("client_error", text)) == f"client_error: {shown}"


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.ENOSPC, "free disk space"),
        (errno.EDQUOT, "free disk space"),
        (errno.EMFILE, "allow more open files"),
        (errno.ENFILE, "allow more open files"),
        (errno.EACCES, "give this user the right to write there"),
        (errno.EROFS, "give this user the right to write there"),
    ],
)
def test_the_advice_on_a_file_that_cannot_be_written(number, advice):
    assert remedy(OSError(number, "no")).startswith(advice)
