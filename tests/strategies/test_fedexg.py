from tests.support.federation import run


def test_only_models_travel(tmp_path):
    method = run(tmp_path, "method=fedexg", "rounds=1").method
    assert method._report.bytes_down == method._report.bytes_up == 2 * 3 * 4 * 4810
