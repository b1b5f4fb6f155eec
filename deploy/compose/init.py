"""The service ``init`` of docker-compose.yml: certificates, passwords and an API key.

What is there is kept, so it runs at each start. Each service gets a volume with its own identity and nothing else;
the authority, the API key and the certificates of a user and an operator stay in a volume that no service sees.

    docker compose run --rm init key           prints the API key
    docker compose run --rm -T init user       writes a user's certificate, key and authority to stdout, as a tar archive
    docker compose run --rm -T init operator   the same, of an operator: for triptych drain and triptych scale
    docker compose run --rm init renew         replaces all certificates, while everything runs
"""

import os
import secrets
import subprocess
import sys
import tarfile
from pathlib import Path

AUTHORITY = Path("/authority")
IDENTITIES = Path("/identities")
API_KEY = AUTHORITY / "api-key"
DOMAIN = "triptych.internal"
DAYS = 365
RENEW_WITHIN_DAYS = 30
FILES = ("ca.pem", "cert.pem", "key.pem")
SERVICE, REDIS, GRAFANA = 10001, 999, 472
"""User ids: of the images of Triptych, of Redis and of Grafana."""
CERTIFIED = {
    "gateway": SERVICE,
    "router": SERVICE,
    "pool-manager": SERVICE,
    "encoder": SERVICE,
    "text": SERVICE,
    "redis": REDIS,
}
REDIS_CONF = """\
port 0
tls-port 6379
tls-cert-file /identity/cert.pem
tls-key-file /identity/key.pem
tls-ca-cert-file /identity/ca.pem
tls-auth-clients yes
requirepass {password}
dir /data
appendonly yes
maxmemory 128mb
maxmemory-policy noeviction
"""


def put(path: Path, content: bytes, owner: int) -> None:
    """Replace a file as a whole; only ``owner`` can read it."""
    new = path.with_name(f".{path.name}.new")
    new.unlink(missing_ok=True)
    new.touch(mode=0o600)
    new.write_bytes(content)
    os.chown(new, owner, owner)
    new.replace(path)


def kept(path: Path, owner: int) -> str:
    """The secret in ``path``, made if it is not there."""
    if not path.exists():
        put(path, secrets.token_urlsafe(32).encode(), owner)
    return path.read_text()


def certify(*options: str) -> None:
    """Make the certificates that are missing or expire soon, and hand them out."""
    command = ("triptych", "certs", str(AUTHORITY), "--name", DOMAIN, "--days", str(DAYS), *options)
    subprocess.run(command, check=True)
    for service, owner in CERTIFIED.items():
        own(service, owner)
        for name in FILES:
            content = (AUTHORITY / service / name).read_bytes()
            target = IDENTITIES / service / name
            if not target.exists() or target.read_bytes() != content:
                put(target, content, owner)


def own(service: str, owner: int) -> None:
    folder = IDENTITIES / service
    os.chown(folder, owner, owner)


def share_secrets() -> None:
    """The password of Redis, for it and the pool manager; an API key, as a digest for the gateway; Grafana's password."""
    managers = IDENTITIES / "pool-manager" / "redis-password"
    password = kept(managers, SERVICE)
    put(IDENTITIES / "redis" / "password", password.encode(), REDIS)
    put(IDENTITIES / "redis" / "redis.conf", REDIS_CONF.format(password=password).encode(), REDIS)
    own("grafana", GRAFANA)
    kept(IDENTITIES / "grafana" / "password", GRAFANA)
    keys = IDENTITIES / "gateway" / "keys.toml"
    if not keys.exists():
        command = (sys.executable, "-m", "triptych.services.gateway.keys", "new", "compose")
        made = subprocess.run(command, check=True, capture_output=True)
        put(API_KEY, made.stderr.strip(), 0)
        put(keys, made.stdout, SERVICE)


def hand_out(caller: str) -> None:
    with tarfile.open(fileobj=sys.stdout.buffer, mode="w|") as archive:
        for name in FILES:
            archive.add(AUTHORITY / caller / name, name)


def main(argv: list[str]) -> None:
    os.umask(0o077)
    match argv:
        case []:
            certify("--renew-within", str(RENEW_WITHIN_DAYS))
            share_secrets()
        case ["renew"]:
            certify("--renew")
        case ["key"]:
            sys.stdout.write(f"{API_KEY.read_text()}\n")
        case ["user" | "operator" as caller]:
            hand_out(caller)
        case _:
            sys.exit("usage: init [key | user | operator | renew]")


if __name__ == "__main__":
    main(sys.argv[1:])
