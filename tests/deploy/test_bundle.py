import io
import tarfile

import pytest
import yaml

from fedcross.core.errors import ConfigError
from fedcross.deploy import bundle, keys
from fedcross.deploy.control import read_public_key


def test_a_bundle_holds_all_that_a_device_needs_and_no_key_of_the_server(tmp_path):
    keys.init(tmp_path / "keys")
    (tmp_path / "work").mkdir()
    authority = tmp_path / "keys" / "server" / "ca.crt"
    public = bundle.make(tmp_path / "work", authority, "porch", "fl.example.org:8443", 3, 0.4)
    assert read_public_key(public)[1] == 3
    packed = io.BytesIO()
    bundle.write_tar(tmp_path / "work", packed)
    packed.seek(0)
    with tarfile.open(fileobj=packed) as archive:
        archive.extractall(tmp_path / "device", filter="data")
    device = tmp_path / "device" / "porch"
    files = {str(path.relative_to(device)) for path in device.rglob("*") if path.is_file()}
    names = {"ca.crt", "porch-node.key", "porch-node.pub", "superexec.key"}
    assert files == {
        *(f"keys/{name}" for name in names),
        "docker-compose.yml",
        ".env",
        "README.md",
        "fedcross-porch.service",
    }
    assert (device / "keys" / "ca.crt").read_bytes() == authority.read_bytes()
    assert (device / "keys" / "porch-node.key").stat().st_mode & 0o777 == 0o600
    service = yaml.safe_load((device / "docker-compose.yml").read_text())["services"]["porch"]
    command = "fedcross deploy start device --keys /keys --superlink fl.example.org:8443 --width=0.4"
    assert service["command"] == command
    assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])
    assert (
        "--keys /etc/fedcross/porch/keys --superlink fl.example.org:8443"
        in (device / "fedcross-porch.service").read_text()
    )
    assert not any("$" in line for line in (device / "README.md").read_text().splitlines())


@pytest.mark.parametrize(
    ("name", "address", "partition", "width"),
    [("Porch", "a:1", 0, None), ("porch", "a", 0, None), ("porch", "a:1", -1, None), ("porch", "a:1", 0, 1.5)],
)
def test_a_wrong_device_makes_nothing(tmp_path, name, address, partition, width):
    with pytest.raises(ConfigError):
        bundle.make(tmp_path, tmp_path / "ca.crt", name, address, partition, width)
    assert list(tmp_path.iterdir()) == []
