"""What a request carries by its client configuration: headers with secrets, and a TLS context.

Files are read again when they change, so a rotated token or certificate needs no reload.
"""

from __future__ import annotations

import ssl
from base64 import b64encode
from collections.abc import Iterable
from pathlib import Path

from prefixwatch.exporters.errors import ExporterError
from prefixwatch.exporters.http.client_config import ClientConfig, TlsConfig

TLS_VERSIONS = {
    "TLS10": ssl.TLSVersion.TLSv1,
    "TLS11": ssl.TLSVersion.TLSv1_1,
    "TLS12": ssl.TLSVersion.TLSv1_2,
    "TLS13": ssl.TLSVersion.TLSv1_3,
}

Stamp = tuple[int, int, int]


def stamp(path: Path) -> Stamp | None:
    """Changes whenever the file does; None when there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


class Credentials:
    """The secrets and certificates of all client configurations, kept until their files change."""

    def __init__(self) -> None:
        self._texts: dict[Path, tuple[Stamp | None, str]] = {}
        self._contexts: dict[str, tuple[tuple[Stamp | None, ...], ssl.SSLContext]] = {}

    def headers(self, client: ClientConfig) -> dict[str, str]:
        """Authentication and further headers. Raises ExporterError when a file can't be read."""
        headers = {name: value.get_secret_value() for name, value in client.http_headers.items()}
        if (token := client.authorization) is not None:
            secret = token.credentials.get_secret_value() if token.credentials else self._text(token.credentials_file)
            headers["Authorization"] = f"{token.type} {secret}"
        elif (basic := client.basic_auth) is not None:
            password = basic.password.get_secret_value() if basic.password else self._text(basic.password_file)
            headers["Authorization"] = "Basic " + b64encode(f"{basic.username}:{password}".encode()).decode()
        return headers

    def tls(self, client: ClientConfig) -> ssl.SSLContext | bool:
        """For aiohttp's `ssl`: True checks against the system's authorities. Raises ExporterError."""
        config = client.tls_config
        if config is None:
            return True
        key = config.model_dump_json()
        stamps = tuple(stamp(path) for path in (config.ca_file, config.cert_file, config.key_file) if path)
        known = self._contexts.get(key)
        if known is None or known[0] != stamps:
            self._contexts[key] = known = stamps, _context(config)
        return known[1]

    def forget_all_but(self, clients: Iterable[ClientConfig]) -> None:
        """Let go of what no configuration in use needs any more."""
        kept = {client.tls_config.model_dump_json() for client in clients if client.tls_config}
        self._contexts = {key: context for key, context in self._contexts.items() if key in kept}

    def _text(self, path: Path | None) -> str:
        assert path is not None  # the configuration holds a secret or a file
        now = stamp(path)
        known = self._texts.get(path)
        if known is None or known[0] != now or now is None:
            try:
                text = path.read_text(encoding="utf-8").strip()
            except (OSError, UnicodeDecodeError) as error:
                why = getattr(error, "strerror", None) or "it is not text"
                raise ExporterError(f"{path}: can't be read: {why}; the target's authentication needs it") from error
            if not text.isprintable():
                raise ExporterError(f"{path}: holds more than one line; a secret is one line of text")
            self._texts[path] = known = now, text
        return known[1]


def _context(config: TlsConfig) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=str(config.ca_file) if config.ca_file else None)
    except (OSError, ssl.SSLError) as error:
        raise ExporterError(f"tls_config.ca_file {config.ca_file}: {_why(error)}; give a PEM file") from error
    if config.cert_file and config.key_file:
        try:
            context.load_cert_chain(str(config.cert_file), str(config.key_file))
        except (OSError, ssl.SSLError) as error:
            files = f"cert_file {config.cert_file}, key_file {config.key_file}"
            raise ExporterError(f"tls_config: {files}: {_why(error)}; give PEM files that belong together") from error
    if config.insecure_skip_verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if config.min_version:
        context.minimum_version = TLS_VERSIONS[config.min_version]
    return context


def _why(error: OSError | ssl.SSLError) -> str:
    return error.reason if isinstance(error, ssl.SSLError) and error.reason else error.strerror or str(error)
