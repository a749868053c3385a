import pytest

from fedcross.core.errors import UploadError, one_line


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
