"""Base of asynchronous methods with one global model."""

from __future__ import annotations

from abc import abstractmethod

from fedcross.strategies.asynchronous.visits import AsyncMethod
from fedcross.strategies.parts.objective import P
from fedcross.strategies.round.federation import State
from fedcross.strategies.wire.protocol import Payload, Round, Upload
from fedcross.strategies.wire.records import Arrays


class AsyncSingle(AsyncMethod[P]):
    """Base of asynchronous methods with one global model, which every free slot sends as it then is.

    A method defines :meth:`take`. ``version`` counts the changes of the model; ``sent`` holds what each slot sent last,
    with the version that it was. Uploads that arrive at the same virtual time are taken by slot.
    """

    def setup(self, arrays: Arrays) -> None:
        """Keep a copy of the initial model as the global one."""
        self.model: Arrays = {name: array.copy() for name, array in arrays.items()}
        self.version = 0
        self.sent: dict[int, tuple[int, Arrays]] = {}

    @abstractmethod
    def take(self, upload: Upload, sent: Arrays, staleness: int) -> None:
        """Use one upload of a client that got the model `sent`, which the server has changed `staleness` times since.

        The arrays of ``model`` are replaced and never changed in place, because slots still send them.
        """

    def prepare(self, slot: int) -> None:
        """Let `slot` send the model as it is now."""
        self.sent[slot] = self.version, self.model

    def payload(self, slot: int, client: int) -> Payload:
        """Return the model that was the global one when the visit began."""
        return Payload(client, slot, self.sent[slot][1] if slot in self.sent else self.model)

    def aggregate(self, current: Round, uploads: list[Upload]) -> dict[str, float]:
        """Take the uploads one after another."""
        for upload in uploads:
            version, sent = self.sent.get(upload.slot, (self.version, self.model))
            self.take(upload, sent, self.version - version)
        return {}

    def global_model(self) -> Arrays:
        """Return the global model."""
        return self.model

    def state(self) -> State:
        """Return the global model, and once each older version that is under way."""
        older = {version: arrays for version, arrays in self.sent.values() if version != self.version}
        arrays = {f"model.{name}": array for name, array in self.model.items()}
        for version, model in sorted(older.items()):
            arrays |= {f"version.{version}.{name}": array for name, array in model.items()}
        sent = {str(slot): version for slot, (version, _) in sorted(self.sent.items())}
        return State(arrays, {"version": self.version, "sent": sent})

    def restore(self, state: State) -> None:
        """Load what :meth:`state` returned."""
        self.model = {name: state.arrays[f"model.{name}"] for name in self.spec}
        self.version = int(state.values["version"])
        known = {self.version: self.model}
        for version in {int(version) for version in state.values["sent"].values()} - known.keys():
            known[version] = {name: state.arrays[f"version.{version}.{name}"] for name in self.spec}
        self.sent = {int(slot): (int(v), known[int(v)]) for slot, v in state.values["sent"].items()}
