"""How to speak to a target or a discovery server: TLS, authentication, extra headers. Spelled as Prometheus does."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self
from urllib.parse import SplitResult, urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator

TlsVersion = Literal["TLS10", "TLS11", "TLS12", "TLS13"]


class Strict(BaseModel):
    """Unknown keys are mistakes; a configuration doesn't change after it was read."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True, coerce_numbers_to_str=True)


def http_address(url: str, example: str) -> SplitResult:
    """The parts of an http(s) address without a login. Raises ValueError."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ValueError(f"'{url}' is not an http(s) URL: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise ValueError(f"'{url}' is not an http(s) URL such as {example}")
    if "@" in parts.netloc:
        raise ValueError("the URL holds a user name or password: put them into basic_auth of a configuration file")
    return parts


class Authorization(Strict):
    """The Authorization header: `<type> <credentials>`."""

    type: str = Field(default="Bearer", description="the scheme before the credentials, Bearer by default")
    credentials: SecretStr | None = Field(default=None, description="the token itself")
    credentials_file: Path | None = Field(default=None, description="a file with the token, read again when it changes")

    @model_validator(mode="after")
    def _one_secret(self) -> Self:
        if (self.credentials is None) == (self.credentials_file is None):
            raise ValueError("give either credentials or credentials_file")
        return self


class BasicAuth(Strict):
    """User name and password."""

    username: str = Field(description="the user name")
    password: SecretStr | None = Field(default=None, description="the password itself")
    password_file: Path | None = Field(default=None, description="a file with the password, read again when it changes")

    @model_validator(mode="after")
    def _one_secret(self) -> Self:
        if (self.password is None) == (self.password_file is None):
            raise ValueError("give either password or password_file")
        return self


class TlsConfig(Strict):
    """Whom to trust, and who to be."""

    ca_file: Path | None = Field(default=None, description="PEM file of the server's authorities")
    cert_file: Path | None = Field(default=None, description="PEM file of the client certificate")
    key_file: Path | None = Field(default=None, description="PEM file of the client certificate's key")
    server_name: str | None = Field(default=None, description="the name that the server's certificate must be for")
    insecure_skip_verify: bool = Field(default=False, description="true takes any certificate")
    min_version: TlsVersion | None = Field(default=None, description="the oldest TLS version to speak")

    @model_validator(mode="after")
    def _certificate_and_key(self) -> Self:
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("cert_file and key_file belong together: give both or none")
        return self


class ClientConfig(Strict):
    """Everything about a request but its address."""

    authorization: Authorization | None = Field(default=None, description="token authentication")
    basic_auth: BasicAuth | None = Field(default=None, description="user name and password")
    tls_config: TlsConfig | None = Field(default=None, description="certificates for https")
    http_headers: dict[str, SecretStr] = Field(default={}, description="headers to add to each request: name: value")

    @model_validator(mode="after")
    def _one_authentication(self) -> Self:
        if self.authorization and self.basic_auth:
            raise ValueError("authorization and basic_auth exclude each other: give one of them")
        for name, value in self.http_headers.items():
            if not name.isascii() or not name.replace("-", "").isalnum():
                raise ValueError(f"http_headers: '{name}' is not a header's name")
            if any(ord(c) < 32 for c in value.get_secret_value()):
                raise ValueError(f"http_headers: the value of '{name}' has a control character")
            if name.lower() in ("authorization", "host", "content-length"):
                raise ValueError(f"http_headers: '{name}' can't be set here; use authorization or basic_auth")
        return self

    @property
    def tls_unverified(self) -> bool:
        """Any peer that answers is trusted."""
        return self.tls_config is not None and self.tls_config.insecure_skip_verify

    def client(self) -> ClientConfig:
        """Only this part, of a configuration that has more."""
        return ClientConfig(**{name: getattr(self, name) for name in ClientConfig.model_fields})
