"""One local round stays easy to follow: few files, few moves between them."""

from tests.support.round_trace import trace_round

#: The most that one round may take: lower them when the round gets simpler, never raise them.
FILES, MOVES = 32, 164


def test_a_round_enters_few_files_and_moves_little_between_them(tmp_path):
    trace = trace_round(tmp_path)
    moves = sum(trace.moves.values())
    assert len(trace.files) <= FILES, sorted(trace.files)
    assert moves <= MOVES, trace.moves.most_common()
    assert {"client/trainer.py", "strategies/fedcross.py", "server/session.py"} <= set(trace.files)
