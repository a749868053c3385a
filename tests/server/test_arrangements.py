"""What the settings of a run mean for its server. (The log of replies and the audit trail: test_reply_log.py.)"""

from fedcross.conf.schema import load
from fedcross.server.arrangements import federation_of
from fedcross.strategies.round.federation import Meeting


def test_messages_are_packed_where_clients_are_on_a_network():
    config = load(())
    assert not federation_of(config, "run").packs
    assert federation_of(config, "run", network=True).packs
    assert not federation_of(load(("federation.packed=false",)), "run", network=True).packs
    assert federation_of(load(("federation.packed=true",)), "run").packs


def test_every_setting_of_the_group_reaches_the_method():
    changed = {
        "min_clients": 2,
        "wait_s": 7.0,
        "deadline_s": 8.0,
        "min_replies": 2,
        "enough_replies": 3,
        "reassign": 1,
        "hedge": 1,
        "lead": 2.0,
        "resend_s": 9.0,
        "packed": True,
    }
    assert changed.keys() == Meeting.model_fields.keys()
    config = load([f"federation.{name}={value}" for name, value in changed.items()])
    assert federation_of(config, "run").model_dump(include=set(changed)) == changed
