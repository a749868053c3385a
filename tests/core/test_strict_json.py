import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcross.core.overrides import join, quote, split, unquote
from fedcross.core.strict_json import dumps, dumps_exact, loads_exact

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@pytest.mark.slow
@given(VALUES)
def test_every_value_comes_back_and_the_text_is_json(value):
    text = dumps_exact(value)
    json.loads(text, parse_constant=lambda name: pytest.fail(name))
    json.loads(dumps(value), parse_constant=lambda name: pytest.fail(name))
    assert loads_exact(text) == value


def test_what_is_not_finite():
    assert dumps({"a": [math.inf, math.nan, 1.0]}) == '{"a": [null, null, 1.0]}'
    assert math.isnan(loads_exact(dumps_exact([math.nan]))[0])
    assert loads_exact('{"best": Infinity}') == {"best": math.inf}  # as version 0.1 wrote it


@given(st.text())
def test_a_quoted_text_comes_back(text):
    assert unquote(quote(text)) == text
    assert split(join([f"output={quote(text)}"])) == [f"output={quote(text)}"]
