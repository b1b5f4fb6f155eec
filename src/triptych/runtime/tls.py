"""Mutual TLS between services, from PEM files that may be replaced while the process runs."""

import contextlib
import logging
import re
import ssl
import threading
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, NoReturn, Self, TypeVar

from triptych.files import BadFile, check_regular
from triptych.ports import Clock
from triptych.runtime.clock import monotonic
from triptych.runtime.logs import BoundedWarnings

logger = logging.getLogger(__name__)

ROUTER, INSTANCE, POOL_MANAGER, SCALER, REDIS = "router", "instance", "pool-manager", "scaler", "redis"
"""Kinds of servers that are called by name. The certificate of a router under ``--tls-name NAME`` is for
``router.NAME``, and so on.
"""
GATEWAY, OPERATOR = "gateway", "operator"
"""Kinds of callers that nobody calls under their names."""
KINDS = frozenset({ROUTER, INSTANCE, POOL_MANAGER, SCALER, REDIS, GATEWAY, OPERATOR})

_CHECK_S = 1.0
_MAX_FILE_NBYTES = 4 << 20
"""A bundle with every public authority has a quarter of it. Files are read in the event loop."""
_EC_KEY = bytes.fromhex("06072a8648ce3d0201")
_KEYS_OF_GRPC = (
    bytes.fromhex("06092a864886f70d010101"),  # RSA
    _EC_KEY + bytes.fromhex("06082a8648ce3d030107"),  # P-256
    _EC_KEY + bytes.fromhex("06052b81040022"),  # P-384
)
"""How a certificate names the kind of its key, for the kinds that gRPC can use. OpenSSL takes more."""
_NAME = re.compile(r"(?=.{1,200}$)[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*", re.ASCII)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TlsSettings:
    """Mutual TLS between services."""

    tls_cert: Path | None = None
    """Certificate of this process (PEM). With it, tls_key and tls_ca, services talk to each other by mutual TLS. Files that
    are replaced are used for new connections."""
    tls_key: Path | None = None
    """Private key of the certificate (PEM)."""
    tls_ca: Path | None = None
    """CA certificates (PEM) that sign the certificates of trusted services."""
    tls_name: str = ""
    """Domain that certificates carry, as triptych.internal: a router is called as router.triptych.internal wherever it runs.
    Empty: certificates carry the hosts that are connected to."""

    def __post_init__(self) -> None:
        given = [name for name in ("tls_cert", "tls_key", "tls_ca") if getattr(self, name) is not None]
        if given and self.files is None:
            raise ValueError(f"{' and '.join(given)} alone: TLS needs tls_cert, tls_key and tls_ca")
        if self.tls_name and self.files is None:
            raise ValueError("tls_name alone: TLS needs tls_cert, tls_key and tls_ca")
        check_domain(self.tls_name)

    @property
    def files(self) -> tuple[Path, Path, Path] | None:
        """Certificate, key and authority; None without TLS."""
        if self.tls_cert is None or self.tls_key is None or self.tls_ca is None:
            return None
        return self.tls_cert, self.tls_key, self.tls_ca


def check_domain(name: str) -> None:
    """Raises ValueError for a ``tls_name`` that no certificate can carry. Empty means none."""
    if name and not _NAME.fullmatch(name):
        raise ValueError(f"tls_name {name!r} is no domain name in lower case")


class Reloaded(Generic[T]):
    """Object that ``make`` builds of files. Any thread may use it.

    It is built again on the first use more than a second after the files have changed. New files that cannot be used,
    as while they are being written, are logged and tried again. Until then the last ones count.
    """

    def __init__(self, files: Sequence[Path], make: Callable[[], T], *, clock: Clock = monotonic) -> None:
        """Raises ValueError as ``make`` does."""
        self._files = tuple(files)
        self._make = make
        self._clock = clock
        self._lock = threading.Lock()
        self._seen, self._value = self._state(), make()
        while self._seen != (now := self._state()):  # replaced meanwhile: parts may be of different files
            self._seen, self._value = now, make()
        self._fault = ""
        self._check_at_s = clock() + _CHECK_S

    @property
    def current(self) -> T:
        if self._clock() >= self._check_at_s and self._lock.acquire(blocking=False):
            try:
                self._check()
                self._check_at_s = self._clock() + _CHECK_S
            finally:
                self._lock.release()
        return self._value

    def _check(self) -> None:
        state = self._state()
        if state == self._seen and not self._fault:
            return
        try:
            value = self._make()
            if state != self._state():
                raise ValueError("the files changed while they were read")  # noqa: TRY301
        except ValueError as error:
            if str(error) != self._fault:
                logger.warning("new TLS files are not used yet: %s", error)
            self._fault = str(error)
            return
        self._seen, self._fault = state, ""
        if value != self._value:
            logger.info("new TLS files are in use: %s", self._files[0])
            self._value = value

    def _state(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(map(_file_state, self._files))


def _file_state(path: Path) -> tuple[int, int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


@dataclass(frozen=True, slots=True)
class Validity:
    """Times from which and until which a certificate is valid, seconds since 1970."""

    begins_s: float
    ends_s: float


@dataclass(frozen=True, slots=True)
class TlsMaterial:
    """Certificates and keys of a process, for new connections."""

    certificate: bytes = field(repr=False)
    """Including intermediate certificates, if any."""
    key: bytes = field(repr=False)
    authority: bytes = field(repr=False)
    listener: ssl.SSLContext = field(repr=False, compare=False)
    """Requires a certificate of callers."""
    caller: ssl.SSLContext = field(repr=False, compare=False)
    """Presents the certificate. It checks the name that it is given."""
    validity: Validity


class TlsIdentity:
    """The certificate of a process, and the authority that signs those of its peers.

    Both ends of a connection present a certificate signed by the authority. The caller also checks that the certificate
    names what it calls: ``name_of`` its kind, or the host it connects to. ``current`` follows the files.
    """

    def __init__(self, material: Reloaded[TlsMaterial], name: str) -> None:
        """Use ``load``."""
        self._material = material
        self._name = name

    @classmethod
    def load(
        cls,
        certificate: Path | str,
        key: Path | str,
        authority: Path | str,
        *,
        name: str = "",
        clock: Clock = monotonic,
    ) -> Self:
        """``name`` is the setting ``tls_name``. Raises ValueError when a file cannot be read, key and certificate do not
        match, or the certificate is not valid now.
        """
        check_domain(name)
        files = (Path(certificate), Path(key), Path(authority))
        return cls(Reloaded(files, lambda: _material(*files), clock=clock), name)

    @property
    def current(self) -> TlsMaterial:
        return self._material.current

    @property
    def validity(self) -> Validity:
        return self.current.validity

    def name_of(self, kind: str) -> str | None:
        """The name that the certificate of a service of this kind carries; None if it carries its host's."""
        return f"{kind}.{self._name}" if self._name else None

    def admits(self, names: Iterable[str], kinds: Collection[str]) -> bool:
        """Whether a peer whose certificate carries these domain names is of one of these kinds. Always without
        ``tls_name``, as certificates do not tell kinds then.
        """
        return not self._name or not self.kinds_of(names).isdisjoint(kinds)

    def kinds_of(self, names: Iterable[str]) -> frozenset[str]:
        """The kinds of a peer whose certificate carries these domain names; none without ``tls_name``."""
        if not self._name:
            return frozenset()
        carried = {name.lower() for name in names}
        every = f"*.{self._name}" in carried
        return frozenset(kind for kind in KINDS if every or f"{kind}.{self._name}" in carried)

    def listening(self, *kinds: str) -> ssl.SSLContext:
        """Context of a server: each connection uses the files of its time. Callers are of one of ``kinds``, if any are
        given.
        """
        admits = (lambda names: self.admits(names, kinds)) if kinds else _anyone
        return _Listening.make(lambda: self.current.listener, admits)

    def calling(self, kind: str) -> ssl.SSLContext:
        """Context for connections to services of this kind. Each uses the files of its time, and checks ``name_of`` the
        kind.
        """
        return _Calling.make(lambda: self.current.caller, self.name_of(kind))


def caller_of(authority: Path, certificate: Path | None, key: Path | None) -> ssl.SSLContext:
    """Context for connections to a server outside of the cluster's authority. The certificate is for servers that ask
    for one.

    Each connection uses the files of its time. Raises ValueError.
    """

    def make() -> ssl.SSLContext:
        files = [file for file in (authority, certificate, key) if file is not None]
        with _explained(*files):
            context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=str(authority))
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            if certificate is not None:
                context.load_cert_chain(str(certificate), None if key is None else str(key), password=_refuse_password)
            return context

    files = [file for file in (authority, certificate, key) if file is not None]
    following = Reloaded(files, make)
    return _Calling.make(lambda: following.current)


class ServerCertificate:
    """The certificate of a server whose callers need none."""

    def __init__(self, certificate: Path, key: Path, *, clock: Clock = monotonic) -> None:
        """Raises ValueError as ``TlsIdentity.load`` does."""

        def make() -> tuple[ssl.SSLContext, Validity]:
            with _explained(certificate, key):
                context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
                context.minimum_version = ssl.TLSVersion.TLSv1_2
                context.load_cert_chain(str(certificate), str(key), password=_refuse_password)
                return context, _validity(certificate, key, serves=True)

        self._made = Reloaded((certificate, key), make, clock=clock)

    @property
    def validity(self) -> Validity:
        return self._made.current[1]

    def listening(self) -> ssl.SSLContext:
        """Context whose connections each use the files of their time."""
        return _Listening.make(lambda: self._made.current[0])


class _Calling(ssl.SSLContext):
    """Stands for the context that ``source`` returns when a connection begins."""

    source: Callable[[], ssl.SSLContext]
    name: str | None

    @classmethod
    def make(cls, source: Callable[[], ssl.SSLContext], name: str | None = None) -> Self:
        """``name``, if given, is checked instead of the host."""
        context = cls(ssl.PROTOCOL_TLS_CLIENT)
        context.source, context.name = source, name
        return context

    def wrap_bio(self, *args: Any, **options: Any) -> ssl.SSLObject:
        """Wrap a connection, as event loops call it."""
        if self.name is not None:
            options["server_hostname"] = self.name
        return self.source().wrap_bio(*args, **options)


def _anyone(_: Iterable[str]) -> bool:
    return True


class _Listening(ssl.SSLContext):
    """Stands for the context that ``source`` returns when a connection begins, and logs those that it refuses."""

    source: Callable[[], ssl.SSLContext]
    admits: Callable[[Iterable[str]], bool]
    refusals: BoundedWarnings

    @classmethod
    def make(cls, source: Callable[[], ssl.SSLContext], admits: Callable[[Iterable[str]], bool] = _anyone) -> Self:
        """``admits`` decides by the domain names in the caller's certificate."""
        context = cls(ssl.PROTOCOL_TLS_SERVER)
        context.source, context.admits, context.refusals = source, admits, BoundedWarnings(logger)
        return context

    def wrap_bio(self, *args: Any, **options: Any) -> ssl.SSLObject:
        """Wrap a connection, as event loops call it."""
        context = self.source()
        context.sslobject_class = _Watched
        wrapped: Any = context.wrap_bio(*args, **options)
        wrapped.admits, wrapped.refusals = self.admits, self.refusals
        return wrapped  # type: ignore[no-any-return]


class _Watched(ssl.SSLObject):
    """Connection of a server. Event loops drop a handshake that fails without a word."""

    admits: Callable[[Iterable[str]], bool]
    refusals: BoundedWarnings

    def do_handshake(self) -> None:
        try:
            super().do_handshake()
            self._check_caller()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError as error:
            reasons = (getattr(error, name, None) for name in ("verify_message", "reason", "strerror"))
            self.refusals.warn(f"a TLS connection was refused: {next(filter(None, reasons), 'no reason given')}")
            raise

    def _check_caller(self) -> None:
        named: dict[str, Any] = self.getpeercert() or {}
        if not self.admits(name for kind, name in named.get("subjectAltName", ()) if kind == "DNS"):
            raise ssl.SSLError(ssl.SSL_ERROR_SSL, "the caller's certificate is not for a kind that may call")


def _material(certificate: Path, key: Path, authority: Path) -> TlsMaterial:
    with _explained(certificate, key, authority):
        listener = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(authority))
        listener.verify_mode = ssl.CERT_REQUIRED
        listener.options |= ssl.OP_NO_TICKET
        listener.num_tickets = 0  # nobody resumes a session after its certificate has expired
        caller = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=str(authority))
        for context in (listener, caller):
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            context.load_cert_chain(str(certificate), str(key), password=_refuse_password)
        return TlsMaterial(
            certificate.read_bytes(),
            key.read_bytes(),
            authority.read_bytes(),
            listener,
            caller,
            _validity(certificate, key, serves=False, kinds=_KEYS_OF_GRPC),
        )


def _refuse_password() -> NoReturn:
    """OpenSSL would ask the terminal for it."""
    raise ValueError("the TLS key needs a password: use one without")


@contextlib.contextmanager
def _explained(*files: Path) -> Generator[None]:
    """Raises ValueError for files that cannot be used."""
    for file in files:
        try:
            check_regular(file, _MAX_FILE_NBYTES)
        except BadFile as error:
            raise ValueError(f"the TLS file {file} {error}") from None
    try:
        yield
    except ssl.SSLCertVerificationError as error:
        raise ValueError(f"the certificate {files[0]} cannot be used: {error.verify_message}") from None
    except ssl.SSLError as error:
        raise ValueError(f"the TLS files cannot be used: {error.reason or 'not PEM'}") from None
    except OSError as error:
        name = error.filename or " or ".join(map(str, files))
        raise ValueError(f"a TLS file cannot be read: {name} ({error.strerror})") from None


def _validity(certificate: Path, key: Path, *, serves: bool, kinds: Sequence[bytes] = (b"",)) -> Validity:
    """Validity of the own certificate. Raises SSLCertVerificationError if it is not valid now, or not for that use, and ValueError
    for a key of none of ``kinds``.

    The module ``ssl`` decodes a certificate only when a peer presents it. So it is presented here, in memory, as a server's or a caller's.
    """
    listener, caller = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    caller.check_hostname = False
    listener.verify_mode, caller.verify_mode = ssl.CERT_NONE, ssl.CERT_NONE
    verifies = caller if serves else listener
    verifies.verify_mode = ssl.CERT_REQUIRED
    verifies.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # it may be signed by whom only its peers trust
    verifies.load_verify_locations(cafile=str(certificate))
    for context in (listener, caller):
        context.load_cert_chain(str(certificate), str(key), password=_refuse_password)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = caller.wrap_bio(to_client, to_server), listener.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(3):
        for end in ends:
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
    verifier = ends[0 if serves else 1]
    encoded = verifier.getpeercert(binary_form=True) or b""
    if not any(kind in encoded for kind in kinds):
        raise ValueError(f"the key of {certificate} is neither RSA nor ECDSA with P-256 or P-384: gRPC takes no others")
    own: dict[str, Any] = verifier.getpeercert() or {}
    return Validity(ssl.cert_time_to_seconds(own["notBefore"]), ssl.cert_time_to_seconds(own["notAfter"]))
