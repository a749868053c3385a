"""What a device's light process imports, and the place that an error over a network names."""

import subprocess
import sys

import pytest

from fedcross.strategies.wire.protocol import place_of


def test_the_client_app_is_imported_without_torch():
    code = "import fedcross.client.app, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_error_names_the_last_line_of_the_users_code():
    with pytest.raises(ValueError, match="x") as caught:
        exec(compile("\n\nint('x')", "/somewhere/loss.py", "exec"), {})
    assert place_of(caught.value) == ("/somewhere/loss.py", 3)
    assert place_of(ValueError("nothing")) == ("", 0)
