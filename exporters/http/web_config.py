"""TLS and basic authentication of the exporter's own pages, by the web-config file that Prometheus' exporters share.

Its format is documented at https://prometheus.io/docs/prometheus/latest/configuration/https/.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import secrets
import ssl
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Literal, Self

import bcrypt
from pydantic import Field, field_validator, model_validator

from prefixwatch.documents import load
from prefixwatch.exporters.errors import ExporterError
from prefixwatch.exporters.http.client_config import Strict, TlsVersion
from prefixwatch.exporters.http.credentials import TLS_VERSIONS, Stamp, stamp

_REMEMBERED_LOGINS = 100
_BCRYPT_BYTES = 72
_CHECKING_THREADS = 2
_MOST_WAITING = 32
"""Logins that wait for a thread; each takes up to half a second."""
_HEADERS = (
    "Content-Security-Policy",
    "Strict-Transport-Security",
    "X-Content-Type-Options",
    "X-Frame-Options",
    "X-XSS-Protection",
)


class TlsServerConfig(Strict):
    cert_file: Path = Field(description="PEM file of the server's certificate")
    key_file: Path = Field(description="PEM file of its key")
    client_auth_type: Literal[
        "NoClientCert", "RequestClientCert", "RequireAnyClientCert", "VerifyClientCertIfGiven",
        "RequireAndVerifyClientCert",
    ] = Field(default="NoClientCert", description="whether clients must show a certificate")  # fmt: skip
    client_ca_file: Path | None = Field(default=None, description="PEM file of the clients' authorities")
    min_version: TlsVersion = Field(default="TLS12", description="the oldest TLS version to speak")
    max_version: TlsVersion = Field(default="TLS13", description="the newest TLS version to speak")
    cipher_suites: tuple[str, ...] = Field(default=(), description="ciphers of TLS 1.2, by OpenSSL's names")

    @model_validator(mode="after")
    def _possible(self) -> Self:
        verifies = self.client_auth_type in ("VerifyClientCertIfGiven", "RequireAndVerifyClientCert")
        if verifies and self.client_ca_file is None:
            raise ValueError(f"client_auth_type {self.client_auth_type} needs client_ca_file")
        if not verifies and self.client_ca_file is not None:
            raise ValueError("client_ca_file has an effect only with a client_auth_type that verifies")
        if self.client_auth_type in ("RequestClientCert", "RequireAnyClientCert"):
            raise ValueError(
                f"client_auth_type {self.client_auth_type} is not supported, for it checks nothing: "
                "use RequireAndVerifyClientCert"
            )
        return self


class HttpServerConfig(Strict):
    http2: bool = Field(default=True, description="taken for compatibility; HTTP/1.1 is spoken in any case")
    headers: dict[str, str] = Field(default={}, description="security headers to send")

    @field_validator("headers")
    @classmethod
    def _known(cls, headers: dict[str, str]) -> dict[str, str]:
        for name in headers:
            if name not in _HEADERS:
                raise ValueError(f"'{name}' can't be set; the headers that can are {', '.join(_HEADERS)}")
        return headers


class WebConfig(Strict):
    """The whole file."""

    tls_server_config: TlsServerConfig | None = Field(default=None, description="serve https")
    http_server_config: HttpServerConfig = Field(default=HttpServerConfig(), description="headers")
    basic_auth_users: dict[str, str] = Field(default={}, description="user name: bcrypt hash of the password")

    @field_validator("basic_auth_users")
    @classmethod
    def _bcrypt(cls, users: dict[str, str]) -> dict[str, str]:
        for user, hashed in users.items():
            try:
                bcrypt.checkpw(b"", hashed.encode())
            except ValueError as error:
                raise ValueError(
                    f"the password of '{user}' is not a bcrypt hash: make one with `htpasswd -nBC 10 '' | tr -d ':'`"
                ) from error
        return users


@dataclass(frozen=True, slots=True)
class Prepared:
    """A file that was read and found good."""

    config: WebConfig
    stamps: tuple[Stamp | None, ...]


class TooManyLogins(Exception):
    """More logins are being checked than the exporter has time for; the client may try again."""


class WebSecurity:
    """Who may see the pages. Raises DocumentError or ExporterError for a file that can't be used."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._key = secrets.token_bytes(32)
        self._logins: OrderedDict[bytes, bool] = OrderedDict()
        self._checking = ThreadPoolExecutor(_CHECKING_THREADS, thread_name_prefix="logins")
        self._waiting = 0
        prepared = self._read()
        self._config, self._stamps = prepared.config, prepared.stamps
        tls = self._config.tls_server_config
        self.tls = _server_context(tls) if tls else None

    @property
    def headers(self) -> dict[str, str]:
        return self._config.http_server_config.headers

    @property
    def needs_login(self) -> bool:
        return bool(self._config.basic_auth_users)

    def prepare(self) -> Prepared:
        """Read the file and the certificates that it names again, without using them yet."""
        prepared = self._read()
        if (self._config.tls_server_config is None) != (prepared.config.tls_server_config is None):
            raise ExporterError(f"{self._file}: TLS can't be turned on or off while running: restart the exporter")
        return prepared

    def _read(self) -> Prepared:
        config = load(self._file, WebConfig)
        folder = self._file.parent
        tls = config.tls_server_config
        if tls is not None:  # paths are relative to the file, as everywhere with this format
            places = {
                name: folder / path
                for name in ("cert_file", "key_file", "client_ca_file")
                if (path := getattr(tls, name)) is not None
            }
            config = config.model_copy(update={"tls_server_config": tls.model_copy(update=places)})
            assert config.tls_server_config is not None
            _server_context(config.tls_server_config)
        return Prepared(config, self._stamps_of(config))

    def use(self, prepared: Prepared) -> None:
        """Serve by this from now on."""
        if self.tls is not None and prepared.config.tls_server_config is not None:
            _set_up(self.tls, prepared.config.tls_server_config)
        self._config, self._stamps = prepared.config, prepared.stamps
        self._logins.clear()

    def changed(self) -> bool:
        """Whether the file, or a certificate that it names, is another one now."""
        return self._stamps_of(self._config) != self._stamps

    async def allows(self, authorization: str | None) -> bool:
        """Whether this Authorization header is one of the users'. Takes as long for an unknown user as for a wrong
        password. Raises TooManyLogins when too many new logins are being checked."""
        user, password = _user_and_password(authorization)
        hashes = self._config.basic_auth_users
        hashed = hashes[user].encode() if user in hashes else b""
        digest = hmac.digest(self._key, b"\0".join((user.encode(), hashed, password)), sha256)
        known = self._logins.get(digest)
        if known is None:
            if self._waiting >= _MOST_WAITING:
                raise TooManyLogins
            self._waiting += 1
            try:
                dearest = max(map(_cost, hashes.values()))
                check = partial(_matches, password, hashed, dearest)
                known = await asyncio.get_running_loop().run_in_executor(self._checking, check)
            finally:
                self._waiting -= 1
            self._logins[digest] = known
            if len(self._logins) > _REMEMBERED_LOGINS:
                self._logins.popitem(last=False)
        return known

    def _stamps_of(self, config: WebConfig) -> tuple[Stamp | None, ...]:
        tls = config.tls_server_config
        files = (self._file, *((tls.cert_file, tls.key_file, tls.client_ca_file) if tls else ()))
        return tuple(stamp(file) for file in files if file is not None)


def _cost(hashed: str) -> int:
    """The cost of a bcrypt hash: `$2b$COST$…`, 2 to the power of COST rounds."""
    return int(hashed.split("$")[2])


def _matches(password: bytes, hashed: bytes, dearest: int) -> bool:
    """Whether it is the password of this hash; False for an empty one, which is nobody's.

    Takes the time of a hash of cost `dearest` in any case: a cheaper one is followed by others that add up to it, since
    2**c + 2**c + 2**(c + 1) + … + 2**(d - 1) = 2**d. A password that bcrypt can't take is checked as another one.
    """
    possible = len(password) <= _BCRYPT_BYTES and b"\0" not in password
    tried = password if possible else b"-"
    if not hashed:
        bcrypt.hashpw(tried, bcrypt.gensalt(dearest))
        return False
    matches = bcrypt.checkpw(tried, hashed)
    for cost in range(_cost(hashed.decode()), dearest):
        bcrypt.hashpw(tried, bcrypt.gensalt(cost))
    return matches and possible


def _user_and_password(authorization: str | None) -> tuple[str, bytes]:
    scheme, _, encoded = (authorization or "").partition(" ")
    if scheme.lower() != "basic":
        return "", b""
    try:
        user, _, password = base64.b64decode(encoded, validate=True).partition(b":")
        return user.decode(), password
    except (binascii.Error, ValueError):
        return "", b""


def _server_context(config: TlsServerConfig) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _set_up(context, config)
    return context


def _set_up(context: ssl.SSLContext, config: TlsServerConfig) -> None:
    try:
        context.minimum_version = TLS_VERSIONS[config.min_version]
        context.maximum_version = TLS_VERSIONS[config.max_version]
        context.load_cert_chain(config.cert_file, config.key_file)
        if config.cipher_suites:
            context.set_ciphers(":".join(config.cipher_suites))
        if config.client_ca_file is not None:
            required = config.client_auth_type == "RequireAndVerifyClientCert"
            context.verify_mode = ssl.CERT_REQUIRED if required else ssl.CERT_OPTIONAL
            context.load_verify_locations(config.client_ca_file)
    except (OSError, ssl.SSLError) as error:
        why = error.reason if isinstance(error, ssl.SSLError) and error.reason else error.strerror or str(error)
        files = ", ".join(str(file) for file in (config.cert_file, config.key_file, config.client_ca_file) if file)
        raise ExporterError(
            f"tls_server_config: {files}: {why}; give PEM files that can be read and belong together"
        ) from error
