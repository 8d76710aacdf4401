"""Tests of deploy/two-hosts/make_certificates.sh: the files it makes, also when it runs again, and the files it leaves
alone.
"""

from __future__ import annotations

import ipaddress
import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key

SCRIPT = Path(__file__).parents[2] / "deploy/two-hosts/make_certificates.sh"
ROLES = ("prefill", "decode")
CONTAINERS_USER = 10001
AS_ORDINARY_USER = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"] if os.geteuid() == 0 else []
"""The beginning of a command that makes root run it without capabilities. Root may then write only what the owner of a
file may write.
"""
TIMEOUT_S = 60


@pytest.fixture
def tls(tmp_path: Path) -> Path:
    shutil.copy(SCRIPT, tmp_path)
    return tmp_path / "tls"


def make(tls: Path, *hosts: str, as_user: list[str] = AS_ORDINARY_USER) -> subprocess.CompletedProcess[str]:
    command = [*as_user, str(tls.parent / SCRIPT.name), *hosts]
    return subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


def made(tls: Path, *hosts: str) -> None:
    done = make(tls, *hosts)
    assert done.returncode == 0, done.stderr


def certificate(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def names(path: Path) -> set[str]:
    found = certificate(path).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return {*found.get_values_for_type(x509.DNSName), *map(str, found.get_values_for_type(x509.IPAddress))}


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def check_pair(tls: Path) -> None:
    """Asserts that each host's key belongs to its certificate, that the authority signed it, and that no other user can
    read the key.
    """
    authority = certificate(tls / "ca.pem")
    for role in ROLES:
        own = certificate(tls / role / "cert.pem")
        own.verify_directly_issued_by(authority)
        key = load_pem_private_key((tls / role / "key.pem").read_bytes(), password=None)
        assert key.public_key() == own.public_key()
        assert (tls / role / "ca.pem").read_bytes() == (tls / "ca.pem").read_bytes()
    for key_file in (tls / "ca.key", *(tls / role / "key.pem" for role in ROLES)):
        assert stat.S_IMODE(key_file.stat().st_mode) == 0o600
    for directory in (tls, *(tls / role for role in ROLES)):
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert sorted(path.name for path in tls.iterdir()) == ["ca.key", "ca.pem", "decode", "prefill"]


def test_each_host_gets_a_certificate_for_its_name_its_container_and_loopback(tls: Path) -> None:
    made(tls, "prefill.example", "192.0.2.7")
    check_pair(tls)
    assert names(tls / "prefill/cert.pem") == {"prefill.example", "prefill", "localhost", "127.0.0.1"}
    assert names(tls / "decode/cert.pem") == {"192.0.2.7", "decode", "localhost", "127.0.0.1"}


@pytest.mark.parametrize("host", ["2001:db8::7", "[2001:db8::7]"])
def test_an_ipv6_address_may_stand_in_brackets(tls: Path, host: str) -> None:
    made(tls, host, "decode.example")
    check_pair(tls)
    assert str(ipaddress.ip_address("2001:db8::7")) in names(tls / "prefill/cert.pem")


def test_run_again_it_keeps_the_authority_and_makes_new_certificates(tls: Path) -> None:
    made(tls, "prefill.example", "decode.example")
    before, mounted = contents(tls), (tls / "prefill").stat().st_ino
    made(tls, "other.example", "decode.example")
    check_pair(tls)
    assert (tls / "prefill").stat().st_ino == mounted, "a container that runs has the directory no more"
    after = contents(tls)
    assert {name for name in before if before[name] == after[name]} == {
        "ca.key",
        *("ca.pem", "prefill/ca.pem", "decode/ca.pem"),
    }
    assert "other.example" in names(tls / "prefill/cert.pem")


@pytest.mark.parametrize("unwritable", ["decode", "prefill", "."])
def test_what_it_may_not_write_it_names_and_changes_nothing(tls: Path, unwritable: str) -> None:
    made(tls, "prefill.example", "decode.example")
    before = contents(tls)
    (tls / unwritable).chmod(0o500)
    done = make(tls, "prefill.example", "decode.example")
    (tls / unwritable).chmod(0o700)
    assert done.returncode == 1
    assert f"{tls / unwritable}: not writable; run this with sudo" in done.stderr
    assert contents(tls) == before


def test_a_host_that_is_none_changes_nothing(tls: Path) -> None:
    """The invalid host comes second, after the first host's certificate was made."""
    made(tls, "prefill.example", "decode.example")
    before = contents(tls)
    assert make(tls, "prefill.example", "decode.example:50052").returncode != 0
    assert contents(tls) == before


def test_a_first_run_that_fails_leaves_no_authority_behind(tls: Path) -> None:
    assert make(tls, "prefill.example", "decode.example:50052").returncode != 0
    assert contents(tls) == {}
    made(tls, "prefill.example", "decode.example")
    check_pair(tls)


@pytest.mark.skipif(os.geteuid() != 0, reason="what sudo does needs root")
def test_with_sudo_the_containers_user_keeps_what_it_owns(tls: Path) -> None:
    made(tls, "prefill.example", "decode.example")
    before = contents(tls)
    for path in (tls / "decode", *(tls / "decode").iterdir()):
        os.chown(path, CONTAINERS_USER, -1)
    assert make(tls, "prefill.example", "decode.example").returncode == 1
    done = make(tls, "prefill.example", "decode.example", as_user=[])
    assert done.returncode == 0, done.stderr
    check_pair(tls)
    assert contents(tls)["decode/key.pem"] != before["decode/key.pem"]
    assert {path.stat().st_uid for path in (tls / "decode").iterdir()} == {CONTAINERS_USER}
    assert {path.stat().st_uid for path in (tls / "prefill").iterdir()} == {tls.stat().st_uid}


def test_without_two_hosts_it_says_what_it_wants(tls: Path) -> None:
    done = make(tls, "prefill.example")
    assert done.returncode == 2
    assert "PREFILL_HOST DECODE_HOST" in done.stdout
    assert not tls.exists()
